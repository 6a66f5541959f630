package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const key = "billing:grant:INV-A:team_access"

// server answers as a test scripts it, over TCP. What grantd itself answers is tested with grantd.
type server struct {
	entitlementv1.UnimplementedEntitlementServiceServer
	// answer is called with the number of the arrival, from 1.
	answer    func(ctx context.Context, arrival int) (*entitlementv1.GrantEntitlementResponse, error)
	operation func() (*entitlementv1.GetOperationResponse, error)
	batch     func(arrival int, reqs []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error)

	addr string

	mu       sync.Mutex
	arrivals []arrival
	sockets  []*net.TCPConn
	kill     func()
}

// arrival is one call as the server saw it.
type arrival struct {
	at       time.Time
	deadline time.Time
	requests []*entitlementv1.GrantEntitlementRequest
	metadata metadata.MD
}

func (s *server) arrived(ctx context.Context, reqs ...*entitlementv1.GrantEntitlementRequest) int {
	a := arrival{at: time.Now(), requests: reqs}
	a.deadline, _ = ctx.Deadline()
	a.metadata, _ = metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrivals = append(s.arrivals, a)
	return len(s.arrivals)
}

func (s *server) seen() []arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]arrival(nil), s.arrivals...)
}

func (s *server) GrantEntitlement(ctx context.Context, req *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	return s.answer(ctx, s.arrived(ctx, req))
}

func (s *server) BatchGrantEntitlements(ctx context.Context, req *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	return s.batch(s.arrived(ctx, req.GetRequests()...), req.GetRequests())
}

func (s *server) GetOperation(ctx context.Context, _ *entitlementv1.GetOperationRequest) (*entitlementv1.GetOperationResponse, error) {
	s.arrived(ctx)
	return s.operation()
}

func (s *server) GetEntitlement(ctx context.Context, _ *entitlementv1.GetEntitlementRequest) (*entitlementv1.GetEntitlementResponse, error) {
	s.arrived(ctx)
	return nil, status.Error(codes.NotFound, "no such entitlement")
}

// listen takes the server's address. Connections are noted, so that reset can cut them.
func (s *server) listen(t *testing.T) net.Listener {
	t.Helper()
	lis, err := net.Listen("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	s.addr = lis.Addr().String()
	return noting{lis, s}
}

type noting struct {
	net.Listener
	s *server
}

func (l noting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.s.mu.Lock()
		l.s.sockets = append(l.s.sockets, c.(*net.TCPConn))
		l.s.mu.Unlock()
	}
	return c, err
}

func (s *server) start(t *testing.T) {
	t.Helper()
	g := grpc.NewServer()
	entitlementv1.RegisterEntitlementServiceServer(g, s)
	lis := s.listen(t)
	go g.Serve(lis)
	s.kill = func() {
		lis.Close()
		s.reset()
		g.Stop()
	}
	t.Cleanup(g.Stop)
}

// reset cuts every connection as a power cut would, in the middle of its calls.
func (s *server) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.sockets {
		c.SetLinger(0)
		c.Close()
	}
	s.sockets = nil
}

func setup(t *testing.T, s *server, opts ...grpc.DialOption) *client.Client {
	t.Helper()
	if s.addr == "" {
		s.addr = "127.0.0.1:0"
		s.start(t)
	}
	c, err := client.New(s.addr, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// within bounds a test that would otherwise wait for the policy's own limit.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func request(key string) *entitlementv1.GrantEntitlementRequest {
	return &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: key,
		Grant: &entitlementv1.Grant{
			TenantId: "acme", InvoiceId: "INV-A", EntitlementType: "team_access", Quantity: proto.Int64(10),
			Scope: map[string]string{"seats": "10", "region": "eu"},
		},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
	}
}

func applied() *entitlementv1.GrantEntitlementResponse {
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED,
		Result:  &entitlementv1.GrantEntitlementResponse_Entitlement{Entitlement: &entitlementv1.Entitlement{EntitlementId: "e1"}},
	}
}

