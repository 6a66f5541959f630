package outbox

import (
	"crypto/tls"
	"fmt"
	"net/url"
	"os"
	"regexp"

	"github.com/nats-io/nats.go"
	"go.yaml.in/yaml/v3"
)

// natsSection is what the file says of a destination of kind nats.
type natsSection struct {
	servers        []*url.URL
	subject        string
	stream         string
	uniqueSubjects bool
	inboxPrefix    string

	credentialsFile string
	nkeyFile        string
	user            string
	password        *secret
	token           *secret

	ca, cert, key string
	secure        bool
}

const (
	knownNATS = "servers, subject, stream, unique_subjects, inbox_prefix, credentials_file, nkey_file, user, password, token and tls"

	ruleSubject = "must be a subject like entitlements.{event}: words of letters, digits, _ and -, with dots between them"
	ruleStream  = "must be the name of a stream: letters, digits, _ and -"
	ruleLogIn   = "at most one of credentials_file, nkey_file, token, and user with password may be given"
	ruleSecure  = "needs TLS, so that the %s is not readable on the way: give tls:// servers or the field tls"
)

var (
	subjectPattern = regexp.MustCompile(`^([A-Za-z0-9_-]+|\{event\})(\.([A-Za-z0-9_-]+|\{event\}))*$`)
	streamPattern  = regexp.MustCompile(`^[A-Za-z0-9_-]{1,255}$`)
)

func readNATS(f field) section {
	n := &natsSection{}
	var servers, logIn *field
	ways := 0
	f.fields(knownNATS, func(name string, f field) bool {
		switch name {
		case "servers":
			servers = &f
			f.items(func(f field) {
				if u := f.url("nats", "tls"); u != nil {
					n.servers = append(n.servers, u)
				}
			})
		case "subject":
			n.subject = f.match(subjectPattern, ruleSubject)
		case "stream":
			n.stream = f.match(streamPattern, ruleStream)
		case "unique_subjects":
			n.uniqueSubjects = f.bool()
		case "inbox_prefix":
			n.inboxPrefix = f.match(subjectPattern, ruleSubject)
		case "credentials_file":
			n.credentialsFile, logIn, ways = f.text(), &f, ways+1
		case "nkey_file":
			n.nkeyFile, logIn, ways = f.text(), &f, ways+1
		case "token":
			s := f.secret()
			n.token, logIn, ways = &s, &f, ways+1
		case "user":
			n.user, logIn, ways = f.text(), &f, ways+1
		case "password":
			s := f.secret()
			n.password = &s
		case "tls":
			n.secure = true
			readTLSFiles(f, &n.ca, &n.cert, &n.key)
		default:
			return false
		}
		return true
	})
	if f.value.Kind != yaml.MappingNode {
		return n
	}
	switch {
	case servers == nil || len(n.servers) == 0:
		f.missing("servers")
	case n.subject == "":
		f.missing("subject")
	case (n.user == "") != (n.password == nil):
		f.refuse("user and password go together")
	case ways > 1:
		logIn.refuse(ruleLogIn)
	case n.token != nil && !n.protected():
		logIn.refuse(fmt.Sprintf(ruleSecure, "token"))
	case n.password != nil && !n.protected():
		logIn.refuse(fmt.Sprintf(ruleSecure, "password"))
	}
	return n
}

// protected reports whether what is sent to each of the servers is encrypted or stays on the machine.
func (n *natsSection) protected() bool {
	for _, u := range n.servers {
		if !n.secure && u.Scheme != "tls" && !isLoopback(u.Hostname()) {
			return false
		}
	}
	return true
}

func (n *natsSection) open(d *Destination, in surroundings) (sender, error) {
	settings := natsSettings{subject: n.subject, stream: n.stream, uniqueSubjects: n.uniqueSubjects, ackTimeout: d.Timeout}
	for _, u := range n.servers {
		settings.servers = append(settings.servers, u.String())
	}
	var err error
	if settings.options, err = n.options(in.getenv); err != nil {
		return nil, err
	}
	return newNATSSender(d, settings, in.log), nil
}

// options reads every secret and certificate once, so that a missing one stops the start. Each is read again whenever the
// connection is made anew.
func (n *natsSection) options(getenv func(string) string) ([]nats.Option, error) {
	var options []nats.Option
	if n.inboxPrefix != "" {
		options = append(options, nats.CustomInboxPrefix(n.inboxPrefix))
	}
	switch {
	case n.credentialsFile != "":
		if _, err := os.Stat(n.credentialsFile); err != nil {
			return nil, err
		}
		options = append(options, nats.UserCredentials(n.credentialsFile))
	case n.nkeyFile != "":
		option, err := nats.NkeyOptionFromSeed(n.nkeyFile)
		if err != nil {
			return nil, fmt.Errorf("the file %s holds no nkey seed", n.nkeyFile)
		}
		options = append(options, option)
	case n.token != nil:
		if _, err := n.token.read(getenv); err != nil {
			return nil, err
		}
		options = append(options, nats.TokenHandler(func() string { return orNothing(n.token.read(getenv)) }))
	case n.password != nil:
		if _, err := n.password.read(getenv); err != nil {
			return nil, err
		}
		options = append(options, nats.UserInfoHandler(func() (string, string) { return n.user, orNothing(n.password.read(getenv)) }))
	}
	if !n.secure {
		return options, nil
	}
	options = append(options, nats.Secure())
	if n.ca != "" {
		if _, err := readAuthorities(n.ca); err != nil {
			return nil, err
		}
		options = append(options, nats.RootCAs(n.ca))
	}
	if n.cert != "" {
		if _, err := tls.LoadX509KeyPair(n.cert, n.key); err != nil {
			return nil, err
		}
		options = append(options, nats.ClientCert(n.cert, n.key))
	}
	return options, nil
}

// orNothing is for callbacks that cannot fail: the server refuses an empty secret, and the attempt says so.
func orNothing(value string, err error) string {
	if err != nil {
		return ""
	}
	return value
}
