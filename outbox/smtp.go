package outbox

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/mail"
	"slices"
	"strings"
	"time"

	"github.com/wneessen/go-mail/smtp"

	"github.com/grantd/grantd/store"
)

// mailTLS is how a connection to a mail server is protected.
type mailTLS string

const (
	// mailStartTLS turns the connection to TLS before anything else is said, and sends nothing where the server cannot.
	mailStartTLS mailTLS = "starttls"
	// mailImplicitTLS speaks TLS from the first byte, as port 465 does.
	mailImplicitTLS mailTLS = "implicit"
	// mailPlaintext is for a server on the same machine, and for tests.
	mailPlaintext mailTLS = "none"
)

// mailSettings is what a destination of kind smtp is made of, already checked.
type mailSettings struct {
	// addr is the server's host:port.
	addr string
	tls  mailTLS
	// tlsConfig's ServerName is the host's where it is empty.
	tlsConfig *tls.Config
	// hello is the name that EHLO gives.
	hello string
	// credentials are asked for at every connection, so that they may change; an empty user does not log in.
	credentials func() (user, password string, err error)
	from        *mail.Address
	replyTo     *mail.Address
	// domain is the right side of every Message-ID. Changing it changes none that was rendered before.
	domain   string
	template *mailTemplate
}

// mailSender sends mails by SMTP, a connection each. SMTP does not deduplicate: two servers that get the same Message-ID twice
// deliver it twice. So a mail whose fate is not known is never sent again by itself.
type mailSender struct {
	settings mailSettings
	dialer   net.Dialer
}

func newMailSender(settings mailSettings) *mailSender { return &mailSender{settings: settings} }

func (s *mailSender) close() {}

func (s *mailSender) render(d *store.Delivery) ([]byte, string, error) {
	if d.Notify == nil {
		return nil, "", errors.New("the request named nobody to notify")
	}
	to, err := mailAddress(d.Notify.Recipient)
	if err != nil {
		return nil, "", fmt.Errorf("the recipient %w", err)
	}
	entitlement, entry := &d.Event.Entitlement, &d.Event.Entry
	grant := &entitlement.Grant
	data := &MailData{
		TenantID: grant.TenantID, InvoiceID: grant.InvoiceID, EntitlementType: grant.EntitlementType,
		OperationVersion: grant.OperationVersion, Scope: grant.Scope,
		StartsAt: grant.StartsAt, EndsAt: entitlement.EndsAt, At: entry.At,
	}
	if grant.Quantity != nil {
		data.Quantity = *grant.Quantity
	}
	content, err := s.settings.template.render(entry.Kind, d.Notify.Locale, data)
	if err != nil {
		return nil, "", err
	}
	envelope := mailEnvelope{
		from: s.settings.from, replyTo: s.settings.replyTo, to: to, id: d.ID.String(), domain: s.settings.domain, date: entry.At,
	}
	body, err := envelope.message(content)
	return body, mailContentType, err
}

func (s *mailSender) send(ctx context.Context, d *store.Delivery) result {
	if d.Notify == nil {
		return result{verdict: permanent, reason: "the request named nobody to notify"}
	}
	to, err := mailAddress(d.Notify.Recipient)
	if err != nil {
		return result{verdict: permanent, reason: "the recipient " + err.Error()}
	}
	return mailResult(s.transmit(ctx, to.Address, d.Body))
}

