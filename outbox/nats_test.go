package outbox_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/grantd/grantd/outbox"
)

// broker is a real NATS server with JetStream.
type broker struct {
	options *server.Options
	server  *server.Server
}

func newBroker(t *testing.T, change func(*server.Options)) *broker {
	t.Helper()
	b := &broker{options: &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	}}
	if change != nil {
		change(b.options)
	}
	b.start(t)
	t.Cleanup(func() { b.stop() })
	return b
}

// start also starts a broker that was stopped, where it was and with what it stored.
func (b *broker) start(t *testing.T) {
	t.Helper()
	s, err := server.NewServer(b.options.Clone())
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the broker does not start")
	}
	b.server = s
	b.options.Port = s.Addr().(*net.TCPAddr).Port
}

func (b *broker) stop() {
	b.server.Shutdown()
	b.server.WaitForShutdown()
}

func (b *broker) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", b.options.Port) }

// jetStream is the test's own connection.
func (b *broker) jetStream(t *testing.T, options ...nats.Option) jetstream.JetStream {
	t.Helper()
	conn, err := nats.Connect(b.url(), append(options, nats.NoReconnect())...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// stream makes the stream EVENTS, which takes entitlements.>.
func (b *broker) stream(t *testing.T, js jetstream.JetStream, change func(*jetstream.StreamConfig)) jetstream.Stream {
	t.Helper()
	config := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"entitlements.>"}, Storage: jetstream.FileStorage}
	if change != nil {
		change(&config)
	}
	stream, err := js.CreateOrUpdateStream(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func stored(t *testing.T, stream jetstream.Stream) uint64 {
	t.Helper()
	info, err := stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

func natsDestination(url, more string) string {
	return fmt.Sprintf(`
destinations:
  - name: products
    kind: nats
    internal: true
    timeout: 2s
    nats:
      servers: [%s]
      subject: entitlements.{event}
%s`, url, more)
}

func TestNATS_EventArrives(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	kind := openKind(t, natsDestination(b.url(), "      stream: EVENTS\n"), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != "" {
		t.Fatalf("got %+v", got)
	}
	m, err := stream.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if m.Subject != "entitlements.granted" || string(m.Data) != string(d.Body) {
		t.Errorf("got %s\n%s", m.Subject, m.Data)
	}
	for name, want := range map[string]string{
		"Nats-Msg-Id": d.Key, "Idempotency-Key": d.Key, "Content-Type": "application/cloudevents+json",
	} {
		if got := m.Header.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
}

// Baggage may hold anything that a caller ever put there. An internal destination is told the trace and the key, an external one
// nothing.
func TestNATS_TraceAndBaggage(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	for i, internal := range []bool{true, false} {
		text := natsDestination(b.url(), "")
		if !internal {
			text = strings.Replace(text, "internal: true", "internal: false", 1)
		}
		kind := openKind(t, text, nil)
		d := rendered(t, kind)
		if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" {
			t.Fatalf("got %+v", got)
		}
		m, err := stream.GetMsg(t.Context(), uint64(i+1))
		if err != nil {
			t.Fatal(err)
		}
		wantTrace, wantBaggage := "", ""
		if internal {
			wantTrace, wantBaggage = "00-01020300000000000000000000000000-", "entitlement.idempotency_key="
		}
		for name, want := range map[string]string{"traceparent": wantTrace, "baggage": wantBaggage} {
			got := m.Header.Get(name)
			if !strings.HasPrefix(got, want) || (want == "") != (got == "") || strings.Contains(got, ",") {
				t.Errorf("internal %v: %s is %q", internal, name, got)
			}
		}
	}
}

func TestNATS_AgainIsADuplicate(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	kind := openKind(t, natsDestination(b.url(), ""), nil)
	d := rendered(t, kind)
	const attempts = 32
	var wg sync.WaitGroup
	notes := make([]string, attempts)
	for i := range attempts {
		wg.Go(func() {
			got := kind.Send(within(t, time.Minute), d)
			if got.Verdict != "delivered" {
				t.Errorf("got %+v", got)
			}
			notes[i] = got.Note
		})
	}
	wg.Wait()
	first := 0
	for _, note := range notes {
		if note == "" {
			first++
		}
	}
	if first != 1 || stored(t, stream) != 1 {
		t.Errorf("%d attempts were the first, and the stream holds %d messages", first, stored(t, stream))
	}
}

// The acknowledgement is lost: the event may be there. The next attempt is told that it is.
func TestNATS_LostAcknowledgement(t *testing.T) {
	b := newBroker(t, nil)
	js := b.jetStream(t)
	stream := b.stream(t, js, func(c *jetstream.StreamConfig) { c.NoAck = true })
	kind := openKind(t, strings.Replace(natsDestination(b.url(), ""), "timeout: 2s", "timeout: 200ms", 1), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "uncertain" || !got.Unreachable {
		t.Fatalf("without an acknowledgement: got %+v", got)
	}
	b.stream(t, js, nil)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != "duplicate" {
		t.Errorf("again: got %+v", got)
	}
	if n := stored(t, stream); n != 1 {
		t.Errorf("the stream holds %d messages", n)
	}
}

// The stream's window has passed, and with it the memory of the message's id. Only with unique subjects the stream still knows the
// event.
func TestNATS_AfterTheWindow(t *testing.T) {
	for unique, want := range map[bool]string{true: "duplicate", false: ""} {
		t.Run(fmt.Sprint(unique), func(t *testing.T) {
			b := newBroker(t, nil)
			js := b.jetStream(t)
			stream := b.stream(t, js, nil)
			kind := openKind(t, natsDestination(b.url(), fmt.Sprintf("      unique_subjects: %v\n", unique)), nil)
			d := rendered(t, kind)
			subject := "entitlements.granted"
			if unique {
				subject += "." + d.Key
			}
			// As after the window: the message stands there, and its id is not known.
			if _, err := js.Publish(t.Context(), subject, d.Body); err != nil {
				t.Fatal(err)
			}
			if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != want {
				t.Errorf("got %+v, want the note %q", got, want)
			}
			if n := stored(t, stream); n != map[bool]uint64{true: 1, false: 2}[unique] {
				t.Errorf("the stream holds %d messages", n)
			}
		})
	}
}

// Nothing that an operator can mend at the broker is a reason to give an event up.
func TestNATS_WhatAFailureMeans(t *testing.T) {
	for name, test := range map[string]struct {
		stream func(*jetstream.StreamConfig)
		server func(*server.Options)
		more   string
		// mend makes the next attempt succeed; nil where nothing could.
		mend func(t *testing.T, b *broker, js jetstream.JetStream, stream jetstream.Stream)
		want outbox.Attempt
	}{
		"no stream": {
			stream: func(c *jetstream.StreamConfig) { c.Subjects = []string{"elsewhere.>"} },
			mend:   func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) { b.stream(t, js, nil) },
			want:   outbox.Attempt{Verdict: "transient", Unreachable: true, Reason: "no stream takes the subject"},
		},
		"another stream": {
			stream: func(c *jetstream.StreamConfig) { c.Name = "WRONG" },
			more:   "      stream: EVENTS\n",
			mend: func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) {
				if err := js.DeleteStream(t.Context(), "WRONG"); err != nil {
					t.Fatal(err)
				}
				b.stream(t, js, nil)
			},
			want: outbox.Attempt{Verdict: "transient", Unreachable: true, StatusCode: http.StatusBadRequest, Reason: "expected stream does not match"},
		},
		"the stream is full": {
			stream: func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 100, jetstream.DiscardNew },
			mend:   func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) { b.stream(t, js, nil) },
			want:   outbox.Attempt{Verdict: "transient", Unreachable: true, StatusCode: http.StatusServiceUnavailable, Reason: "maximum bytes exceeded"},
		},
		"too large for the stream": {
			stream: func(c *jetstream.StreamConfig) { c.MaxMsgSize = 100 },
			want:   outbox.Attempt{Verdict: "permanent", Reason: "message size exceeds maximum allowed"},
		},
		"too large for the server": {
			server: func(o *server.Options) { o.MaxPayload = 700 },
			want:   outbox.Attempt{Verdict: "permanent", Reason: "maximum payload exceeded"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t, test.server)
			js := b.jetStream(t)
			stream := b.stream(t, js, test.stream)
			kind := openKind(t, natsDestination(b.url(), test.more), nil)
			d := rendered(t, kind)
			got := kind.Send(within(t, time.Minute), d)
			if !strings.Contains(got.Reason, test.want.Reason) {
				t.Errorf("the reason is %q, want %q", got.Reason, test.want.Reason)
			}
			got.Reason = test.want.Reason
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if test.mend == nil {
				return
			}
			test.mend(t, b, js, stream)
			if got := kind.Send(within(t, time.Minute), d); got.Verdict != "delivered" {
				t.Errorf("mended: got %+v", got)
			}
		})
	}
}

