package acceptance_test

import (
	"errors"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/grantd/grantd/client"
	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// Package client against the server: what had its effect is a nil error, everything else is an error that says what it is.
func TestClient_Ledger(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := newClient(t, b.addr)
	ctx := t.Context()

	if _, err := c.Reverse(ctx, reversal("t1", "CASE-0", "INV-1", "team_access")); !isRejected(err, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, afterState) {
		t.Errorf("reversing what is not there: %v", err)
	}
	if _, err := c.Grant(ctx, grant("t1", "K", "INV-1")); err != nil {
		t.Errorf("grant: %v", err)
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.Reverse(ctx, reversal("t1", "CASE-1", "INV-1", "team_access")); err != nil || r.GetOutcome() != outcome || r.GetCurrentState() != reversed {
			t.Errorf("reverse: %v %v", r, err)
		}
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.Reinstate(ctx, reinstatement("t1", "CASE-2", "INV-1", "team_access")); err != nil || r.GetOutcome() != outcome || r.GetCurrentState() != active {
			t.Errorf("reinstate: %v %v", r, err)
		}
	}
	if r, err := c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "team_access"}); err != nil || !r.GetHeld() {
		t.Errorf("check: %v %v", r, err)
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.RecordInvoice(ctx, recording("t1", "refund", "INV-1", refunded, 2)); err != nil || r.GetOutcome() != outcome || r.GetRecorded().GetReversedCount() != 1 {
			t.Errorf("record: %v %v", r, err)
		}
	}
	if r, err := c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "team_access"}); err != nil || r.GetAbsenceReason() != pb.AbsenceReason_ABSENCE_REASON_REVERSED {
		t.Errorf("check: %v %v", r, err)
	}
	if r, err := c.RecordInvoice(ctx, recording("t1", "late", "INV-1", paid, 1)); r != nil || !isRejected(err, pb.RejectionReason_REJECTION_REASON_STALE_VERSION, never) {
		t.Errorf("a stale version: %v %v", r, err)
	}
	if r, err := c.Reinstate(ctx, reinstatement("t1", "CASE-3", "INV-1", "team_access")); r != nil || !isRejected(err, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, afterState) {
		t.Errorf("reinstating under a refunded invoice: %v %v", r, err)
	}
	var conflicting *client.ConflictError
	_, err := c.Reverse(ctx, reversal("t1", "CASE-1", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Reason = "fraud" }))
	if !errors.As(err, &conflicting) || conflicting.MatchedBy != byKey || !slices.Equal(differing(conflicting.Conflict), []string{"reason"}) {
		t.Errorf("another reason: %v", err)
	}
	_, err = c.RecordInvoice(ctx, recording("t1", "other", "INV-1", voided, 2))
	if !errors.As(err, &conflicting) || conflicting.MatchedBy != byBusinessKey || !slices.Equal(differing(conflicting.Conflict), []string{"state"}) {
		t.Errorf("another state of the same version: %v", err)
	}
	_, err = c.Reverse(ctx, reversal("t1", "CASE-4", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Actor = "" }))
	wantCode(t, "no actor", err, codes.InvalidArgument)
	_, err = c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1"})
	wantCode(t, "no type", err, codes.InvalidArgument)
}

// A newer build wrote the payload, and the replica that was asked cannot compare it. The client asks again, since another replica may
// be of that build, and at last says why there is no answer, well within the time that a call has.
func TestClient_NewerRecipe(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := newClient(t, b.addr)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.exec(t, `UPDATE operations SET recipe = 2`)
	_, err := c.Grant(t.Context(), grant("t1", "K", "INV-1"))
	var retryable *client.RetryableError
	if !errors.As(err, &retryable) || retryable.Reason != store.ReasonNewerRecipe {
		t.Errorf("got %v, want a RetryableError for %s", err, store.ReasonNewerRecipe)
	}
}

func isRejected(err error, reason pb.RejectionReason, retry pb.RetryAdvice) bool {
	var r *client.RejectedError
	return errors.As(err, &r) && r.Reason == reason && r.Retry == retry
}
