package outbox_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"mime"
	"mime/multipart"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
)

// mailServer is a real SMTP server that fails where a test says.
type mailServer struct {
	addr string

	mu       sync.Mutex
	mails    []receivedMail
	sessions int

	onGreet, onMail, onRcpt error
	// onData is called with the mail's content after its final dot, and onDataStart before any of it was read.
	onData      func(s *mailSession) error
	onDataStart func(s *mailSession) error
}

type receivedMail struct {
	from, to string
	content  []byte
}

type mailSession struct {
	server *mailServer
	conn   *smtp.Conn
	mail   receivedMail
}

func (s *mailSession) Reset()        {}
func (s *mailSession) Logout() error { return nil }

func (s *mailSession) Mail(from string, _ *smtp.MailOptions) error {
	s.mail.from = from
	return s.server.onMail
}

func (s *mailSession) Rcpt(to string, _ *smtp.RcptOptions) error {
	s.mail.to = to
	return s.server.onRcpt
}

func (s *mailSession) Data(r io.Reader) (err error) {
	if s.server.onDataStart != nil {
		if err := s.server.onDataStart(s); err != nil {
			return err
		}
	}
	if s.mail.content, err = io.ReadAll(r); err != nil {
		return err
	}
	if s.server.onData != nil {
		if err := s.server.onData(s); err != nil {
			return err
		}
	}
	s.accept()
	return nil
}

func (s *mailSession) accept() {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.server.mails = append(s.server.mails, s.mail)
}

func (s *mailSession) AuthMechanisms() []string { return []string{sasl.Plain} }

func (s *mailSession) Auth(string) (sasl.Server, error) {
	return sasl.NewPlainServer(func(_, user, password string) error {
		if user != "grantd" || password != "correct horse" {
			return fmt.Errorf("no log-in with %s", password)
		}
		return nil
	}), nil
}

func (m *mailServer) received() []receivedMail {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]receivedMail(nil), m.mails...)
}

// serveMail starts the server; secure, which may be nil, makes it offer STARTTLS.
func serveMail(t *testing.T, m *mailServer, secure *tls.Config, implicit bool) {
	t.Helper()
	server := smtp.NewServer(smtp.BackendFunc(func(c *smtp.Conn) (smtp.Session, error) {
		m.mu.Lock()
		m.sessions++
		m.mu.Unlock()
		return &mailSession{server: m, conn: c}, m.onGreet
	}))
	server.Domain = "mail.test"
	server.TLSConfig = secure
	server.ErrorLog = log.New(io.Discard, "", 0)
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m.addr = listener.Addr().String()
	if implicit {
		listener = tls.NewListener(listener, secure)
	}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
}

func mailDestination(addr, more string) string {
	return fmt.Sprintf(`
destinations:
  - name: customer
    kind: smtp
    smtp:
      addr: %s
      from: Billing <billing@shop.example>
%s`, addr, more)
}

const plaintext = "      tls: none\n"

func TestSMTP_MailArrivesOnceWithBothParts(t *testing.T) {
	m := &mailServer{}
	serveMail(t, m, nil, false)
	kind := openKind(t, mailDestination(m.addr, plaintext+"      reply_to: help@shop.example\n"), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" {
		t.Fatalf("got %+v", got)
	}
	mails := m.received()
	if len(mails) != 1 || mails[0].from != "billing@shop.example" || mails[0].to != "ann@example.com" {
		t.Fatalf("got %+v", mails)
	}
	if !bytes.Equal(bytes.TrimRight(mails[0].content, "\r\n"), bytes.TrimRight(d.Body, "\r\n")) {
		t.Errorf("the server got other bytes than were stored:\n%s\n\n%s", mails[0].content, d.Body)
	}
	message, err := mail.ReadMessage(bytes.NewReader(mails[0].content))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"Message-Id":       "<" + d.ID.String() + "@shop.example>",
		"Date":             "Sun, 01 Mar 2026 12:30:00 +0000",
		"From":             `"Billing" <billing@shop.example>`,
		"To":               `"Ann" <ann@example.com>`,
		"Reply-To":         "<help@shop.example>",
		"Subject":          "Ihr Zugang zu team_access ist aktiv",
		"Content-Language": "de",
		"Auto-Submitted":   "auto-generated",
	} {
		if got := message.Header.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	parts := alternatives(t, message)
	for _, want := range []string{"INV-1", "für acme aktiv", "Anzahl: 10", "region: eu", "Gültig bis: 2027-03-01 12:30 UTC"} {
		if !strings.Contains(parts["text/plain"], want) {
			t.Errorf("the text lacks %q:\n%s", want, parts["text/plain"])
		}
	}
	if !strings.Contains(parts["text/html"], "<strong>team_access</strong> ist jetzt für acme aktiv") {
		t.Errorf("the HTML is\n%s", parts["text/html"])
	}
}

