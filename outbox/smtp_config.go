package outbox

import (
	"crypto/tls"
	"fmt"
	"io/fs"
	"net"
	"net/mail"
	"os"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// mailSection is what the file says of a destination of kind smtp.
type mailSection struct {
	addr            string
	tls             mailTLS
	ca              string
	hello           string
	user            string
	password        *secret
	from, replyTo   *mail.Address
	messageIDDomain string
	templateName    string
	templateDir     string
	defaultLocale   string
}

const (
	knownSMTP = "addr, tls, ca_file, hello, user, password, from, reply_to, message_id_domain, template, template_dir and default_locale"

	ruleAddr     = "must be host:port"
	ruleMailTLS  = "must be starttls, implicit or none"
	ruleAddress  = "must be one mail address, with or without a name"
	ruleDomain   = "must be a domain name"
	ruleTemplate = "must be a lower-case letter, then at most 62 of a-z 0-9 _ and -"
	ruleLocale   = "must be a locale, like en or pt-BR"

	defaultTemplate = "entitlement"
	defaultLocale   = "en"
)

var (
	mailTLSPattern = regexp.MustCompile(`^(starttls|implicit|none)$`)
	domainPattern  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$`)
	localePattern  = regexp.MustCompile(`^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*$`)
)

func readSMTP(f field) section {
	s := &mailSection{tls: mailStartTLS, templateName: defaultTemplate, defaultLocale: defaultLocale}
	f.fields(knownSMTP, func(name string, f field) bool {
		switch name {
		case "addr":
			s.addr = f.text()
			if host, port, err := net.SplitHostPort(s.addr); s.addr != "" && (err != nil || host == "" || port == "") {
				f.refuse(ruleAddr)
			}
		case "tls":
			s.tls = mailTLS(f.match(mailTLSPattern, ruleMailTLS))
		case "ca_file":
			s.ca = f.text()
		case "hello":
			s.hello = f.match(domainPattern, ruleDomain)
		case "user":
			s.user = f.text()
		case "password":
			p := f.secret()
			s.password = &p
		case "from":
			s.from = f.mailAddress()
		case "reply_to":
			s.replyTo = f.mailAddress()
		case "message_id_domain":
			s.messageIDDomain = f.match(domainPattern, ruleDomain)
		case "template":
			s.templateName = f.match(namePattern, ruleTemplate)
		case "template_dir":
			s.templateDir = f.text()
		case "default_locale":
			s.defaultLocale = f.match(localePattern, ruleLocale)
		default:
			return false
		}
		return true
	})
	if f.value.Kind != yaml.MappingNode {
		return s
	}
	switch {
	case s.addr == "":
		f.missing("addr")
	case s.from == nil:
		f.missing("from")
	case (s.user == "") != (s.password == nil):
		f.refuse("user and password go together")
	case s.ca != "" && s.tls == mailPlaintext:
		f.refuse("ca_file contradicts tls: none")
	}
	return s
}

func (f field) mailAddress() *mail.Address {
	address, err := mailAddress(f.text())
	if err != nil {
		f.refuse(ruleAddress)
		return nil
	}
	return address
}

// template is part of what may happen once: a mail per recipient, template and event.
func (s *mailSection) template() string { return s.templateName }

func (s *mailSection) open(_ *Destination, in surroundings) (sender, error) {
	template, err := s.readTemplate()
	if err != nil {
		return nil, err
	}
	settings := mailSettings{
		addr: s.addr, tls: s.tls, tlsConfig: &tls.Config{MinVersion: tls.VersionTLS12},
		from: s.from, replyTo: s.replyTo, domain: s.messageIDDomain, hello: s.hello, template: template,
		credentials: func() (string, string, error) { return "", "", nil },
	}
	if settings.domain == "" {
		settings.domain = s.from.Address[strings.LastIndexByte(s.from.Address, '@')+1:]
	}
	if settings.hello == "" {
		settings.hello = settings.domain
	}
	if s.ca != "" {
		if settings.tlsConfig.RootCAs, err = readAuthorities(s.ca); err != nil {
			return nil, err
		}
	}
	if s.password == nil {
		return newMailSender(settings), nil
	}
	if _, err := s.password.read(in.getenv); err != nil {
		return nil, err
	}
	settings.credentials = func() (string, string, error) {
		password, err := s.password.read(in.getenv)
		return s.user, password, err
	}
	return newMailSender(settings), nil
}

func (s *mailSection) readTemplate() (*mailTemplate, error) {
	var files fs.FS = os.DirFS(s.templateDir)
	from := s.templateDir
	if s.templateDir == "" {
		from = "the template " + s.templateName
		var err error
		if files, err = fs.Sub(builtinTemplates, "templates/"+s.templateName); err != nil {
			return nil, err
		}
		if _, err := fs.Stat(files, "."); err != nil {
			return nil, fmt.Errorf("%s is not built in: template_dir must name its folder", from)
		}
	}
	t, err := readMailTemplate(files, s.defaultLocale)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return t, nil
}
