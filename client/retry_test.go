package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

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

// wantSentAgainAfter sends a grant to a server that refuses the first arrival and asks for a delay.
func wantSentAgainAfter(t *testing.T, s *server, asked time.Duration) {
	t.Helper()
	if _, err := setup(t, s).Grant(within(t, 20*time.Second), request(key)); err != nil {
		t.Fatal(err)
	}
	sameRequests(t, s, request(key), 2)
	if seen := s.seen(); seen[1].at.Sub(seen[0].at) < asked {
		t.Errorf("sent again after %v, asked for %v", seen[1].at.Sub(seen[0].at), asked)
	}
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
	wantSentAgainAfter(t, s, asked)
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
	wantSentAgainAfter(t, s, asked)
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