func alternatives(t *testing.T, message *mail.Message) map[string]string {
	t.Helper()
	mediaType, parameters, err := mime.ParseMediaType(message.Header.Get("Content-Type"))
	if err != nil || mediaType != "multipart/alternative" {
		t.Fatalf("%s, %v", mediaType, err)
	}
	parts := make(map[string]string)
	for r := multipart.NewReader(message.Body, parameters["boundary"]); ; {
		part, err := r.NextRawPart()
		if errors.Is(err, io.EOF) {
			return parts
		}
		if err != nil {
			t.Fatal(err)
		}
		name, _, err := mime.ParseMediaType(part.Header.Get("Content-Type"))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(quotedprintable.NewReader(part))
		if err != nil {
			t.Fatal(err)
		}
		parts[name] = string(text)
	}
}

func TestSMTP_TheSameEntryMakesTheSameBytes(t *testing.T) {
	d := newDelivery()
	var bodies [2][]byte
	for i := range bodies {
		kind := openKind(t, mailDestination("127.0.0.1:25", plaintext), nil)
		if err := kind.Render(d); err != nil {
			t.Fatal(err)
		}
		bodies[i] = d.Body
	}
	if !bytes.Equal(bodies[0], bodies[1]) {
		t.Errorf("rendered twice:\n%s\n\n%s", bodies[0], bodies[1])
	}
}

// A mail that went out twice cannot be called back. So only where the server's own answer, or the missing final dot, says that it has
// not taken the mail, may it be sent again.
func TestSMTP_WhatAFailureMeans(t *testing.T) {
	reply := func(code int) error { return &smtp.SMTPError{Code: code, Message: "said the test"} }
	drop := func(s *mailSession) error { return s.conn.Conn().Close() }
	for name, test := range map[string]struct {
		server *mailServer
		want   outbox.Attempt
		// taken is how many mails the server holds afterwards, whatever grantd knows of it.
		taken int
	}{
		"the server is full": {
			server: &mailServer{onGreet: reply(421)}, want: outbox.Attempt{Verdict: "transient", StatusCode: 421, Unreachable: true},
		},
		"the server takes nothing": {
			server: &mailServer{onGreet: reply(554)}, want: outbox.Attempt{Verdict: "transient", StatusCode: 554, Unreachable: true},
		},
		"the sender is refused, as for every mail": {
			server: &mailServer{onMail: reply(550)}, want: outbox.Attempt{Verdict: "transient", StatusCode: 550, Unreachable: true},
		},
		"the recipient is to be tried later": {
			server: &mailServer{onRcpt: reply(450)}, want: outbox.Attempt{Verdict: "transient", StatusCode: 450},
		},
		"the recipient does not exist": {
			server: &mailServer{onRcpt: reply(550)}, want: outbox.Attempt{Verdict: "permanent", StatusCode: 550},
		},
		"the server stops in between": {
			server: &mailServer{onRcpt: reply(421)}, want: outbox.Attempt{Verdict: "transient", StatusCode: 421, Unreachable: true},
		},
		"the content is to be tried later": {
			server: &mailServer{onData: func(*mailSession) error { return reply(451) }}, want: outbox.Attempt{Verdict: "transient", StatusCode: 451},
		},
		"the content is refused": {
			server: &mailServer{onData: func(*mailSession) error { return reply(554) }}, want: outbox.Attempt{Verdict: "permanent", StatusCode: 554},
		},
		"the connection breaks after the final dot, and the mail is taken": {
			server: &mailServer{onData: func(s *mailSession) error { s.accept(); return errors.Join(drop(s), reply(451)) }},
			want:   outbox.Attempt{Verdict: "uncertain"}, taken: 1,
		},
		"the connection breaks after the final dot, and the mail is lost": {
			server: &mailServer{onData: func(s *mailSession) error { return errors.Join(drop(s), reply(451)) }},
			want:   outbox.Attempt{Verdict: "uncertain"},
		},
		"no answer comes after the final dot": {
			server: &mailServer{onData: func(s *mailSession) error { return untilGone(s) }}, want: outbox.Attempt{Verdict: "uncertain"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			serveMail(t, test.server, nil, false)
			kind := openKind(t, mailDestination(test.server.addr, plaintext), nil)
			got := kind.Send(within(t, time.Second), rendered(t, kind))
			if got.Reason == "" {
				t.Error("no reason is given")
			}
			got.Reason = ""
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if taken := len(test.server.received()); taken != test.taken {
				t.Errorf("the server took %d mails, want %d", taken, test.taken)
			}
		})
	}
}