// refused is a status as grantd sends it.
func refused(code codes.Code, reason string, delay time.Duration) error {
	return withDetails(code, reason,
		&errdetails.ErrorInfo{Reason: reason, Domain: "entitlement.v1"},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
}

func withDetails(code codes.Code, message string, details ...protoadapt.MessageV1) error {
	s, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func pushback(ctx context.Context, ms string) {
	if err := grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", ms)); err != nil {
		panic(err)
	}
}

// sameRequests checks that every arrival carried the request, whole.
func sameRequests(t *testing.T, s *server, want *entitlementv1.GrantEntitlementRequest, arrivals int) {
	t.Helper()
	seen := s.seen()
	if len(seen) != arrivals {
		t.Errorf("%d arrivals, want %d", len(seen), arrivals)
	}
	for i, a := range seen {
		if diff := cmp.Diff(want, a.requests[0], protocmp.Transform()); diff != "" {
			t.Errorf("arrival %d (-sent +arrived):\n%s", i+1, diff)
		}
	}
}

func TestGrant_AppliedIsNoError(t *testing.T) {
	want := applied()
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return want, nil }}
	c := setup(t, s)
	for _, outcome := range []entitlementv1.Outcome{entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED} {
		want.Outcome = outcome
		got, err := c.Grant(t.Context(), request(key))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestGrant_WithoutDeadlineIsBounded(t *testing.T) {
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return applied(), nil }}
	if _, err := setup(t, s).Grant(context.Background(), request(key)); err != nil {
		t.Fatal(err)
	}
	if a := s.seen()[0]; a.deadline.IsZero() || a.deadline.Sub(a.at) > 30*time.Second {
		t.Errorf("deadline %v after arrival, want at most 30s", a.deadline.Sub(a.at))
	}
}

func TestGrant_UnavailableIsRetriedWithTheSameRequest(t *testing.T) {
	s := &server{answer: func(_ context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		if n <= 2 {
			return nil, refused(codes.Unavailable, "COMMIT_UNKNOWN", time.Millisecond)
		}
		return applied(), nil
	}}
	if _, err := setup(t, s).Grant(within(t, 20*time.Second), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 3)
}

func TestGrant_PushbackIsHonoured(t *testing.T) {
	// Longer than the policy's own first backoff can be.
	const asked = 500 * time.Millisecond
	s := &server{answer: func(ctx context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		if n == 1 {
			pushback(ctx, fmt.Sprint(asked.Milliseconds()))
			return nil, refused(codes.Unavailable, "READ_ONLY", asked)
		}
		return applied(), nil
	}}
	if _, err := setup(t, s).Grant(within(t, 20*time.Second), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 2)
	if seen := s.seen(); seen[1].at.Sub(seen[0].at) < asked {
		t.Errorf("sent again after %v, asked for %v", seen[1].at.Sub(seen[0].at), asked)
	}
}

func TestGrant_NegativePushbackForbidsRetries(t *testing.T) {
	s := &server{answer: func(ctx context.Context, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
		pushback(ctx, "-1")
		return nil, refused(codes.Unavailable, "READ_ONLY", time.Second)
	}}
	_, err := setup(t, s).Grant(within(t, 20*time.Second), request(key))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("error %v, want UNAVAILABLE", err)
	}
	sameRequests(t, s, request(key), 1)
}

func TestGrant_RetriesUsedUp(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.ResourceExhausted} {
		t.Run(code.String(), func(t *testing.T) {
			s := &server{answer: func(ctx context.Context, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
				pushback(ctx, "2")
				return nil, refused(code, "COMMIT_UNKNOWN", 2*time.Millisecond)
			}}
			resp, err := setup(t, s).Grant(within(t, 20*time.Second), request(key))
			if resp != nil {
				t.Errorf("response %v beside an error", resp)
			}
			var retryable *client.RetryableError
			if !errors.As(err, &retryable) {
				t.Fatalf("error %v, want RetryableError", err)
			}
			if retryable.Key != key || retryable.Reason != "COMMIT_UNKNOWN" || retryable.Delay != 2*time.Millisecond {
				t.Errorf("%+v", retryable)
			}
			if status.Code(errors.Unwrap(err)) != code {
				t.Errorf("unwraps to %v, want status %v", errors.Unwrap(err), code)
			}
			if !strings.Contains(err.Error(), "may or may not be there") || !strings.Contains(err.Error(), key) {
				t.Errorf("text %q", err)
			}
			sameRequests(t, s, request(key), 5)
		})
	}
}