// transmit says how far it came. The connection is not used twice: the next mail's fate shall not hang on what this one left.
func (s *mailSender) transmit(ctx context.Context, to string, message []byte) (mailStage, error) {
	conn, err := s.dial(ctx)
	if err != nil {
		return stageGreeting, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return stageGreeting, err
		}
	}
	// The deadline alone would not end a call when the process is told to stop.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	c, err := s.greet(conn)
	if err != nil {
		return stageGreeting, err
	}
	if err := c.Mail("<" + s.settings.from.Address + ">"); err != nil {
		return stageSender, err
	}
	if err := c.Rcpt("<" + to + ">"); err != nil {
		return stageRecipient, err
	}
	w, err := c.Data()
	if err != nil {
		return stageContents, err
	}
	if _, err := w.Write(message); err != nil {
		return stageContents, err
	}
	// All but the dot leaves first: what fails here is known to have failed.
	if err := c.Text.W.Flush(); err != nil {
		return stageContents, err
	}
	if err := w.Close(); err != nil {
		return stageCommitted, err
	}
	// The mail is out, however the good-bye goes; and that is to be recorded soon.
	_ = conn.SetDeadline(time.Now().Add(goodByeTimeout))
	_ = c.Quit()
	return stageCommitted, nil
}

const (
	goodByeTimeout = time.Second
	// maxMailAnswersBytes is far more than a session and its certificates take.
	maxMailAnswersBytes = 1 << 20
)

// boundedConn reads no more than is left: lines and answers may be of any length otherwise.
type boundedConn struct {
	net.Conn
	left int
}

func (c *boundedConn) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, errors.New("the server says too much")
	}
	n, err := c.Conn.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

func (s *mailSender) dial(ctx context.Context) (net.Conn, error) {
	plain, err := s.dialer.DialContext(ctx, "tcp", s.settings.addr)
	if err != nil {
		return nil, err
	}
	conn := &boundedConn{plain, maxMailAnswersBytes}
	if s.settings.tls != mailImplicitTLS {
		return conn, nil
	}
	secure := tls.Client(conn, s.tlsConfig())
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return secure, nil
}

func (s *mailSender) tlsConfig() *tls.Config {
	config := s.settings.tlsConfig.Clone()
	if config == nil {
		config = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if config.ServerName == "" {
		config.ServerName = s.host()
	}
	return config
}

func (s *mailSender) host() string {
	host, _, _ := net.SplitHostPort(s.settings.addr)
	return host
}

// greet does everything that comes before the first word about a mail.
func (s *mailSender) greet(conn net.Conn) (*smtp.Client, error) {
	c, err := smtp.NewClient(conn, s.host())
	if err != nil {
		return nil, err
	}
	if err := c.Hello(s.settings.hello); err != nil {
		return nil, err
	}
	if s.settings.tls == mailStartTLS {
		if ok, _ := c.Extension("STARTTLS"); !ok {
			return nil, errors.New("the server does not offer STARTTLS")
		}
		if err := c.StartTLS(s.tlsConfig()); err != nil {
			return nil, err
		}
	}
	user, password, err := s.settings.credentials()
	if err != nil {
		return nil, err
	}
	if user == "" {
		return c, nil
	}
	auth, err := s.auth(c, user, password)
	if err != nil {
		return nil, err
	}
	if err := c.Auth(auth); err != nil {
		// The server's text may repeat what it was sent.
		return nil, fmt.Errorf("the log-in failed%s", replyCode(err))
	}
	return c, nil
}

// auth takes the best mechanism of those that the server offers. Without TLS there is only SCRAM: PLAIN and LOGIN would show the
// password to whoever listens.
func (s *mailSender) auth(c *smtp.Client, user, password string) (smtp.Auth, error) {
	_, offered := c.Extension("AUTH")
	mechanisms := strings.Fields(strings.ToUpper(offered))
	offers := func(name string) bool { return slices.Contains(mechanisms, name) }
	switch {
	case offers("SCRAM-SHA-256"):
		return smtp.ScramSHA256Auth(user, password), nil
	case s.settings.tls == mailPlaintext:
		return nil, errors.New("a password is not sent without TLS")
	case offers("PLAIN"):
		return smtp.PlainAuth("", user, password, s.host(), false), nil
	case offers("LOGIN"):
		return smtp.LoginAuth(user, password, s.host(), false), nil
	}
	return nil, fmt.Errorf("the server offers no log-in that is known here, only %q", offered)
}
