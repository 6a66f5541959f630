package bench_test

import (
	"context"
	"maps"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// authority knows the keys it has seen.
type authority struct {
	entitlementv1.UnimplementedEntitlementServiceServer
	mu      sync.Mutex
	applied map[string]bool
	refuse  error // of every single call
}

func (a *authority) decide(r *entitlementv1.GrantEntitlementRequest) *entitlementv1.GrantEntitlementResponse {
	if a.applied[r.GetIdempotencyKey()] {
		return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED}
	}
	a.applied[r.GetIdempotencyKey()] = true
	return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED}
}

func (a *authority) GrantEntitlement(_ context.Context, r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refuse != nil {
		return nil, a.refuse
	}
	return a.decide(r), nil
}

func (a *authority) BatchGrantEntitlements(_ context.Context, r *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	response := &entitlementv1.BatchGrantEntitlementsResponse{}
	for _, item := range r.GetRequests() {
		response.Responses = append(response.Responses, a.decide(item))
	}
	return response, nil
}

func setup(t *testing.T) (*authority, *bench.Load) {
	t.Helper()
	a := &authority{applied: make(map[string]bool)}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	entitlementv1.RegisterEntitlementServiceServer(server, a)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	var conns []*grpc.ClientConn
	for range 2 {
		conn, err := grpc.NewClient("passthrough:///authority", append(bench.DialOptions(),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	return a, bench.NewLoad(conns)
}

func measure(t *testing.T, load *bench.Load, p bench.Point) *bench.Result {
	t.Helper()
	result, err := load.Run(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func TestLoad_NewKeysAndReplays(t *testing.T) {
	a, load := setup(t)
	if err := load.Fill(t.Context(), 40); err != nil {
		t.Fatal(err)
	}
	if len(a.applied) != 40 {
		t.Fatalf("filled %d, want 40", len(a.applied))
	}
	for _, test := range []struct {
		point    bench.Point
		requests uint64
		outcome  string
		applied  int
	}{
		{bench.Point{Callers: 8, Count: 300}, 300, "OUTCOME_NEWLY_APPLIED", 340},
		{bench.Point{Callers: 3, Count: 100, Batch: 20}, 100, "OUTCOME_NEWLY_APPLIED", 440},
		{bench.Point{Callers: 8, Count: 300, Replay: true}, 300, "OUTCOME_ALREADY_APPLIED", 440},
		{bench.Point{Callers: 1, Count: 100, Replay: true, Batch: 50}, 100, "OUTCOME_ALREADY_APPLIED", 440},
	} {
		r := measure(t, load, test.point)
		if want := map[string]uint64{test.outcome: test.requests}; !maps.Equal(r.Outcomes, want) || r.Requests != test.requests {
			t.Errorf("%s: %d requests, %v; want %v", r.Name, r.Requests, r.Outcomes, want)
		}
		if len(r.Unexpected()) != 0 || r.PerSecond <= 0 || r.P50Millis <= 0 || r.P50Millis > r.MaxMillis {
			t.Errorf("%s: %+v", r.Name, r)
		}
		if len(a.applied) != test.applied {
			t.Errorf("%s: the server applied %d keys, want %d", r.Name, len(a.applied), test.applied)
		}
	}
}

func TestLoad_DurationEndsThePoint(t *testing.T) {
	_, load := setup(t)
	if r := measure(t, load, bench.Point{Callers: 2, Duration: 50 * time.Millisecond}); r.Requests == 0 || r.Seconds < 0.05 {
		t.Errorf("%d requests in %v s", r.Requests, r.Seconds)
	}
}

func TestLoad_RefusalsAreReported(t *testing.T) {
	a, load := setup(t)
	st, err := status.New(codes.ResourceExhausted, "full").WithDetails(&errdetails.ErrorInfo{Reason: "QUEUE_FULL"})
	if err != nil {
		t.Fatal(err)
	}
	a.refuse = st.Err()
	r := measure(t, load, bench.Point{Callers: 2, Count: 6})
	if want := map[string]uint64{"ResourceExhausted QUEUE_FULL": 6}; r.Requests != 0 || !maps.Equal(r.Unexpected(), want) {
		t.Errorf("%d requests, unexpected %v; want %v", r.Requests, r.Unexpected(), want)
	}
}

func TestLoad_RefusesPointsWithoutSense(t *testing.T) {
	_, load := setup(t)
	for _, p := range []bench.Point{
		{Callers: 0, Count: 1},
		{Callers: 1},
		{Callers: 1, Count: 1, Batch: bench.MaxBatch + 1},
		{Callers: 1, Count: 1, Replay: true},
	} {
		if _, err := load.Run(t.Context(), p); err == nil {
			t.Errorf("%+v was run", p)
		}
	}
}

func TestRequest_IsAFunctionOfItsNumber(t *testing.T) {
	keys := make(map[string]bool)
	for number := range uint64(2000) {
		r := bench.Request(7, number)
		if !proto.Equal(r, bench.Request(7, number)) {
			t.Fatalf("grant %d is not the same twice", number)
		}
		keys[r.GetIdempotencyKey()] = true
		g := r.GetGrant()
		if want := "billing:grant:" + g.GetInvoiceId() + ":" + g.GetEntitlementType(); r.GetIdempotencyKey() != want {
			t.Errorf("key %q, want %q", r.GetIdempotencyKey(), want)
		}
		if len(g.GetInvoiceId()) != len("in_")+20 || !strings.HasPrefix(g.GetTenantId(), "cus_") || g.GetEntitlementType() == "" {
			t.Errorf("grant %v", g)
		}
	}
	if len(keys) != 2000 {
		t.Errorf("%d keys of 2000 grants", len(keys))
	}
	if bench.Request(7, 1).GetIdempotencyKey() == bench.Request(8, 1).GetIdempotencyKey() {
		t.Error("two seeds make the same key")
	}
}

func TestReadOutcomes(t *testing.T) {
	answer := func(o entitlementv1.Outcome) *entitlementv1.GrantEntitlementResponse {
		return &entitlementv1.GrantEntitlementResponse{
			Outcome: o, Operation: &entitlementv1.Operation{IdempotencyKey: "k"}, CurrentVersion: 3,
			Result: &entitlementv1.GrantEntitlementResponse_Entitlement{Entitlement: &entitlementv1.Entitlement{EntitlementId: "e"}},
		}
	}
	for number, name := range entitlementv1.Outcome_name {
		encoded, err := proto.Marshal(answer(entitlementv1.Outcome(number)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := bench.ReadOutcomes(encoded)
		if want := map[string]uint64{name: 1}; err != nil || !maps.Equal(got, want) {
			t.Errorf("%v, %v; want %v", got, err, want)
		}
		if _, err := bench.ReadOutcomes(encoded[:len(encoded)-1]); err == nil {
			t.Error("a message that is cut off was read")
		}
	}
	encoded, err := proto.Marshal(&entitlementv1.BatchGrantEntitlementsResponse{Responses: []*entitlementv1.GrantEntitlementResponse{
		answer(entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED), answer(entitlementv1.Outcome_OUTCOME_REJECTED), answer(99),
		answer(entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED),
	}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := bench.ReadOutcomes(encoded)
	want := map[string]uint64{"OUTCOME_NEWLY_APPLIED": 2, "OUTCOME_REJECTED": 1, "OUTCOME_UNSPECIFIED": 1}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("batch: %v, %v; want %v", got, err, want)
	}
}