// The broker is away at the start, comes, goes and comes back: each attempt fails at once while it is away, and nothing needs a
// restart of grantd.
func TestNATS_BrokerComesAndGoes(t *testing.T) {
	b := newBroker(t, nil)
	b.stream(t, b.jetStream(t), nil)
	b.stop()
	kind := openKind(t, natsDestination(b.url(), ""), nil)
	d := rendered(t, kind)
	away := func() {
		t.Helper()
		begin := time.Now()
		// Until the break is noticed, the publish goes nowhere: it may have arrived.
		if got := kind.Send(within(t, time.Minute), d); got.Verdict != "transient" && got.Verdict != "uncertain" || !got.Unreachable {
			t.Errorf("away: got %+v", got)
		}
		if took := time.Since(begin); took > 30*time.Second {
			t.Errorf("the attempt took %v", took)
		}
	}
	back := func(note string) {
		t.Helper()
		waitFor(t, func() (string, bool) {
			got := kind.Send(within(t, time.Minute), d)
			if got.Verdict == "delivered" && got.Note != note {
				t.Errorf("got %+v, want the note %q", got, note)
			}
			return got.Reason, got.Verdict == "delivered"
		})
	}
	away()
	b.start(t)
	back("")
	b.stop()
	away()
	b.start(t)
	back("duplicate")
}

