package acceptance_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
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
		if of := about(span); of["entitlement.tenant_id"] != "acme" || of["entitlement.event_id"] == "" {
			t.Errorf("%s says of tenant and event: %v", span.GetName(), of)
		}
	}
	if traces[firstTrace] < 3 || traces[secondTrace] < 3 {
		t.Errorf("the search finds spans in %v", traces)
	}

	looked := strings.Repeat("7", 32)
	story, err := first.GetOperation(within(t, looked), byName("acme", key, full))
	if err != nil {
		t.Fatal(err)
	}
	look := tr.one(t, "entitlement.v1.EntitlementService/GetOperation", looked)
	if diff := cmp.Diff(map[string]string{
		telemetry.KeyName: key, "entitlement.tenant_id": "acme",
		"entitlement.outcome": already.String(), "entitlement.matched_by": byKey.String(),
	}, about(look)); diff != "" || failed(look) {
		t.Errorf("the look-up: %v (-want +got):\n%s", look.GetStatus(), diff)
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
