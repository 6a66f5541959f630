package outbox_test

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/grantd/grantd/outbox"
)

// receiver is a webhook's receiver with TLS and a certificate of its own.
type receiver struct {
	*httptest.Server
	ca string
}

func newReceiver(t *testing.T, handle http.HandlerFunc) *receiver {
	t.Helper()
	return startReceiver(t, httptest.NewUnstartedServer(handle))
}

func startReceiver(t *testing.T, s *httptest.Server) *receiver {
	t.Helper()
	s.Config.ErrorLog = log.New(t.Output(), "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return &receiver{Server: s, ca: ca}
}

func newSecret() string {
	raw := make([]byte, 32)
	rand.Read(raw)
	return "whsec_" + base64.StdEncoding.EncodeToString(raw)
}

// webhook opens a sender to the receiver. options are lines of the destination, section lines of its webhook.
func webhook(t *testing.T, r *receiver, options, section string) *outbox.Kind {
	t.Helper()
	return openKind(t, fmt.Sprintf(`
destinations:
- name: under_test
  kind: webhook
  %s
  webhook:
    url: %s/events
    tls: {ca_file: %s}
    secrets: [{env: SECRET}]
    %s
`, options, r.URL, r.ca, section), map[string]string{"SECRET": newSecret()})
}

func answer(status int, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(status)
		fmt.Fprintf(w, "because of %d", status)
	}
}

// hijack answers with bytes of its own, and closes.
func hijack(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		io.WriteString(conn, text)
		conn.Close()
	}
}

func TestWebhook_Answers(t *testing.T) {
	for name, c := range map[string]struct {
		handle  http.HandlerFunc
		verdict string
		reason  string
	}{
		"200":           {answer(200), "delivered", ""},
		"202":           {answer(202), "delivered", ""},
		"no content":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, "delivered", ""},
		"bad request":   {answer(400), "permanent", "400 Bad Request: because of 400"},
		"gone":          {answer(410), "gone", "410 Gone: because of 410"},
		"error":         {answer(500), "transient", "500 Internal Server Error: because of 500"},
		"unavailable":   {answer(503, "Retry-After", "3"), "transient", "503 "},
		"bad gateway":   {answer(502), "uncertain", "502 "},
		"too many":      {answer(429, "Retry-After", "3"), "transient", "429 "},
		"timeout":       {answer(408), "transient", "408 "},
		"early":         {answer(425), "transient", "425 "},
		"not modified":  {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(304) }, "transient", "304 "},
		"no answer":     {hijack(""), "uncertain", "EOF"},
		"no HTTP":       {hijack("220 mail.example.com ESMTP\r\n"), "uncertain", "malformed"},
		"half a header": {hijack("HTTP/1.1 200 OK\r\nContent-Le"), "uncertain", "malformed"},
		"half a body":   {hijack("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"), "delivered", ""},
		"long header":   {hijack("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n"), "uncertain", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(t, c.handle)
			k := webhook(t, r, "", "")
			got := k.Send(within(t, 10*time.Second), rendered(t, k))
			if got.Verdict != c.verdict || !strings.Contains(got.Reason, c.reason) {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A redirect would take the event where nobody sent it, and its signature with it.
func TestWebhook_RedirectIsNotFollowed(t *testing.T) {
	for _, status := range []int{301, 302, 303, 307, 308} {
		var followed atomic.Bool
		elsewhere := newReceiver(t, func(http.ResponseWriter, *http.Request) { followed.Store(true) })
		r := newReceiver(t, answer(status, "Location", elsewhere.URL))
		k := webhook(t, r, "", "")
		got := k.Send(within(t, 10*time.Second), rendered(t, k))
		if got.Verdict != "transient" || !got.Unreachable || followed.Load() {
			t.Errorf("%d: %+v, followed %t", status, got, followed.Load())
		}
	}
}

// Nobody has the event: it may be sent again wherever it goes.
func TestWebhook_Unreachable(t *testing.T) {
	up := newReceiver(t, answer(200))
	refused := newReceiver(t, answer(200))
	refused.Close()
	for name, url := range map[string]string{
		"refused": refused.URL, "no TLS": "https://" + silentServer(t), "no such host": "https://receiver.invalid",
	} {
		t.Run(name, func(t *testing.T) {
			up.URL = url
			k := webhook(t, up, "timeout: 200ms", "")
			if got := k.Send(within(t, 10*time.Second), rendered(t, k)); got.Verdict != "transient" || !got.Unreachable {
				t.Errorf("%+v", got)
			}
		})
	}
	t.Run("another's certificate", func(t *testing.T) {
		other := newReceiver(t, answer(200))
		_, ca := serverCertificate(t)
		other.ca = ca
		k := webhook(t, other, "", "")
		if got := k.Send(within(t, 10*time.Second), rendered(t, k)); got.Verdict != "transient" || !got.Unreachable {
			t.Errorf("%+v", got)
		}
	})
}

// A receiver that is slow, at whatever it is slow at, holds an attempt no longer than its deadline.
func TestWebhook_DeadlineHolds(t *testing.T) {
	const deadline = 2 * time.Second
	for name, c := range map[string]struct {
		handle  http.HandlerFunc
		options string
		// verdict is followed by the reason, or by the beginning of it, where that is known.
		verdict string
	}{
		"no headers": {func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body); <-r.Context().Done() }, "", "uncertain: no answer within the deadline"},
		"no headers within the timeout": {
			func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body); <-r.Context().Done() },
			"timeout: 50ms\n  deadline: 5m", "uncertain: no answer began within the timeout",
		},
		"a body that trickles": {func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(500)
			for r.Context().Err() == nil {
				io.WriteString(w, "x")
				w.(http.Flusher).Flush()
				time.Sleep(5 * time.Millisecond)
			}
		}, "", "transient"},
		"headers that trickle": {func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			defer conn.Close()
			io.WriteString(conn, "HTTP/1.1 200 OK\r\n")
			for i := 0; ; i++ {
				if _, err := fmt.Fprintf(conn, "X-%d: x\r\n", i); err != nil {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		}, "", "uncertain"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := webhook(t, newReceiver(t, c.handle), c.options, "")
			d := rendered(t, k)
			started := time.Now()
			got := k.Send(within(t, deadline), d)
			if took := time.Since(started); !strings.HasPrefix(got.Verdict+": "+got.Reason, c.verdict) || took > deadline+30*time.Second {
				t.Errorf("%+v after %v", got, took)
			}
		})
	}
	t.Run("a reader that does not read", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		k := openKind(t, fmt.Sprintf(`
destinations:
- {name: under_test, kind: webhook, webhook: {url: "http://%s", secrets: [{env: SECRET}]}}
`, listener.Addr()), map[string]string{"SECRET": newSecret()})
		d := rendered(t, k)
		// More than the buffers of both ends hold.
		d.Body = make([]byte, 24<<20)
		started := time.Now()
		got := k.Send(within(t, 2*time.Second), d)
		if took := time.Since(started); got.Verdict != "uncertain" || took > 30*time.Second {
			t.Errorf("%+v after %v", got, took)
		}
	})
}