func TestGrant_OverloadIsRetriedAfterTheDelayAsked(t *testing.T) {
	const asked = 300 * time.Millisecond
	s := &server{answer: func(_ context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		if n == 1 {
			return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", asked)
		}
		return applied(), nil
	}}
	if _, err := setup(t, s).Grant(within(t, 20*time.Second), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 2)
	if seen := s.seen(); seen[1].at.Sub(seen[0].at) < asked {
		t.Errorf("sent again after %v, asked for %v", seen[1].at.Sub(seen[0].at), asked)
	}
}

// gRPC answers RESOURCE_EXHAUSTED to a message that is too large, and proxies do to a quota: neither may be sent again.
func TestGrant_ResourceExhaustedOfOthersIsNotRetried(t *testing.T) {
	for name, refusal := range map[string]error{
		"no details": status.Error(codes.ResourceExhausted, "received message larger than max"),
		"other domain": withDetails(codes.ResourceExhausted, "quota",
			&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Domain: "proxy.example"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)}),
	} {
		t.Run(name, func(t *testing.T) {
			s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return nil, refusal }}
			_, err := setup(t, s).Grant(within(t, 20*time.Second), request(key))
			var retryable *client.RetryableError
			if errors.As(err, &retryable) || status.Code(err) != codes.ResourceExhausted {
				t.Errorf("error %v, want plain RESOURCE_EXHAUSTED", err)
			}
			sameRequests(t, s, request(key), 1)
		})
	}
}

func TestGrant_DelayThatIsTooLongIsLeftToTheCaller(t *testing.T) {
	for name, tc := range map[string]struct{ asked, allowed time.Duration }{
		"past the deadline": {5 * time.Second, 4 * time.Second},
		"past the limit":    {time.Minute, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) {
				return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", tc.asked)
			}}
			ctx := within(t, tc.allowed)
			_, err := setup(t, s).Grant(ctx, request(key))
			var retryable *client.RetryableError
			if !errors.As(err, &retryable) || retryable.Delay != tc.asked || retryable.Reason != "QUEUE_FULL" {
				t.Errorf("error %v, want QUEUE_FULL with delay %v", err, tc.asked)
			}
			if ctx.Err() != nil {
				t.Error("waited until the deadline")
			}
			sameRequests(t, s, request(key), 1)
		})
	}
}

func TestGrant_DeadlineIsRespected(t *testing.T) {
	for name, answer := range map[string]func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error){
		"no answer": func(ctx context.Context, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"long pushback": func(ctx context.Context, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
			pushback(ctx, "60000")
			return nil, refused(codes.Unavailable, "READ_ONLY", time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := setup(t, &server{answer: answer})
			started := time.Now()
			_, err := c.Grant(within(t, 200*time.Millisecond), request(key))
			var retryable *client.RetryableError
			if !errors.As(err, &retryable) || status.Code(err) != codes.DeadlineExceeded || retryable.Key != key {
				t.Errorf("error %v, want RetryableError with DEADLINE_EXCEEDED", err)
			}
			if took := time.Since(started); took > 30*time.Second {
				t.Errorf("returned after %v", took)
			}
		})
	}
}

func TestGrant_CancelledWhileWaiting(t *testing.T) {
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) {
		time.AfterFunc(50*time.Millisecond, cancel)
		return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", time.Minute)
	}}
	started := time.Now()
	_, err := setup(t, s).Grant(ctx, request(key))
	var retryable *client.RetryableError
	if !errors.As(err, &retryable) {
		t.Errorf("error %v, want RetryableError", err)
	}
	if took := time.Since(started); took > 30*time.Second {
		t.Errorf("returned after %v", took)
	}
}

