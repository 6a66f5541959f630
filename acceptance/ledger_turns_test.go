package acceptance_test

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// A reversal is an entry, appended once; so is the reinstatement after it. Both names of the entitlement are one payload.
func TestTurn_NewlyThenAlreadyApplied(t *testing.T) {
	t.Parallel()
	b := setup(t)
	granted := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	id := granted.GetEntitlement().GetEntitlementId()
	reverse := map[string]*pb.ReverseEntitlementRequest{
		"by effect": reversal("t1", "CASE-1", "INV-1", "team_access"),
		"by id": reversal("t1", "CASE-1", "", "", func(r *pb.ReverseEntitlementRequest) {
			r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: id}
		}),
	}
	reinstate := map[string]*pb.ReinstateEntitlementRequest{
		"by effect": reinstatement("t1", "CASE-2", "INV-1", "team_access"),
		"by id": reinstatement("t1", "CASE-2", "", "", func(r *pb.ReinstateEntitlementRequest) {
			r.Target = &pb.ReinstateEntitlementRequest_EntitlementId{EntitlementId: id}
		}),
	}

	gone := b.turn(t, newly, byNothing, reverse["by effect"])
	wantNow(t, "the reversal", gone, reversed, 2)
	op := gone.GetOperation()
	if op.GetKind() != opReverse || op.GetIdempotencyKey() != "CASE-1" || op.GetInvoiceId() != "INV-1" || op.GetEntitlementId() != id ||
		op.GetEntryNumber() != 2 || op.GetActor() != "alice" || op.GetReason() != "charge disputed" {
		t.Errorf("the operation: %v", op)
	}
	want := proto.CloneOf(granted.GetEntitlement())
	want.State, want.Version, want.ChangedAt = reversed, 2, op.GetAppliedAt()
	wantSame(t, "the entitlement as of the reversal", gone.GetEntitlement(), want)
	before := b.written(t)
	for name, r := range reverse {
		again := b.turn(t, already, byKey, r)
		wantSame(t, "the reversal again, "+name, again.GetEntitlement(), gone.GetEntitlement())
		wantSame(t, "its operation", again.GetOperation(), op)
	}
	wantSame(t, "what replays wrote beside their attempts", b.written(t), before)

	back := b.turn(t, newly, byNothing, reinstate["by id"])
	wantNow(t, "the reinstatement", back, active, 3)
	if op := back.GetOperation(); op.GetKind() != opReinstate || op.GetEntryNumber() != 3 || op.GetActor() != "bob" || op.GetReason() != "dispute won" {
		t.Errorf("the operation: %v", op)
	}
	for name, r := range reinstate {
		wantSame(t, "the reinstatement again, "+name, b.turn(t, already, byKey, r).GetEntitlement(), back.GetEntitlement())
	}
	// What was told then is told again, beside what is so now. Nothing is turned by it.
	for name, r := range reverse {
		again := b.turn(t, already, byKey, r)
		wantSame(t, "the reversal after the reinstatement, "+name, again.GetEntitlement(), gone.GetEntitlement())
		wantNow(t, name, again, active, 3)
	}
	wantSame(t, "the ledger", b.ledger(t, "t1", "INV-1", "team_access"), []string{
		"1 GRANTED K at 1", "2 REVERSED CASE-1 at 1: alice charge disputed", "3 REINSTATED CASE-2 at 1: bob dispute won",
	})
	b.wantWhole(t)
	b.wantOrdered(t)
}

// What is reversed already, or active already, is told who made it so, whatever the reason; the new key is bound to that.
func TestTurn_AlreadyAppliedUnderAnotherKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	granted := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	other := func(r *pb.ReverseEntitlementRequest) { r.Reason, r.Actor = "fraud", "carol" }

	// Active since the grant: that is the operation.
	never := b.turn(t, already, byBusinessKey, reinstatement("t1", "never-reversed", "INV-1", "team_access"))
	wantSame(t, "the grant", never.GetOperation(), granted.GetOperation())
	wantSame(t, "its result", never.GetEntitlement(), granted.GetEntitlement())

	gone := b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access"))
	same := b.turn(t, already, byBusinessKey, reversal("t1", "CASE-1b", "INV-1", "team_access", other))
	wantSame(t, "the reversal", same.GetOperation(), gone.GetOperation())
	wantSame(t, "its result", same.GetEntitlement(), gone.GetEntitlement())

	back := b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	wantSame(t, "the reinstatement", b.turn(t, already, byBusinessKey, reinstatement("t1", "CASE-2b", "INV-1", "team_access")).GetOperation(), back.GetOperation())

	// An alias is known by its own payload, and stays with its winner.
	replayed := b.turn(t, already, byKey, reversal("t1", "CASE-1b", "INV-1", "team_access", other))
	wantSame(t, "the alias again", replayed.GetEntitlement(), gone.GetEntitlement())
	wantNow(t, "the alias again", replayed, active, 3)
	b.turn(t, conflict, byKey, reversal("t1", "CASE-1b", "INV-1", "team_access"))

	// A refund reversed it: that is the operation.
	refund := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2))
	byRefund := b.turn(t, already, byBusinessKey, reversal("t1", "CASE-3", "INV-1", "team_access"))
	wantSame(t, "the refund", byRefund.GetOperation(), refund.GetOperation())
	wantSame(t, "its result", byRefund.GetEntitlement(), refund.GetRecorded().GetReversed()[0])
	found := b.operation(t, byName("t1", "CASE-3", full))
	wantSame(t, "the look-up's entitlement", found.GetEntitlement(), byRefund.GetEntitlement())
	if found.GetRecorded() != nil {
		t.Errorf("the look-up of a reversal says that it recorded %v", found.GetRecorded())
	}
	b.wantWhole(t)
	b.wantOrdered(t)
}