func TestWebhook_AnswerIsReadInPart(t *testing.T) {
	r := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(500)
		io.WriteString(w, strings.Repeat("x", 1<<20))
	})
	k := webhook(t, r, "", "")
	if got := k.Send(within(t, 10*time.Second), rendered(t, k)); len(got.Reason) > 5<<10 || len(got.Reason) < 4<<10 {
		t.Errorf("%d bytes were read", len(got.Reason))
	}
}

// net/http repeats a request that has an Idempotency-Key by itself when a kept connection breaks under it. A receiver that does not
// deduplicate would have the event twice, with one attempt recorded.
func TestWebhook_NoSilentRepetition(t *testing.T) {
	var calls atomic.Int64
	r := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if calls.Add(1) == 1 {
			return
		}
		hijack("")(w, r)
	})
	k := webhook(t, r, "deduplicates: false", "")
	if got := k.Send(within(t, 10*time.Second), rendered(t, k)); got.Verdict != "delivered" {
		t.Fatalf("the first: %+v", got)
	}
	if got := k.Send(within(t, 10*time.Second), rendered(t, k)); got.Verdict != "uncertain" || calls.Load() != 2 {
		t.Errorf("the second: %+v, after %d calls", got, calls.Load())
	}
}

// received is one request as a receiver got it.
type received struct {
	header http.Header
	body   []byte
}

func recorder(t *testing.T) (*receiver, chan received) {
	all := make(chan received, 100)
	return newReceiver(t, func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		all <- received{r.Header.Clone(), body}
	}), all
}

func TestWebhook_Request(t *testing.T) {
	r, all := recorder(t)
	k := webhook(t, r, "", "")
	d := rendered(t, k)
	if got := k.Send(within(t, 10*time.Second), d); got.Verdict != "delivered" {
		t.Fatalf("%+v", got)
	}
	got := <-all
	for name, want := range map[string]string{
		"Content-Type": "application/cloudevents+json", "Idempotency-Key": d.Key, "Webhook-Id": d.Key,
		"Grantd-Operation-Key": "billing:grant:INV-1:team_access", "Baggage": "", "Traceparent": "", "Tracestate": "",
	} {
		if h := got.header.Get(name); h != want {
			t.Errorf("%s: %q, want %q", name, h, want)
		}
	}
	var e event.Event
	if err := json.Unmarshal(got.body, &e); err != nil {
		t.Fatal(err)
	}
	if err := e.Validate(); err != nil {
		t.Error(err)
	}
	for name, pair := range map[string][2]string{
		"specversion": {e.SpecVersion(), "1.0"}, "type": {e.Type(), "entitlement.granted"}, "source": {e.Source(), "/grantd/tenants/acme"},
		"id": {e.ID(), d.Event.Entry.EntitlementID.String() + "/1"}, "subject": {e.Subject(), "team_access"},
		"deliverykey":    {fmt.Sprint(e.Extensions()["deliverykey"]), d.Key},
		"idempotencykey": {fmt.Sprint(e.Extensions()["idempotencykey"]), "billing:grant:INV-1:team_access"},
		"sequence":       {fmt.Sprint(e.Extensions()["sequence"]), "0000000000000000001"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %q, want %q", name, pair[0], pair[1])
		}
	}
}

