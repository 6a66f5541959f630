package outbox_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/grantd/grantd/outbox"
)

// A receiver answers that it changes the protocol, which nobody asked for, and says no more. The connection is then the caller's, and no
// deadline ended the wait for an answer's text: the attempt hung for ever, and with it the stop of the process.
func TestWebhook_UnaskedUpgrade(t *testing.T) {
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	r := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		<-release
		conn.Close()
	})
	kind := webhook(t, r, "deduplicates: true", "")
	d := rendered(t, kind)
	ended := make(chan string, 1)
	go func() { ended <- kind.Send(within(t, 500*time.Millisecond), d).Verdict }()
	select {
	case verdict := <-ended:
		if verdict != "transient" {
			t.Errorf("it is %s", verdict)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the attempt outlasts its deadline")
	}
}

// deaf is a proxy to a receiver that reads no more of the connections it has, once it is told to; they stay open, as behind a firewall that
// has forgotten them. New ones are as good as ever.
type deaf struct {
	addr  string
	mu    sync.Mutex
	since time.Time
}

func serveDeaf(t *testing.T, target string) *deaf {
	t.Helper()
	lis := listenOn(t, "127.0.0.1:0")
	t.Cleanup(func() { lis.Close() })
	d := &deaf{addr: lis.Addr().String()}
	go relay(lis, target, func(client, server net.Conn) {
		began := time.Now()
		forward := func(to, from net.Conn) {
			buffer := make([]byte, 1<<15)
			for {
				n, err := from.Read(buffer)
				if err != nil {
					client.Close()
					server.Close()
					return
				}
				d.mu.Lock()
				lost := began.Before(d.since)
				d.mu.Unlock()
				if lost {
					<-t.Context().Done()
					continue
				}
				to.Write(buffer[:n])
			}
		}
		go forward(server, client)
		go forward(client, server)
	})
	return d
}

func (d *deaf) fall() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.since = time.Now()
}

// deliversAfterTheFall has the kind deliver, forgets its connection, and waits until it delivers again.
func (d *deaf) deliversAfterTheFall(t *testing.T, kind *outbox.Kind) {
	t.Helper()
	delivery := rendered(t, kind)
	if got := kind.Send(within(t, 10*time.Second), delivery); got.Verdict != "delivered" {
		t.Fatalf("got %+v", got)
	}
	d.fall()
	waitFor(t, func() (string, bool) {
		got := kind.Send(within(t, 10*time.Second), delivery)
		return got.Reason, got.Verdict == "delivered"
	})
}

// The network forgets an HTTP/2 connection without a word. Every attempt went into it, and timed out, until the kernel gave it up after a
// quarter of an hour.
func TestWebhook_ForgottenConnection(t *testing.T) {
	in := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if io.Copy(io.Discard, r.Body); r.ProtoMajor != 2 {
			t.Errorf("it came by %s", r.Proto)
		}
	}))
	in.EnableHTTP2 = true
	r := startReceiver(t, in)
	proxy := serveDeaf(t, in.Listener.Addr().String())
	r.URL = "https://" + proxy.addr
	kind := webhook(t, r, "deduplicates: true\n  timeout: 300ms", "")
	proxy.deliversAfterTheFall(t, kind)
}

// A receiver closes a connection that was idle at the moment when the next event is sent on it. Nobody can tell whether it was read: where
// the receiver does not deduplicate, an operator would have to find out.
func TestWebhook_IdleConnectionIsClosed(t *testing.T) {
	in := httptest.NewUnstartedServer(nil)
	served := make(chan struct{}, 16)
	in.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		conn, stream, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		served <- struct{}{}
		io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		// Whatever comes next is not read to its end.
		stream.ReadByte()
	})
	kind := webhook(t, startReceiver(t, in), "deduplicates: false", "")
	for range 2 {
		if got := kind.Send(within(t, 10*time.Second), rendered(t, kind)); got.Verdict != "delivered" {
			t.Fatalf("got %+v", got)
		}
		<-served
	}
}

