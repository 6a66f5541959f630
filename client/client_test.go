package client_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

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