// A broker that accepts and says nothing holds nobody longer than the destination's timeout, and the attempts that wait for the same
// connection no longer than their own.
func TestNATS_SilentBroker(t *testing.T) {
	silent := silentServer(t)
	kind := openKind(t, strings.Replace(natsDestination("nats://"+silent, ""), "timeout: 2s", "timeout: 300ms", 1), nil)
	d := rendered(t, kind)
	var wg sync.WaitGroup
	begin := time.Now()
	for range 8 {
		wg.Go(func() {
			if got := kind.Send(within(t, time.Minute), d); got.Verdict != "transient" || !got.Unreachable {
				t.Errorf("got %+v", got)
			}
		})
	}
	wg.Wait()
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("the attempts took %v", took)
	}
}

func TestNATS_LogIn(t *testing.T) {
	certificate, ca := serverCertificate(t)
	secure := func(o *server.Options) {
		o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
		o.TLSTimeout = 5
	}
	trusted := "      tls: {ca_file: " + ca + "}\n"
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	seedFile := filepath.Join(t.TempDir(), "user.nk")
	if err := os.WriteFile(seedFile, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		server func(*server.Options)
		more   string
		env    map[string]string
		want   string
		reason string
	}{
		"user and password": {
			server: func(o *server.Options) { secure(o); o.Username, o.Password = "grantd", "correct horse" },
			more:   trusted + "      user: grantd\n      password: {env: SECRET}\n", env: map[string]string{"SECRET": "correct horse"}, want: "delivered",
		},
		"wrong password": {
			server: func(o *server.Options) { secure(o); o.Username, o.Password = "grantd", "correct horse" },
			more:   trusted + "      user: grantd\n      password: {env: SECRET}\n", env: map[string]string{"SECRET": "battery staple"},
			want: "transient", reason: "Authorization Violation",
		},
		"token": {
			server: func(o *server.Options) { secure(o); o.Authorization = "correct horse" },
			more:   trusted + "      token: {env: SECRET}\n", env: map[string]string{"SECRET": "correct horse"}, want: "delivered",
		},
		"nkey": {
			server: func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} },
			more:   "      nkey_file: " + seedFile + "\n", want: "delivered",
		},
		"unknown authority": {server: secure, more: "      tls: {}\n", want: "transient", reason: "certificate"},
		"no TLS on offer":   {more: trusted, want: "transient", reason: "secure connection not available"},
		"no right to publish": {
			server: func(o *server.Options) {
				o.Users = []*server.User{
					{Username: "grantd", Password: "correct horse", Permissions: &server.Permissions{
						Publish: &server.SubjectPermission{Deny: []string{"entitlements.>"}},
					}},
				}
			},
			more: "      user: grantd\n      password: {env: SECRET}\n", env: map[string]string{"SECRET": "correct horse"},
			want: "uncertain", reason: "permissions violation",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t, test.server)
			kind := openKind(t, natsDestination(b.url(), test.more), test.env)
			if test.want == "delivered" {
				options := []nats.Option{nats.UserInfo("grantd", "correct horse")}
				switch {
				case b.options.Authorization != "":
					options = []nats.Option{nats.Token("correct horse")}
				case len(b.options.Nkeys) > 0:
					option, err := nats.NkeyOptionFromSeed(seedFile)
					if err != nil {
						t.Fatal(err)
					}
					options = []nats.Option{option}
				}
				if b.options.TLSConfig != nil {
					options = append(options, nats.RootCAs(ca))
				}
				b.stream(t, b.jetStream(t, options...), nil)
			}
			got := kind.Send(within(t, 5*time.Second), rendered(t, kind))
			if got.Verdict != test.want || !strings.Contains(strings.ToLower(got.Reason), strings.ToLower(test.reason)) || got.Unreachable != (test.want != "delivered") {
				t.Errorf("got %+v, want %s because of %q", got, test.want, test.reason)
			}
			if secret := test.env["SECRET"]; secret != "" && strings.Contains(got.Reason, secret) {
				t.Errorf("the reason holds the secret: %s", got.Reason)
			}
		})
	}
}

// The broker's password changes while grantd runs. The file has the new one; the sender finds its way without a restart.
func TestNATS_PasswordChanges(t *testing.T) {
	b := newBroker(t, func(o *server.Options) { o.Username, o.Password = "grantd", "old" })
	b.stream(t, b.jetStream(t, nats.UserInfo("grantd", "old")), nil)
	file := filepath.Join(t.TempDir(), "password")
	write := func(password string) {
		if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	kind := openKind(t, natsDestination(b.url(), "      user: grantd\n      password: {file: "+file+"}\n"), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" {
		t.Fatalf("got %+v", got)
	}
	b.stop()
	b.options.Password = "new"
	b.start(t)
	// The old one is refused, more than once.
	waitFor(t, func() (string, bool) {
		got := kind.Send(within(t, 5*time.Second), d)
		return got.Reason, strings.Contains(got.Reason, "Authorization")
	})
	write("new")
	waitFor(t, func() (string, bool) {
		got := kind.Send(within(t, 5*time.Second), d)
		return got.Reason, got.Verdict == "delivered"
	})
}

// waitFor tries until it is done, and fails with the last state after half a minute.
func waitFor(t *testing.T, try func() (state string, done bool)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		state, done := try()
		if done {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("still: %s", state)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