// A key belongs to one request. Every field of the payload that differs is named, and nothing else changes.
func TestTurn_ConflictNamesEveryDifference(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.want(t, newly, byNothing, grant("t1", "K", "INV-1")).GetEntitlement().GetEntitlementId()
	otherID := b.want(t, newly, byNothing, grant("t1", "K2", "INV-2")).GetEntitlement().GetEntitlementId()
	op := b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access")).GetOperation()
	b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	b.record(t, newly, byNothing, recording("t1", "R", "INV-3", paid, 5))
	before := b.written(t)

	differ := func(field, stored, submitted string) *pb.Difference {
		return &pb.Difference{Field: field, Stored: &stored, Submitted: &submitted}
	}
	kind := func(submitted pb.OperationKind) *pb.Difference {
		return differ("kind", opReverse.String(), submitted.String())
	}
	for name, test := range map[string]struct {
		request any
		want    []*pb.Difference
	}{
		"reason": {reversal("t1", "CASE-1", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Reason = "fraud" }),
			[]*pb.Difference{differ("reason", "charge disputed", "fraud")}},
		"actor": {reversal("t1", "CASE-1", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Actor = "carol" }),
			[]*pb.Difference{differ("actor", "alice", "carol")}},
		"target by effect": {reversal("t1", "CASE-1", "INV-2", "team_access"), []*pb.Difference{differ("entitlement_id", id, otherID)}},
		"target by id": {reversal("t1", "CASE-1", "", "", func(r *pb.ReverseEntitlementRequest) {
			r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: otherID}
		}), []*pb.Difference{differ("entitlement_id", id, otherID)}},
		"all": {reversal("t1", "CASE-1", "INV-2", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Reason, r.Actor = "fraud", "carol" }),
			[]*pb.Difference{differ("actor", "alice", "carol"), differ("entitlement_id", id, otherID), differ("reason", "charge disputed", "fraud")}},
		"a reinstatement": {reinstatement("t1", "CASE-1", "INV-1", "team_access"), []*pb.Difference{kind(opReinstate)}},
		"a recording":     {recording("t1", "CASE-1", "INV-1", refunded, 2), []*pb.Difference{kind(opRecord)}},
		"a grant":         {grant("t1", "CASE-1", "INV-1"), []*pb.Difference{kind(opGrant)}},
	} {
		t.Run(name, func(t *testing.T) {
			want := &pb.Conflict{StoredOperation: op, Differences: test.want}
			switch r := test.request.(type) {
			case *pb.GrantEntitlementRequest:
				wantSame(t, "the conflict", b.want(t, conflict, byKey, r).GetConflict(), want)
			case *pb.RecordInvoiceStateRequest:
				wantSame(t, "the conflict", b.record(t, conflict, byKey, r).GetConflict(), want)
			default:
				wantSame(t, "the conflict", b.turn(t, conflict, byKey, r).GetConflict(), want)
			}
		})
	}
	// A target that is not there is another one too.
	if got := b.turn(t, conflict, byKey, reversal("t1", "CASE-1", "INV-9", "team_access")).GetConflict(); differing(got)[0] != "entitlement_id" {
		t.Errorf("a target that is not there: %v", got)
	}

	recorded := b.record(t, conflict, byKey, recording("t1", "R", "INV-4", voided, 6)).GetConflict()
	wantSame(t, "the recording's conflict", recorded.GetDifferences(), []*pb.Difference{
		differ("invoice_id", "INV-3", "INV-4"), differ("state", "INVOICE_STATE_PAID", "INVOICE_STATE_VOIDED"), differ("version", "5", "6"),
	})
	granted := b.turn(t, conflict, byKey, reversal("t1", "K", "INV-1", "team_access")).GetConflict()
	wantSame(t, "the grant's conflict", granted.GetDifferences(), []*pb.Difference{differ("kind", opGrant.String(), opReverse.String())})
	wantSame(t, "what conflicts wrote beside their attempts", b.written(t), before)
	b.wantOrdered(t)
}