// A restart cuts off every call in flight. With the throttling that gRPC's documentation shows, ten tokens, all but the first few of
// them failed, though the server was back at once.
func TestGrant_ServerKilledMidCall(t *testing.T) {
	const calls = 200
	killed := make(chan struct{})
	var inFlight sync.WaitGroup
	inFlight.Add(calls)
	s := &server{answer: func(ctx context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		select {
		case <-killed:
			return applied(), nil
		default:
		}
		if n <= calls {
			inFlight.Done()
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	c := setup(t, s)
	ctx := within(t, 25*time.Second)
	errs := make(chan error, calls)
	for i := range calls {
		go func() {
			_, err := c.Grant(ctx, request(fmt.Sprintf("billing:grant:INV-%d:team_access", i)))
			errs <- err
		}()
	}
	inFlight.Wait()
	s.kill()
	close(killed)
	s.start(t)
	for range calls {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	times := map[string]int{}
	for _, a := range s.seen() {
		times[a.requests[0].GetIdempotencyKey()]++
	}
	if len(times) != calls {
		t.Errorf("%d keys arrived, want %d", len(times), calls)
	}
	for key, n := range times {
		if n < 2 {
			t.Errorf("%s arrived %d times: it was not in flight", key, n)
		}
	}
}

func TestGrant_WaitsForServerThatIsNotUpYet(t *testing.T) {
	s := &server{
		addr:   "127.0.0.1:0",
		answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return applied(), nil },
	}
	s.listen(t).Close() // the address is known, and nobody listens there
	// Two attempts are over after a quarter of a second, if they do not wait.
	c := setup(t, s, grpc.WithMaxCallAttempts(2))
	first := within(t, time.Second)
	_, err := c.Grant(first, request(key))
	var retryable *client.RetryableError
	if !errors.As(err, &retryable) || first.Err() == nil {
		t.Fatalf("error %v, want RetryableError at the deadline", err)
	}
	s.start(t)
	if _, err := c.Grant(within(t, 20*time.Second), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 1)
}

func TestGrant_Conflict(t *testing.T) {
	conflict := &entitlementv1.Conflict{
		Differences: []*entitlementv1.Difference{
			{Field: "quantity", Stored: proto.String("9007199254740993"), Submitted: proto.String("9007199254740992")},
			{Field: "scope.seats", Stored: proto.String("secret-value")},
		},
		StoredOperation: &entitlementv1.Operation{IdempotencyKey: "admin:grant:INV-A:team_access"},
	}
	answer := &entitlementv1.GrantEntitlementResponse{
		Outcome:   entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD,
		MatchedBy: entitlementv1.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY,
		Result:    &entitlementv1.GrantEntitlementResponse_Conflict{Conflict: conflict},
	}
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return answer, nil }}
	c := setup(t, s)

	resp, err := c.Grant(t.Context(), request(key))
	var got *client.ConflictError
	if resp != nil || !errors.As(err, &got) {
		t.Fatalf("%v, %v, want ConflictError", resp, err)
	}
	if got.Key != key || got.MatchedBy != answer.MatchedBy {
		t.Errorf("%+v", got)
	}
	if diff := cmp.Diff(conflict, got.Conflict, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	const want = `grantd: key "billing:grant:INV-A:team_access": conflict: the key was used before with another payload; different: quantity, scope.seats`
	if err.Error() != want {
		t.Errorf("text %q\nwant %q", err, want)
	}

	answer.MatchedBy = entitlementv1.MatchedBy_MATCHED_BY_BUSINESS_KEY
	conflict.OmittedDifferences = 4
	_, err = c.Grant(t.Context(), request(key))
	const wantOther = `grantd: key "billing:grant:INV-A:team_access": conflict: key "admin:grant:INV-A:team_access" did this before with another payload; ` +
		`different: quantity, scope.seats and 4 more`
	if err == nil || err.Error() != wantOther {
		t.Errorf("text %q\nwant %q", err, wantOther)
	}
}

func TestGrant_Rejected(t *testing.T) {
	answer := rejection(entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, "the invoice is open")
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return answer, nil }}
	resp, err := setup(t, s).Grant(t.Context(), request(key))
	var got *client.RejectedError
	if resp != nil || !errors.As(err, &got) {
		t.Fatalf("%v, %v, want RejectedError", resp, err)
	}
	want := &client.RejectedError{
		Key: key, Reason: answer.GetRejection().Reason, Message: "the invoice is open",
		Retry: entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := `grantd: key "` + key + `": rejected: INVOICE_NOT_PAID: the invoice is open`; err.Error() != text {
		t.Errorf("text %q\nwant %q", err, text)
	}
	sameRequests(t, s, request(key), 1)
}

func rejection(reason entitlementv1.RejectionReason, message string) *entitlementv1.GrantEntitlementResponse {
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_REJECTED,
		Result: &entitlementv1.GrantEntitlementResponse_Rejection{Rejection: &entitlementv1.Rejection{
			Reason: reason, Message: message, Retry: entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
		}},
	}
}

