package acceptance_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/metadata"

	"github.com/grantd/grantd/telemetry"
	"github.com/grantd/grantd/telemetry/otlptest"
)

// arrived is what a destination was sent.
type arrived struct{ header http.Header }

// hook is a webhook receiver that refuses everything until it is opened.
func hook(t *testing.T, opened <-chan struct{}) (url string, refused, took <-chan arrived) {
	no, yes := make(chan arrived, 1000), make(chan arrived, 1000)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-opened:
			yes <- arrived{r.Header.Clone()}
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
			no <- arrived{r.Header.Clone()}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, no, yes
}

func await(t *testing.T, from <-chan arrived) http.Header {
	t.Helper()
	select {
	case a := <-from:
		return a.header
	case <-time.After(30 * time.Second):
		t.Fatal("nothing arrived")
		return nil
	}
}

// writeDestinations writes a destinations file; the text follows "destinations:", and %s in it stands for a webhook's secret.
func writeDestinations(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	secret, file := filepath.Join(dir, "secret"), filepath.Join(dir, "destinations.yaml")
	for name, content := range map[string]string{
		secret: "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3",
		file:   "destinations:\n" + strings.ReplaceAll(text, "%s", secret),
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return file
}

// The server that granted is gone when the receiver takes the event. Another one delivers, in the winner's trace: what the receiver does with
// it is found from the call that brought it about.
func TestTracing_DeliveryAfterARestart(t *testing.T) {
	tr := setupTraced(t)
	opened := make(chan struct{})
	url, refused, took := hook(t, opened)
	file := writeDestinations(t, `
  - name: products
    kind: webhook
    internal: true
    deduplicates: true
    retry: {min_delay: 1ms, max_delay: 100ms}
    webhook: {url: "`+url+`", secrets: [{file: %s}]}
`)
	granted, client := tr.serve(t, "--destinations", file)
	if _, err := client.GrantEntitlement(within(t, firstTrace), grant("acme", "K", "INV-1")); err != nil {
		t.Fatal(err)
	}
	winner := tr.one(t, grantSpan, firstTrace)
	if got := await(t, refused).Get("Traceparent"); !strings.HasPrefix(got, "00-"+firstTrace+"-") {
		t.Errorf("before the restart: traceparent %s", got)
	}
	granted.terminate(t)
	<-granted.exited
	close(opened)

	_, client = tr.serve(t, "--destinations", file)
	header := await(t, took)
	span := tr.Await(1, func(s *otlptest.Span) bool {
		return s.GetName() == "grantd.deliver products" && s.Resource["service.instance.id"] != winner.Resource["service.instance.id"]
	})[0]
	if got, want := header.Get("Traceparent"), "00-"+firstTrace+"-"+span.ID()+"-01"; got != want {
		t.Errorf("after the restart: traceparent %s, want %s", got, want)
	}
	if span.Trace() != firstTrace || span.Parent() != winner.ID() || span.Attribute(telemetry.KeyName) != "K" ||
		span.Attribute("grantd.delivery.key") != header.Get("Idempotency-Key") {
		t.Errorf("the delivery's span %s %s < %s: %v", span.Trace(), span.ID(), span.Parent(), span.Attributes())
	}
	// A replay at the new server leads to the same trace.
	if _, err := client.GrantEntitlement(within(t, secondTrace), grant("acme", "K", "INV-1")); err != nil {
		t.Fatal(err)
	}
	if replay := tr.one(t, grantSpan, secondTrace); !replay.LinksTo(winner) {
		t.Errorf("the replay's links are %v", replay.GetLinks())
	}
	wantDocumented(t, tr)
}

// broker starts a NATS server with a stream for events.
func broker(t *testing.T) (url string, stream jetstream.Stream) {
	t.Helper()
	s, err := natsserver.NewServer(&natsserver.Options{
		Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	url = fmt.Sprintf("nats://127.0.0.1:%d", s.Addr().(*net.TCPAddr).Port)
	conn, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	stream, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"entitlements.>"}})
	if err != nil {
		t.Fatal(err)
	}
	return url, stream
}

