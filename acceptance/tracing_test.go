package acceptance_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/telemetry"
	"github.com/grantd/grantd/telemetry/otlptest"
)

// The callers' traces. Their spans are the callers' own, and not exported here.
const (
	firstTrace  = "11111111111111111111111111111111"
	secondTrace = "22222222222222222222222222222222"
	thirdTrace  = "33333333333333333333333333333333"
	callerSpan  = "c0c0c0c0c0c0c0c0"
)

// within is a call's context in a caller's trace.
func within(t testing.TB, trace string, more ...string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), append([]string{"traceparent", "00-" + trace + "-" + callerSpan + "-01"}, more...)...)
}

// traced is a database whose servers are processes that export to a collector.
type traced struct {
	*otlptest.Collector
	url string
}

func setupTraced(t *testing.T) *traced {
	t.Helper()
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "")
		}
	}
	c := otlptest.Start(t)
	c.Setenv(t)
	return &traced{c, pgtest.New(t)}
}

// serve starts another process.
func (tr *traced) serve(t *testing.T, flags ...string) (*process, pb.EntitlementServiceClient) {
	t.Helper()
	p := serveProcess(t, tr.url, "127.0.0.1:0", flags...)
	return p, pb.NewEntitlementServiceClient(dial(t, p.addr))
}

const (
	grantSpan  = "entitlement.v1.EntitlementService/GrantEntitlement"
	commitSpan = "grantd.commit"
	itemSpan   = "grantd.batch.item"
)

// one waits for the one span of a name in a trace.
func (tr *traced) one(t *testing.T, name, trace string) *otlptest.Span {
	t.Helper()
	found := tr.Await(1, func(s *otlptest.Span) bool { return s.GetName() == name && s.Trace() == trace })
	if len(found) > 1 {
		t.Fatalf("%d spans %s in trace %s:%s", len(found), name, trace, tr)
	}
	return found[0]
}

// about are the attributes of a span that say what happened.
func about(s *otlptest.Span) map[string]string {
	a := s.Attributes()
	maps.DeleteFunc(a, func(name, _ string) bool { return !strings.HasPrefix(name, "entitlement.") })
	return a
}

func failed(s *otlptest.Span) bool {
	return s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR
}