// Whatever a newer server says that this client does not know, it is not a grant.
func TestGrant_UnknownOutcomeIsAnError(t *testing.T) {
	for _, outcome := range []entitlementv1.Outcome{0, entitlementv1.Outcome_OUTCOME_NOT_APPLIED, 99} {
		s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) {
			return &entitlementv1.GrantEntitlementResponse{Outcome: outcome}, nil
		}}
		if resp, err := setup(t, s).Grant(t.Context(), request(key)); err == nil || resp != nil {
			t.Errorf("outcome %v: %v, %v", outcome, resp, err)
		}
	}
}

func TestGrant_OtherStatusesKeepTheirDetails(t *testing.T) {
	want := &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "grant.tenant_id", Description: "required"}}}
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) {
		return nil, withDetails(codes.InvalidArgument, "malformed", want)
	}}
	_, err := setup(t, s).Grant(t.Context(), request(key))
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), key) {
		t.Errorf("error %v, want INVALID_ARGUMENT that names the key", err)
	}
	if diff := cmp.Diff([]any{want}, status.Convert(err).Details(), protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	sameRequests(t, s, request(key), 1)
}

func TestLookups(t *testing.T) {
	want := &entitlementv1.GetOperationResponse{Outcome: entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD}
	answer := func() (*entitlementv1.GetOperationResponse, error) { return want, nil }
	s := &server{operation: func() (*entitlementv1.GetOperationResponse, error) { return answer() }}
	c := setup(t, s)

	got, err := c.Operation(t.Context(), &entitlementv1.GetOperationRequest{TenantId: "acme"})
	if err != nil || got.GetOutcome() != want.GetOutcome() {
		t.Errorf("%v, %v: a conflict is what was asked for, not an error", got, err)
	}

	answer = func() (*entitlementv1.GetOperationResponse, error) {
		return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", time.Hour)
	}
	_, err = c.Operation(t.Context(), &entitlementv1.GetOperationRequest{TenantId: "acme"})
	var retryable *client.RetryableError
	if !errors.As(err, &retryable) || retryable.Key != "" || retryable.Delay != time.Hour {
		t.Errorf("error %v, want RetryableError without a key", err)
	}

	if e, err := c.Entitlement(t.Context(), &entitlementv1.GetEntitlementRequest{TenantId: "acme"}); e != nil || status.Code(err) != codes.NotFound {
		t.Errorf("%v, %v, want NOT_FOUND", e, err)
	}
}

// An application that has its own connection keeps it; overload and baggage are handled there too.
func TestWrap(t *testing.T) {
	s := &server{addr: "127.0.0.1:0", answer: func(_ context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		if n == 1 {
			return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", time.Millisecond)
		}
		return applied(), nil
	}}
	s.start(t)
	cc, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	c := client.Wrap(cc)
	if _, err := c.Service().GrantEntitlement(t.Context(), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 2)
	if got := s.seen()[1].metadata.Get("baggage"); len(got) != 1 {
		t.Errorf("baggage %q", got)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Grant(t.Context(), request(key)); err != nil {
		t.Errorf("Close closed a connection that is not the client's: %v", err)
	}
}

func TestNew_KeepsTheCallersOptions(t *testing.T) {
	s := &server{answer: func(_ context.Context, n int) (*entitlementv1.GrantEntitlementResponse, error) {
		if n == 1 {
			return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", time.Millisecond)
		}
		return applied(), nil
	}}
	intercepted := 0
	c := setup(t, s, grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		intercepted++
		return invoke(metadata.AppendToOutgoingContext(ctx, "x-attempt", fmt.Sprint(intercepted)), method, req, reply, cc, opts...)
	}))
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-request", "r1")
	if _, err := c.Grant(ctx, request(key)); err != nil {
		t.Fatal(err)
	}
	for i, a := range s.seen() {
		if got := a.metadata.Get("x-attempt"); !cmp.Equal(got, []string{fmt.Sprint(i + 1)}) {
			t.Errorf("arrival %d: x-attempt %q", i+1, got)
		}
		if got := a.metadata.Get("x-request"); !cmp.Equal(got, []string{"r1"}) {
			t.Errorf("arrival %d: x-request %q", i+1, got)
		}
	}
	if intercepted != 2 {
		t.Errorf("intercepted %d attempts, want 2", intercepted)
	}

	if _, err := client.New("localhost:1"); err == nil {
		t.Error("a connection without transport credentials was accepted")
	}
}