// Every reason that a reversal or a reinstatement can meet, in the enum's order. The key stays free.
func TestTurn_EveryRejection(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	before := b.written(t)
	for _, request := range []any{
		reversal("t1", "CASE", "INV-2", "team_access"), reinstatement("t1", "CASE", "INV-2", "team_access"), reversal("t1", "CASE", "INV-1", "sso"),
		reversal("t2", "CASE", "INV-1", "team_access"),
		reversal("t1", "CASE", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.GetBusinessKey().OperationVersion = 1 }),
		reversal("t1", "CASE", "", "", func(r *pb.ReverseEntitlementRequest) {
			r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: "0190b6f0-0000-7000-8000-000000000000"}
		}),
	} {
		b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, request)
	}
	wantSame(t, "what refusals wrote beside their attempts", b.written(t), before)

	for _, state := range []pb.InvoiceState{unpaid, voided, refunded} {
		invoice := "INV-" + short(state)
		b.want(t, newly, byNothing, grant("t1", "K-"+invoice, invoice))
		b.turn(t, newly, byNothing, reversal("t1", "gone-"+invoice, invoice, "team_access"))
		b.record(t, newly, byNothing, recording("t1", "R-"+invoice, invoice, state, 2))
		reason := pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED
		if state == unpaid {
			reason = pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID
		}
		back := reinstatement("t1", "back-"+invoice, invoice, "team_access")
		b.turnRefused(t, reason, back)
		b.turnRefused(t, reason, back)
		wantSame(t, "the ledger of "+invoice, len(b.ledger(t, "t1", invoice, "team_access")), 2)
		b.record(t, newly, byNothing, recording("t1", "paid-"+invoice, invoice, paid, 3))
		b.turn(t, newly, byNothing, back)
		want := fmt.Sprintf("4 0 %d", reason)
		wantSame(t, "the attempts", b.attempts(t, "t1", back.GetIdempotencyKey()), []string{want, want, "1 0 0"})
	}
	// The refused key was free all the while.
	b.turn(t, newly, byNothing, reversal("t1", "CASE", "INV-1", "team_access"))
	b.wantWhole(t)
	b.wantOrdered(t)
}

// Taking back is always allowed, also where the invoice is not PAID; only giving back asks for the invoice.
func TestTurn_ReverseUnderAnyInvoiceState(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.record(t, newly, byNothing, recording("t1", "R", "INV-1", unpaid, 2))
	b.turn(t, newly, byNothing, reversal("t1", "CASE", "INV-1", "team_access"))
	wantSame(t, "the ledger", b.ledger(t, "t1", "INV-1", "team_access"),
		[]string{"1 GRANTED K at 1", "2 REVERSED CASE at 2: alice charge disputed"})
}

// A grant that comes again after its reversal is told what it was told then, and that it is gone. It never grants again: the way back is a
// reinstatement or, where the type is repeatable, another operation version.
func TestGrant_ReplayAfterReversal(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) {
		s.store.Catalog = &store.Catalog{Types: map[string]store.CatalogType{"team_access": {}, "credits": {Repeatable: true}}}
	})
	for _, typeName := range []string{"team_access", "credits"} {
		key := "K-" + typeName
		first := b.want(t, newly, byNothing, grant("t1", key, "INV-1", ofType(typeName)))
		b.turn(t, newly, byNothing, reversal("t1", "CASE-"+typeName, "INV-1", typeName))
		again := b.want(t, already, byKey, grant("t1", key, "INV-1", ofType(typeName)))
		wantSame(t, "the replay's result", again.GetEntitlement(), first.GetEntitlement())
		wantNow(t, "the replay", again, reversed, 2)
		fresh := b.want(t, already, byBusinessKey, grant("t1", key+"-fresh", "INV-1", ofType(typeName), evidence(paid, 7)))
		wantSame(t, "the result under a fresh key", fresh.GetEntitlement(), first.GetEntitlement())
		wantNow(t, "a fresh key", fresh, reversed, 2)
		b.want(t, conflict, byBusinessKey, grant("t1", key+"-other", "INV-1", ofType(typeName), seats("11")))
	}
	next := grant("t1", "K-2", "INV-1", ofType("team_access"))
	next.Grant.OperationVersion = 1
	b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE, next)
	next.Grant.EntitlementType = "credits"
	wantNow(t, "another operation version", b.want(t, newly, byNothing, next), active, 1)
	b.turn(t, newly, byNothing, reinstatement("t1", "back", "INV-1", "team_access"))
	wantNow(t, "the replay after the reinstatement", b.want(t, already, byKey, grant("t1", "K-team_access", "INV-1")), active, 3)
	if n := value[int](t, b, `SELECT count(*) FROM entitlements`); n != 3 {
		t.Errorf("%d entitlements, want 3", n)
	}
	b.wantWhole(t)
	b.wantOrdered(t)
}