// Support's question: what happened to this event, both times? One event arrives twice, at two servers that share nothing but the database.
// A search for its key finds both attempts, each leads to the other by a link, and both stand in the operation's story. So do a replay under
// another key, and another payload.
func TestTracing_TwoAttemptsThroughTwoProcesses(t *testing.T) {
	tr := setupTraced(t)
	_, first := tr.serve(t)
	_, second := tr.serve(t)
	const key, alias = "billing:grant:INV-1:team_access", "admin:grant:INV-1:team_access"
	from := func(event string) func(*pb.GrantEntitlementRequest) {
		return func(r *pb.GrantEntitlementRequest) { r.EventId = event }
	}
	type arrival struct {
		client    pb.EntitlementServiceClient
		key       string
		event     string
		seats     string
		trace     string
		outcome   pb.Outcome
		matchedBy pb.MatchedBy
		tries     int32
	}
	arrivals := []arrival{
		{first, key, "evt_1", "10", firstTrace, newly, byNothing, 0},
		{second, key, "evt_1_again", "10", secondTrace, already, byKey, 2},
		{second, alias, "evt_2", "10", thirdTrace, already, byBusinessKey, 0},
		{first, alias, "evt_2_again", "10", strings.Repeat("4", 32), already, byKey, 0},
		{second, key, "evt_3", "500", strings.Repeat("5", 32), conflict, byKey, 0},
		{second, "another", "evt_4", "500", strings.Repeat("6", 32), conflict, byBusinessKey, 0},
	}
	for _, a := range arrivals {
		ctx := within(t, a.trace)
		if a.tries > 0 {
			// What gRPC's own retries say.
			ctx = within(t, a.trace, "grpc-previous-rpc-attempts", fmt.Sprint(a.tries))
		}
		resp, err := a.client.GrantEntitlement(ctx, grant("acme", a.key, "INV-1", seats(a.seats), from(a.event)))
		if err != nil || resp.GetOutcome() != a.outcome {
			t.Fatalf("%s: %v %v", a.event, resp, err)
		}
	}

	winner := tr.one(t, grantSpan, firstTrace)
	var processes []string
	for _, a := range arrivals {
		for _, name := range []string{grantSpan, commitSpan} {
			span := tr.one(t, name, a.trace)
			want := map[string]string{
				telemetry.KeyName: a.key, "entitlement.tenant_id": "acme", "entitlement.event_id": a.event,
				"entitlement.outcome": a.outcome.String(), "entitlement.matched_by": a.matchedBy.String(),
			}
			if a.matchedBy == byNothing {
				delete(want, "entitlement.matched_by")
			}
			if diff := cmp.Diff(want, about(span)); diff != "" {
				t.Errorf("%s of %s (-want +got):\n%s", name, a.event, diff)
			}
			if links := len(span.GetLinks()); a.trace == firstTrace && links > 0 || a.trace != firstTrace && (links != 1 || !span.LinksTo(winner)) {
				t.Errorf("%s of %s has the links %v, want one to the winner's", name, a.event, span.GetLinks())
			}
			if failed(span) != (a.outcome == conflict) {
				t.Errorf("%s of %s ended with %v", name, a.event, span.GetStatus())
			}
			if name == grantSpan && !slices.Contains(processes, span.Resource["service.instance.id"]) {
				processes = append(processes, span.Resource["service.instance.id"])
			}
		}
	}
	if len(processes) != 2 {
		t.Errorf("the spans came from the processes %v", processes)
	}
	// One search by the key, as in a trace viewer. The statements have it too.
	traces := map[string]int{}
	for _, span := range tr.AwaitAttribute(2, telemetry.KeyName, key) {
		traces[span.Trace()]++
	}
	if traces[firstTrace] < 3 || traces[secondTrace] < 3 {
		t.Errorf("the search finds spans in %v", traces)
	}

	story, err := first.GetOperation(t.Context(), byName("acme", key, full))
	if err != nil {
		t.Fatal(err)
	}
	if op := story.GetOperation(); op.GetTraceId() != firstTrace || op.GetSpanId() != winner.ID() {
		t.Errorf("the operation names the span %s %s, exported is %s", op.GetTraceId(), op.GetSpanId(), winner.ID())
	}
	// The last one met the grant under a key of its own, which stayed free.
	if got, want := len(story.GetAttempts()), len(arrivals)-1; got != want {
		t.Fatalf("%d attempts, want %d", got, want)
	}
	for i, got := range story.GetAttempts() {
		a := arrivals[i]
		wantWinner := firstTrace
		if i == 0 {
			wantWinner = ""
		}
		if got.GetEventId() != a.event || got.GetOutcome() != a.outcome || got.GetTraceId() != a.trace || got.GetWinnerTraceId() != wantWinner ||
			got.GetPreviousTries() != a.tries || got.GetSpanId() != tr.one(t, grantSpan, a.trace).ID() {
			t.Errorf("attempt %d is %v, want %+v", i, got, a)
		}
	}
	listed, err := second.ListOperations(t.Context(), &pb.ListOperationsRequest{
		TenantId: "acme", Filter: &pb.ListOperationsRequest_EventId{EventId: "evt_1_again"},
	})
	if err != nil || len(listed.GetOperations()) != 1 {
		t.Fatalf("%v %v", listed, err)
	}
	// Under that key, another payload came last.
	if last := listed.GetOperations()[0].GetLastAttempt(); last.GetTraceId() != arrivals[4].trace || last.GetWinnerTraceId() != firstTrace {
		t.Errorf("the last attempt is %v", last)
	}
	wantDocumented(t, tr)
}

// wantDocumented checks that the page on tracing names every span, and every attribute of ours.
func wantDocumented(t *testing.T, tr *traced) {
	t.Helper()
	page, err := os.ReadFile("../docs/tracing.md")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, span := range tr.Spans() {
		names := slices.Collect(maps.Keys(span.Attributes()))
		for _, link := range span.GetLinks() {
			for _, a := range link.GetAttributes() {
				names = append(names, a.GetKey())
			}
		}
		if strings.HasPrefix(span.GetName(), "grantd.") {
			name, _, _ := strings.Cut(span.GetName(), " ")
			names = append(names, name)
		}
		for _, name := range names {
			ours := strings.HasPrefix(name, "entitlement.") || strings.HasPrefix(name, "grantd.")
			if ours && !told[name] && !strings.Contains(string(page), "`"+name) {
				told[name] = true
				t.Errorf("docs/tracing.md does not tell of %s", name)
			}
		}
	}
}