// untilGone waits for the client to hang up.
func untilGone(s *mailSession) error {
	_, err := s.conn.Conn().Read(make([]byte, 1))
	return err
}

// A connection that breaks while the content is under way: no final dot has left, so no server may have taken the mail. The mail is
// larger than all buffers on the way, so that the break falls into it.
func TestSMTP_BreakWithinTheContentIsTransient(t *testing.T) {
	m := &mailServer{onDataStart: func(s *mailSession) error {
		s.conn.Conn().(*net.TCPConn).SetLinger(0)
		return s.conn.Conn().Close()
	}}
	serveMail(t, m, nil, false)
	kind := openKind(t, mailDestination(m.addr, plaintext), nil)
	d := rendered(t, kind)
	d.Body = append(d.Body, bytes.Repeat([]byte(strings.Repeat("x", 70)+"\r\n"), 500_000)...)
	if got := kind.Send(within(t, 20*time.Second), d); got.Verdict != "transient" || !got.Unreachable {
		t.Errorf("got %+v", got)
	}
}

func TestSMTP_NobodyThere(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	listener.Close()
	kind := openKind(t, mailDestination(addr, plaintext), nil)
	if got := kind.Send(within(t, 5*time.Second), rendered(t, kind)); got.Verdict != "transient" || !got.Unreachable {
		t.Errorf("got %+v", got)
	}
}

// A server that accepts connections and says nothing holds an attempt no longer than its deadline, and a stop of the process not even
// that long.
func TestSMTP_SilentServer(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	kind := openKind(t, mailDestination(listener.Addr().String(), plaintext), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 100*time.Millisecond), d); got.Verdict != "transient" || !got.Unreachable {
		t.Errorf("at the deadline: got %+v", got)
	}
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	go func() {
		if conn, err := listener.Accept(); err == nil {
			defer conn.Close()
			cancel()
			io.Copy(io.Discard, conn)
		}
	}()
	if got := kind.Send(ctx, d); got.Verdict != "transient" || !got.Unreachable {
		t.Errorf("when told to stop: got %+v", got)
	}
}

func TestSMTP_TLSAndLogIn(t *testing.T) {
	certificate, ca := serverCertificate(t)
	secure := &tls.Config{Certificates: []tls.Certificate{certificate}}
	logIn := "      user: grantd\n      password: {env: MAIL_PASSWORD}\n"
	right := map[string]string{"MAIL_PASSWORD": "correct horse"}
	trusted := "      ca_file: " + ca + "\n"
	for name, test := range map[string]struct {
		secure   *tls.Config
		implicit bool
		more     string
		env      map[string]string
		want     string
		reason   string
	}{
		"starttls":                {secure: secure, more: trusted + logIn, env: right, want: "delivered"},
		"implicit":                {secure: secure, implicit: true, more: "      tls: implicit\n" + trusted + logIn, env: right, want: "delivered"},
		"unknown authority":       {secure: secure, more: logIn, env: right, want: "transient", reason: "certificate"},
		"no STARTTLS on offer":    {more: logIn, env: right, want: "transient", reason: "does not offer STARTTLS"},
		"wrong password":          {secure: secure, more: trusted + logIn, env: map[string]string{"MAIL_PASSWORD": "battery staple"}, want: "transient", reason: "the log-in failed"},
		"no password without TLS": {more: plaintext + logIn, env: right, want: "transient", reason: "not sent without TLS"},
		"no log-in":               {secure: secure, more: trusted, want: "delivered"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &mailServer{}
			serveMail(t, m, test.secure, test.implicit)
			kind := openKind(t, mailDestination(m.addr, test.more), test.env)
			got := kind.Send(within(t, 5*time.Second), rendered(t, kind))
			if got.Verdict != test.want || !strings.Contains(got.Reason, test.reason) || got.Unreachable != (test.want != "delivered") {
				t.Errorf("got %+v, want %s because of %q", got, test.want, test.reason)
			}
			for _, secret := range test.env {
				if strings.Contains(got.Reason, secret) {
					t.Errorf("the reason holds the password: %s", got.Reason)
				}
			}
			if want := map[bool]int{true: 1}[test.want == "delivered"]; len(m.received()) != want {
				t.Errorf("%d mails were taken", len(m.received()))
			}
		})
	}
}