// A caller's baggage holds whatever its own callers put there, a user's e-mail too. It must reach neither those outside, who get the key as
// Idempotency-Key and nothing else, nor those inside, who get the key's member alone, nor any span.
func TestTracing_BaggageStaysInside(t *testing.T) {
	tr := setupTraced(t)
	opened := make(chan struct{})
	close(opened)
	hookURL, _, took := hook(t, opened)
	natsURL, stream := broker(t)
	file := writeDestinations(t, `
  - name: partner
    kind: webhook
    deduplicates: true
    webhook: {url: "`+hookURL+`", secrets: [{file: %s}]}
  - name: products
    kind: nats
    internal: true
    nats: {servers: ["`+natsURL+`"], subject: "entitlements.{event}", stream: EVENTS}
`)
	_, client := tr.serve(t, "--destinations", file)
	const key, email = "billing:grant:INV-1:team_access", "ann%40example.com"
	ctx := within(t, firstTrace, "baggage", "user.email="+email+","+telemetry.KeyName+"=spoofed,region=eu")
	if _, err := client.GrantEntitlement(ctx, grant("acme", key, "INV-1")); err != nil {
		t.Fatal(err)
	}
	call := tr.one(t, grantSpan, firstTrace)
	if call.Attribute(telemetry.KeyName) != key || call.Attribute("grantd.baggage.key_replaced") != "true" {
		t.Errorf("the call's span: %v", call.Attributes())
	}

	outside := await(t, took)
	for name, values := range outside {
		text := strings.ToLower(name + strings.Join(values, ""))
		for _, inner := range []string{"baggage", "trace", "ann", "spoofed", "region"} {
			if strings.Contains(text, inner) {
				t.Errorf("outside gets %s: %v", name, values)
			}
		}
	}
	if outside.Get("Idempotency-Key") == "" {
		t.Errorf("outside gets no key: %v", outside)
	}
	var inside *jetstream.RawStreamMsg
	eventually(t, "the event is in the stream", func() bool {
		var err error
		inside, err = stream.GetMsg(t.Context(), 1)
		return err == nil
	})
	span := tr.one(t, "grantd.deliver products", firstTrace)
	if got, want := inside.Header.Get("traceparent"), "00-"+firstTrace+"-"+span.ID()+"-01"; got != want {
		t.Errorf("inside: traceparent %s, want %s", got, want)
	}
	if got := inside.Header.Get("baggage"); got != telemetry.KeyName+"="+key {
		t.Errorf("inside: baggage %s", got)
	}
	tr.one(t, "grantd.deliver partner", firstTrace)
	for _, span := range tr.Spans() {
		if text := span.String(); strings.Contains(text, "example.com") || strings.Contains(text, "spoofed") {
			t.Errorf("%s holds the caller's baggage: %s", span.GetName(), text)
		}
	}
	wantDocumented(t, tr)
}

// What a caller does not sample makes no spans here, neither now nor when it is delivered, and still the attempts name its trace.
func TestTracing_CallerDoesNotSample(t *testing.T) {
	tr := setupTraced(t)
	opened := make(chan struct{})
	close(opened)
	url, _, took := hook(t, opened)
	file := writeDestinations(t, `
  - name: products
    kind: webhook
    internal: true
    deduplicates: true
    webhook: {url: "`+url+`", secrets: [{file: %s}]}
`)
	p, client := tr.serve(t, "--destinations", file)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+firstTrace+"-"+callerSpan+"-00")
	for range 2 {
		if _, err := client.GrantEntitlement(ctx, grant("acme", "K", "INV-1")); err != nil {
			t.Fatal(err)
		}
	}
	if got := await(t, took).Get("Traceparent"); !strings.HasPrefix(got, "00-"+firstTrace+"-") || !strings.HasSuffix(got, "-00") {
		t.Errorf("the delivery's traceparent is %s", got)
	}
	// A sampled replay links to it all the same.
	if _, err := client.GrantEntitlement(within(t, secondTrace), grant("acme", "K", "INV-1")); err != nil {
		t.Fatal(err)
	}
	story, err := client.GetOperation(t.Context(), byName("acme", "K", full))
	if err != nil || len(story.GetAttempts()) != 3 {
		t.Fatalf("%v %v", story, err)
	}
	for i, a := range story.GetAttempts()[:2] {
		if a.GetTraceId() != firstTrace || a.GetWinnerTraceId() != []string{"", firstTrace}[i] {
			t.Errorf("attempt %d: %v", i, a)
		}
	}
	p.terminate(t)
	<-p.exited
	if links := tr.one(t, grantSpan, secondTrace).GetLinks(); len(links) != 1 {
		t.Errorf("the sampled replay has the links %v", links)
	}
	for _, span := range tr.Spans() {
		if span.Trace() == firstTrace {
			t.Errorf("%s was exported", span.GetName())
		}
	}
}