// Each item of a batch has its own key, and so its own span, with its own answer and its own link. The commit that combines them links to
// each, and each to it.
func TestTracing_ItemsOfABatch(t *testing.T) {
	tr := setupTraced(t)
	_, client := tr.serve(t)
	for trace, request := range map[string]*pb.GrantEntitlementRequest{
		firstTrace: grant("acme", "K1", "INV-1"), thirdTrace: grant("acme", "K2", "INV-2"),
	} {
		if _, err := client.GrantEntitlement(within(t, trace), request); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := client.BatchGrantEntitlements(within(t, secondTrace), &pb.BatchGrantEntitlementsRequest{Requests: []*pb.GrantEntitlementRequest{
		grant("acme", "K1", "INV-1"), grant("acme", "K2", "INV-2", seats("500")), grant("acme", "K3", "INV-3"),
		grant("acme", "K4", "INV-4", evidence(unpaid, 1)), grant("acme", "no key", "INV-5"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	batch := tr.one(t, "entitlement.v1.EntitlementService/BatchGrantEntitlements", secondTrace)
	combined := tr.one(t, "grantd.combined_commit", secondTrace)
	for i, want := range []struct {
		key     string
		outcome pb.Outcome
		winner  string // the trace of the attempt that it met
	}{{"K1", already, firstTrace}, {"K2", conflict, thirdTrace}, {"K3", newly, ""}, {"K4", rejected, ""}, {"", rejected, ""}} {
		if got := resp.GetResponses()[i].GetOutcome(); got != want.outcome {
			t.Errorf("item %d: %v, want %v", i, got, want.outcome)
		}
		item := tr.Await(1, func(s *otlptest.Span) bool {
			return s.GetName() == itemSpan && s.Attribute(telemetry.KeyName) == want.key
		})[0]
		leads := func(s *otlptest.Span, others int) bool {
			if want.winner == "" {
				return len(s.GetLinks()) == others
			}
			return len(s.GetLinks()) == others+1 && s.LinksTo(tr.one(t, grantSpan, want.winner))
		}
		if item.Parent() != batch.ID() || item.Attribute("entitlement.outcome") != want.outcome.String() ||
			item.Attribute("entitlement.tenant_id") != "acme" || !leads(item, 0) || failed(item) != (want.outcome == conflict) {
			t.Errorf("item %d: %v, links %v, %v", i, item.Attributes(), item.GetLinks(), item.GetStatus())
		}
		if want.key == "" {
			continue
		}
		commit := tr.Await(1, func(s *otlptest.Span) bool {
			return s.GetName() == commitSpan && s.Trace() == secondTrace && s.Attribute(telemetry.KeyName) == want.key
		})[0]
		if commit.Parent() != item.ID() || !commit.LinksTo(combined) || !combined.LinksTo(item) || !leads(commit, 1) ||
			commit.Attribute("grantd.batch.size") != "4" || commit.Attribute("entitlement.outcome") != want.outcome.String() {
			t.Errorf("commit of %s: %v below %s, links %v", want.key, commit.Attributes(), commit.Parent(), commit.GetLinks())
		}
	}
	if item := tr.Await(1, func(s *otlptest.Span) bool { return s.Attribute(telemetry.KeyName) == "K4" }); item[0].Attribute("entitlement.reason") !=
		pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID.String() {
		t.Errorf("the refusal: %v", item[0].Attributes())
	}
	wantDocumented(t, tr)
}

// A call that gets no answer says so on its span, and a malformed one whose it was.
func TestTracing_CallsWithoutAnAnswer(t *testing.T) {
	tr := setupTraced(t)
	p, client := tr.serve(t)
	if _, err := client.GrantEntitlement(within(t, firstTrace), grant("acme", "no key", "INV-1")); err == nil {
		t.Fatal("accepted")
	}
	if got := about(tr.one(t, grantSpan, firstTrace)); got["entitlement.tenant_id"] != "acme" {
		t.Errorf("the malformed call: %v", got)
	}
	b := connect(t, tr.url)
	if _, err := b.Exec(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'grantd'`); err != nil {
		t.Fatal(err)
	}
	if _, err := client.GrantEntitlement(within(t, secondTrace), grant("acme", "K", "INV-1")); err == nil {
		t.Fatal("a read-only database took it")
	}
	span := tr.one(t, grantSpan, secondTrace)
	if got := about(span); !failed(span) || got["entitlement.outcome"] != retryable.String() || got["entitlement.reason"] == "" || got[telemetry.KeyName] != "K" {
		t.Errorf("the call without an answer: %v, %v", got, span.GetStatus())
	}
	p.kill()
}

// A line of the log leads to the call that it is about: somebody had his hands in the tables, and a replay meets a bug. So does a line of
// an outage that a single call met.
func TestTracing_LogNamesTheCall(t *testing.T) {
	tr := setupTraced(t)
	p, client := tr.serve(t)
	b := connect(t, tr.url)
	if _, err := client.GrantEntitlement(within(t, firstTrace), grant("acme", "K", "INV-1")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Exec(t.Context(), `DELETE FROM operations`); err != nil {
		t.Fatal(err)
	}
	_, err := client.GrantEntitlement(within(t, secondTrace), grant("acme", "K", "INV-1"))
	wantCode(t, "a replay of what is gone", err, codes.Internal)
	call := tr.one(t, grantSpan, secondTrace)
	line := p.line(t, "internal error", "trace_id="+secondTrace, "span_id="+call.ID(), telemetry.KeyName+"=K")
	if strings.Count(line, telemetry.KeyName) != 1 {
		t.Errorf("the key stands more than once: %s", line)
	}
	if _, err := b.Exec(t.Context(), `ALTER TABLE entries RENAME TO away`); err != nil {
		t.Fatal(err)
	}
	if _, err := client.GrantEntitlement(within(t, thirdTrace), grant("acme", "K3", "INV-3")); err == nil {
		t.Fatal("granted without a ledger")
	}
	p.line(t, "a transaction", "trace_id="+thirdTrace, telemetry.KeyName+"=K3")
}

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
	if _, err := client.GrantEntitlement(within(t, secondTrace), grant("acme", "K", "INV-1"), grpc.WaitForReady(true)); err != nil {
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