func TestSMTP_Render(t *testing.T) {
	kind := openKind(t, mailDestination("127.0.0.1:25", plaintext), nil)
	t.Run("an unknown language falls back", func(t *testing.T) {
		for locale, want := range map[string]string{"": "en", "xx": "en", "not a locale": "en", "en-GB": "en", "de": "de", "de-CH": "de", "ja": "en"} {
			d := newDelivery()
			d.Notify.Locale = locale
			if err := kind.Render(d); err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(d.Body, []byte("Content-Language: "+want+"\r\n")) {
				t.Errorf("%q: got\n%s", locale, d.Body)
			}
		}
	})
	t.Run("each kind of event has its mail", func(t *testing.T) {
		subjects := make(map[string]bool)
		for n := range entitlementv1.EntryKind_name {
			d := newDelivery()
			d.Event.Entry.Kind = entitlementv1.EntryKind(n)
			err := kind.Render(d)
			if n == 0 {
				if err == nil {
					t.Error("an unspecified event has a mail")
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			message, err := mail.ReadMessage(bytes.NewReader(d.Body))
			if err != nil {
				t.Fatal(err)
			}
			subjects[message.Header.Get("Subject")] = true
		}
		if len(subjects) != len(entitlementv1.EntryKind_name)-1 {
			t.Errorf("the subjects are %v", subjects)
		}
	})
	t.Run("what a tenant is called stays text", func(t *testing.T) {
		d := newDelivery()
		d.Event.Entitlement.Grant.EntitlementType = `<script>"&`
		if err := kind.Render(d); err != nil {
			t.Fatal(err)
		}
		message, err := mail.ReadMessage(bytes.NewReader(d.Body))
		if err != nil {
			t.Fatal(err)
		}
		parts := alternatives(t, message)
		if !strings.Contains(parts["text/plain"], `<script>"&`) || strings.Contains(parts["text/html"], "<script>") {
			t.Errorf("got %v", parts)
		}
	})
	t.Run("no header is smuggled in", func(t *testing.T) {
		for _, recipient := range []string{
			"", "ann", "ann@example.com\r\nBcc: eve@example.com", "ann@example.com, eve@example.com", "a@example.com>\nRCPT TO:<eve@example.com",
			`"a> SIZE=1 <b"@example.com`,
		} {
			d := newDelivery()
			d.Notify.Recipient = recipient
			if err := kind.Render(d); err == nil {
				t.Errorf("%q is taken:\n%s", recipient, d.Body)
			}
		}
		d := newDelivery()
		d.Event.Entitlement.Grant.InvoiceID = "INV\r\nBcc: eve@example.com\r\n\r\nhello"
		if err := kind.Render(d); err != nil {
			t.Fatal(err)
		}
		if message, err := mail.ReadMessage(bytes.NewReader(d.Body)); err != nil || message.Header.Get("Bcc") != "" {
			t.Errorf("%v:\n%s", err, d.Body)
		}
	})
	t.Run("nobody to notify", func(t *testing.T) {
		d := newDelivery()
		d.Notify = nil
		if err := kind.Render(d); err == nil {
			t.Error("it was rendered")
		}
	})
}