// A receiver says yes, and takes its time with the rest of the answer. What is known is to be recorded: a crash in that time left in doubt what
// was long accepted, and the receiver's next event waited.
func TestWebhook_AcceptedIsNotWaitedFor(t *testing.T) {
	release := make(chan struct{})
	r := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Write([]byte("yes, "))
		w.(http.Flusher).Flush()
		<-release
	})
	t.Cleanup(func() { close(release) })
	kind := webhook(t, r, "", "")
	d := rendered(t, kind)
	ended := make(chan string, 1)
	go func() { ended <- kind.Send(within(t, 5*time.Minute), d).Verdict }()
	select {
	case verdict := <-ended:
		if verdict != "delivered" {
			t.Errorf("it is %s", verdict)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the attempt does not end")
	}
}

// The client's certificate is renewed in its files while grantd runs, as those that live for a day are. The next connection shows the new one.
func TestWebhook_ClientCertificateIsRenewed(t *testing.T) {
	in := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "%x", sha256.Sum256(r.TLS.PeerCertificates[0].Raw))
	}))
	in.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "client.pem"), filepath.Join(dir, "client.key")
	renew := func() string {
		pair, _ := serverCertificate(t)
		key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		for name, block := range map[string]*pem.Block{
			certFile: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, keyFile: {Type: "PRIVATE KEY", Bytes: key},
		} {
			if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return fmt.Sprintf("%x", sha256.Sum256(pair.Certificate[0]))
	}
	want := renew()
	r := startReceiver(t, in)
	kind := openKind(t, fmt.Sprintf(`
destinations:
- name: under_test
  kind: webhook
  webhook: {url: %s, tls: {ca_file: %s, cert_file: %s, key_file: %s}, secrets: [{env: SECRET}]}
`, r.URL, r.ca, certFile, keyFile), map[string]string{"SECRET": newSecret()})
	for range 2 {
		if got := kind.Send(within(t, 10*time.Second), rendered(t, kind)); !strings.Contains(got.Reason, want) {
			t.Fatalf("got %+v, want the certificate %s", got, want)
		}
		want = renew()
	}
}

// A receiver that restarts says of a call that it has not looked at it: GOAWAY, with a lower stream. That is no doubt, and needs no operator.
func TestWebhook_GoAwayBeforeTheCall(t *testing.T) {
	in := httptest.NewUnstartedServer(nil)
	var connections atomic.Int64
	in.TLS = &tls.Config{NextProtos: []string{"h2"}}
	in.Config.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){"h2": func(_ *http.Server, conn *tls.Conn, _ http.Handler) {
		first := connections.Add(1) == 1
		preface := make([]byte, len(http2.ClientPreface))
		if _, err := io.ReadFull(conn, preface); err != nil {
			return
		}
		frames := http2.NewFramer(conn, conn)
		frames.WriteSettings()
		for {
			f, err := frames.ReadFrame()
			if err != nil {
				return
			}
			switch f := f.(type) {
			case *http2.SettingsFrame:
				if !f.IsAck() {
					frames.WriteSettingsAck()
				}
			case *http2.DataFrame:
				switch {
				case !f.StreamEnded():
				case first:
					frames.WriteGoAway(0, http2.ErrCodeNo, nil)
					return
				default:
					var headers bytes.Buffer
					hpack.NewEncoder(&headers).WriteField(hpack.HeaderField{Name: ":status", Value: "204"})
					frames.WriteHeaders(http2.HeadersFrameParam{
						StreamID: f.StreamID, BlockFragment: headers.Bytes(), EndStream: true, EndHeaders: true,
					})
				}
			}
		}
	}}
	kind := webhook(t, startReceiver(t, in), "deduplicates: false", "")
	d := rendered(t, kind)
	if got := kind.Send(within(t, 30*time.Second), d); got.Verdict != "transient" || !got.Unreachable {
		t.Errorf("got %+v", got)
	}
	if got := kind.Send(within(t, 30*time.Second), d); got.Verdict != "delivered" || connections.Load() != 2 {
		t.Errorf("again: got %+v by %d connections", got, connections.Load())
	}
}