// Identical inputs make identical bytes, and numbers beyond JavaScript's survive.
func TestWebhook_BodyIsDeterministic(t *testing.T) {
	r, _ := recorder(t)
	k := webhook(t, r, "", "")
	d := newDelivery()
	quantity := int64(9007199254740993)
	d.Event.Entitlement.Grant.Quantity = &quantity
	d.Event.Entitlement.Grant.Scope = map[string]string{"a": "<&>", "b": "é", "c": "", "d": "\u2028"}
	d.Event.Entry.Actor, d.Event.Entry.Reason = "ann@example.com", "called by phone"
	var first string
	for range 100 {
		if err := k.Render(d); err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = string(d.Body)
		}
		if string(d.Body) != first {
			t.Fatalf("%s\n%s", first, d.Body)
		}
	}
	if !strings.Contains(first, `"quantity":"9007199254740993"`) || strings.Contains(first, "ann@example.com") || strings.Contains(first, "phone") {
		t.Error(first)
	}
}

// verify is what a receiver does, with the reference library.
func verify(t *testing.T, secret string, r received) error {
	t.Helper()
	w, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		t.Fatal(err)
	}
	return w.Verify(r.body, r.header)
}

// Secrets are changed without a restart: the new one is added, receivers move over, the old one is taken away.
func TestWebhook_SecretsRotate(t *testing.T) {
	r, all := recorder(t)
	old, next := newSecret(), newSecret()
	file := filepath.Join(t.TempDir(), "next")
	write := func(secret string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(old)
	k := openKind(t, fmt.Sprintf(`
destinations:
- name: under_test
  kind: webhook
  webhook: {url: %s, tls: {ca_file: %s}, secrets: [{file: %s}, {env: OLD}]}
`, r.URL, r.ca, file), map[string]string{"OLD": old})
	d := rendered(t, k)
	send := func() received {
		t.Helper()
		if got := k.Send(within(t, 10*time.Second), d); got.Verdict != "delivered" {
			t.Fatalf("%+v", got)
		}
		return <-all
	}
	before := send()
	if err := verify(t, old, before); err != nil {
		t.Error(err)
	}
	if err := verify(t, next, before); err == nil {
		t.Error("a secret that was not there yet verifies")
	}
	write(next)
	during := send()
	for _, secret := range []string{old, next} {
		if err := verify(t, secret, during); err != nil {
			t.Error(err)
		}
	}
	during.body[0] ^= 1
	if err := verify(t, old, during); err == nil {
		t.Error("another body verifies")
	}
	write("")
	got := k.Send(within(t, 10*time.Second), d)
	if got.Verdict != "transient" || !got.Unreachable || len(all) != 0 {
		t.Errorf("without the secret: %+v", got)
	}
	write("whsec_tooshort")
	got = k.Send(within(t, 10*time.Second), d)
	if got.Verdict != "transient" || strings.Contains(got.Reason, "tooshort") {
		t.Errorf("with a bad one: %+v", got)
	}
}

func TestWebhook_LookUp(t *testing.T) {
	for status, want := range map[int]string{200: "true <nil>", 204: "true <nil>", 404: "false <nil>", 302: "", 500: "", 410: ""} {
		asked := make(chan *http.Request, 1)
		r := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
			asked <- r
			w.WriteHeader(status)
		})
		secret := newSecret()
		k := openKind(t, fmt.Sprintf(`
destinations:
- name: under_test
  kind: webhook
  webhook: {url: %s, tls: {ca_file: %s}, lookup_url: "%s/events/{key}", secrets: [{env: SECRET}]}
`, r.URL, r.ca, r.URL), map[string]string{"SECRET": secret})
		d := newDelivery()
		arrived, err := k.Ask(within(t, 10*time.Second), d)
		if got := fmt.Sprint(arrived, " ", err); want != "" && got != want || want == "" && (err == nil || arrived) {
			t.Errorf("%d: %s", status, got)
		}
		request := <-asked
		if request.Method != http.MethodGet || request.URL.Path != "/events/"+d.Key {
			t.Errorf("%s %s", request.Method, request.URL)
		}
		if err := verify(t, secret, received{header: request.Header}); err != nil {
			t.Error(err)
		}
	}
}
