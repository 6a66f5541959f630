package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

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
