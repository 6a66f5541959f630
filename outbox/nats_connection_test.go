package outbox_test

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/grantd/grantd/outbox"
)

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

// The network forgets the connection without a word, and the broker is as well as ever. nats.go noticed after some minutes; until then every
// publish went nowhere.
func TestNATS_ForgottenConnection(t *testing.T) {
	b := newBroker(t, nil)
	b.stream(t, b.jetStream(t), nil)
	proxy := serveDeaf(t, strings.TrimPrefix(b.url(), "nats://"))
	kind := openKind(t, strings.Replace(natsDestination("nats://"+proxy.addr, ""), "timeout: 2s", "timeout: 300ms", 1), nil)
	proxy.deliversAfterTheFall(t, kind)
}

// The broker reads no more, and the buffers on the way are full. nats.go waits for a minute in its write, with a lock that all who publish
// need, whatever their deadlines.
func TestNATS_FullBuffers(t *testing.T) {
	b := newBroker(t, nil)
	b.stream(t, b.jetStream(t), nil)
	proxy := serveDeaf(t, strings.TrimPrefix(b.url(), "nats://"))
	kind := openKind(t, strings.Replace(natsDestination("nats://"+proxy.addr, ""), "timeout: 2s", "timeout: 300ms", 1), nil)
	if got := kind.Send(within(t, 10*time.Second), rendered(t, kind)); got.Verdict != "delivered" {
		t.Fatalf("got %+v", got)
	}
	proxy.fall()
	const attempts = 32
	ended := make(chan struct{}, attempts)
	for range attempts {
		d := rendered(t, kind)
		d.Body = make([]byte, 900<<10)
		go func() { kind.Send(within(t, 10*time.Second), d); ended <- struct{}{} }()
	}
	patience := time.After(30 * time.Second)
	for range attempts {
		select {
		case <-ended:
		case <-patience:
			t.Fatal("an attempt does not end")
		}
	}
}

// A server accepts and says nothing when the process is told to stop. nats.go would wait for the whole of its timeout: the grace is shorter.
func TestNATS_StopWaitsForNoConnection(t *testing.T) {
	b := setup(t, strings.Replace(natsDestination("nats://"+silentServer(t), ""), "timeout: 2s", "timeout: 5m\n    deadline: 5m", 1))
	r := b.start(func(c *outbox.Config) { c.Grace = time.Millisecond })
	b.grant("acme", "INV-1", "team_access")
	b.awaitState("products", sending, 1)
	r.awaitStop(t)
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
