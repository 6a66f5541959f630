package acceptance_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// An invoice's record is moved once, and every later arrival is told the same.
func TestRecord_NewlyThenAlreadyApplied(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := recording("t1", "K", "INV-1", paid, 3)
	r.EventId, r.Source = "evt_1", "stripe"
	first := b.record(t, newly, byNothing, r)
	wantSame(t, "what was recorded", first.GetRecorded(), &pb.RecordedInvoice{InvoiceId: "INV-1", State: paid, Version: 3})
	if first.GetCurrentState() != paid || first.GetCurrentVersion() != 3 {
		t.Errorf("now %v %d", first.GetCurrentState(), first.GetCurrentVersion())
	}
	op := first.GetOperation()
	if op.GetKind() != opRecord || op.GetIdempotencyKey() != "K" || op.GetInvoiceId() != "INV-1" || op.GetInvoiceState() != paid ||
		op.GetInvoiceVersion() != 3 || op.GetEntitlementId() != "" || op.GetEntryNumber() != 0 || op.GetEventId() != "evt_1" || op.GetSource() != "stripe" {
		t.Errorf("the operation: %v", op)
	}

	before := b.written(t)
	r.EventId = "evt_2"
	second := b.record(t, already, byKey, r)
	first.Outcome, first.MatchedBy = already, byKey
	wantSame(t, "the replay", second, first)
	wantSame(t, "what the replay wrote beside its attempt", b.written(t), before)

	// The record moves on. What was recorded then is still what the replay is told, beside what stands now.
	b.record(t, newly, byNothing, recording("t1", "K4", "INV-1", refunded, 4))
	third := b.record(t, already, byKey, r)
	wantSame(t, "what the replay is told was recorded", third.GetRecorded(), first.GetRecorded())
	if third.GetCurrentState() != refunded || third.GetCurrentVersion() != 4 {
		t.Errorf("now %v %d", third.GetCurrentState(), third.GetCurrentVersion())
	}
	wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0", "2 1 0", "2 1 0"})
	b.wantOrdered(t)
}

// A lower version comes too late, for ever. The answer names what stands, and the key stays free.
func TestRecord_StaleVersionNamesWhatStands(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.recordInvoice(t, "t1", "INV-1", refunded, 9_007_199_254_740_993)
	before := b.written(t)
	for _, r := range []*pb.RecordInvoiceStateRequest{
		recording("t1", "late", "INV-1", paid, 9_007_199_254_740_992), recording("t1", "same-state", "INV-1", refunded, 1),
	} {
		resp := b.record(t, rejected, byNothing, r)
		refusal := resp.GetRejection()
		if refusal.GetReason() != pb.RejectionReason_REJECTION_REASON_STALE_VERSION || refusal.GetRetry() != never ||
			!strings.Contains(refusal.GetMessage(), "9007199254740993") {
			t.Errorf("%s: %v", r.GetIdempotencyKey(), refusal)
		}
		if resp.GetCurrentState() != refunded || resp.GetCurrentVersion() != 9_007_199_254_740_993 {
			t.Errorf("%s: now %v %d", r.GetIdempotencyKey(), resp.GetCurrentState(), resp.GetCurrentVersion())
		}
		wantSame(t, "the attempts", b.attempts(t, "t1", r.GetIdempotencyKey()), []string{fmt.Sprintf("4 0 %d", refusal.GetReason())})
	}
	wantSame(t, "what refusals wrote beside their attempts", b.written(t), before)
	b.record(t, newly, byNothing, recording("t1", "late", "INV-2", paid, 1))
}

// The version is the business key of a recording: with its state it is there already, with another one it is a conflict, whoever
// recorded it first.
func TestRecord_SameVersionUnderAnotherKey(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(*testing.T, *bundle) *pb.Operation{
		"recorded": func(t *testing.T, b *bundle) *pb.Operation {
			return b.record(t, newly, byNothing, recording("t1", "first", "INV-1", paid, 5)).GetOperation()
		},
		"by a grant's evidence": func(t *testing.T, b *bundle) *pb.Operation {
			return b.want(t, newly, byNothing, grant("t1", "first", "INV-1", evidence(paid, 5))).GetOperation()
		},
		"by a grant's evidence, moving it": func(t *testing.T, b *bundle) *pb.Operation {
			b.recordInvoice(t, "t1", "INV-1", unpaid, 2)
			return b.want(t, newly, byNothing, grant("t1", "first", "INV-1", evidence(paid, 5))).GetOperation()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			op := first(t, b)

			other := b.record(t, conflict, byBusinessKey, recording("t1", "other", "INV-1", voided, 5))
			wantSame(t, "the conflict", other.GetConflict(), &pb.Conflict{StoredOperation: op, Differences: []*pb.Difference{
				{Field: "state", Stored: pointer("INVOICE_STATE_PAID"), Submitted: pointer("INVOICE_STATE_VOIDED")},
			}})
			if other.GetCurrentState() != paid || other.GetCurrentVersion() != 5 || b.invoice(t, "t1", "INV-1") != "PAID 5" {
				t.Errorf("after the conflict: %v, and the record says %s", other, b.invoice(t, "t1", "INV-1"))
			}

			same := b.record(t, already, byBusinessKey, recording("t1", "same", "INV-1", paid, 5))
			wantSame(t, "the operation", same.GetOperation(), op)
			wantSame(t, "what was recorded", same.GetRecorded(), &pb.RecordedInvoice{InvoiceId: "INV-1", State: paid, Version: 5})
			again := b.record(t, already, byKey, recording("t1", "same", "INV-1", paid, 5))
			wantSame(t, "under the alias", again.GetRecorded(), same.GetRecorded())
			wantSame(t, "the operation under the alias", again.GetOperation(), op)
			found := b.operation(t, byName("t1", "same", full))
			wantSame(t, "the look-up", found.GetRecorded(), same.GetRecorded())
			wantSame(t, "the operation found", found.GetOperation(), op)

			// The key of the conflict stayed free.
			b.record(t, newly, byNothing, recording("t1", "other", "INV-1", voided, 6))
			// Once the record has moved on, the conflict is a version that came too late.
			late := b.record(t, rejected, byNothing, recording("t1", "later", "INV-1", voided, 5))
			if r := late.GetRejection().GetReason(); r != pb.RejectionReason_REJECTION_REASON_STALE_VERSION {
				t.Errorf("rejected for %v", r)
			}
			b.record(t, already, byKey, recording("t1", "same", "INV-1", paid, 5))
			b.wantOrdered(t)
		})
	}
}

// The refund overtakes its payment. The grant that comes late is refused, under whatever key, until a payment follows the refund.
func TestRecord_RefundBeforePayment(t *testing.T) {
	t.Parallel()
	for _, state := range []pb.InvoiceState{voided, refunded} {
		t.Run(short(state), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			r := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", state, 2))
			wantSame(t, "what the refund took back", r.GetRecorded(), &pb.RecordedInvoice{InvoiceId: "INV-1", State: state, Version: 2})
			for _, version := range []int64{0, 1, 2} {
				b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, grant("t1", "K", "INV-1", evidence(paid, version)))
			}
			b.record(t, rejected, byNothing, recording("t1", "payment", "INV-1", paid, 1))
			b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, grant("t1", "K2", "INV-1", ofType("sso")))
			b.want(t, newly, byNothing, grant("t1", "K", "INV-1", evidence(paid, 3)))
			b.wantOrdered(t)
		})
	}
}

// A refund takes back every active entitlement of its invoice, whatever its type and operation version, and names them, oldest first.
// What it did not take back itself is not in its answer, and a replay is told the same list.
func TestRecord_RefundReversesEveryActiveEntitlement(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) {
		s.store.Catalog = &store.Catalog{Types: map[string]store.CatalogType{"team_access": {}, "sso": {}, "credits": {Repeatable: true}}}
	})
	var ids []string
	for i, typeName := range []string{"sso", "team_access", "credits", "credits", "credits"} {
		r := grant("t1", fmt.Sprintf("K%d", i), "INV-1", ofType(typeName))
		if typeName == "credits" {
			r.Grant.OperationVersion = int64(i)
		}
		ids = append(ids, b.want(t, newly, byNothing, r).GetEntitlement().GetEntitlementId())
	}
	b.want(t, newly, byNothing, grant("t1", "elsewhere", "INV-2"))
	b.want(t, newly, byNothing, grant("t2", "elsewhere", "INV-1"))
	b.turn(t, newly, byNothing, reversal("t1", "before", "INV-1", "credits", func(r *pb.ReverseEntitlementRequest) {
		r.GetBusinessKey().OperationVersion = 3
	}))

	first := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2))
	var took []string
	for _, e := range first.GetRecorded().GetReversed() {
		took = append(took, e.GetEntitlementId())
		if e.GetState() != reversed || e.GetVersion() != 2 || !e.GetChangedAt().AsTime().After(e.GetGrantedAt().AsTime()) {
			t.Errorf("taken back as %v", e)
		}
	}
	wantSame(t, "what it took back", took, []string{ids[0], ids[1], ids[2], ids[4]})
	if n := first.GetRecorded().GetReversedCount(); n != 4 {
		t.Errorf("reversed_count is %d", n)
	}
	wantSame(t, "the ledger", b.ledger(t, "t1", "INV-1", "credits"), []string{
		"1 GRANTED K2 at 1", "2 REVERSED refund at 2: the invoice is REFUNDED",
		"1 GRANTED K3 at 1", "2 REVERSED before at 1: alice charge disputed",
		"1 GRANTED K4 at 1", "2 REVERSED refund at 2: the invoice is REFUNDED",
	})
	for tenant, invoice := range map[string]string{"t1": "INV-2", "t2": "INV-1"} {
		wantNow(t, "elsewhere", b.want(t, already, byKey, grant(tenant, "elsewhere", invoice)), active, 1)
	}

	// The story goes on. The replay's list does not.
	b.record(t, newly, byNothing, recording("t1", "paid", "INV-1", paid, 3))
	b.turn(t, newly, byNothing, reinstatement("t1", "back", "INV-1", "sso"))
	late := grant("t1", "late", "INV-1", ofType("credits"), evidence(paid, 3))
	late.Grant.OperationVersion = 9
	b.want(t, newly, byNothing, late)
	for range 2 {
		second := b.record(t, already, byKey, recording("t1", "refund", "INV-1", refunded, 2))
		wantSame(t, "the replay's list", second.GetRecorded(), first.GetRecorded())
		wantSame(t, "the replay's operation", second.GetOperation(), first.GetOperation())
	}
	wantSame(t, "the look-up's list", b.operation(t, byName("t1", "refund", 0)).GetRecorded(), first.GetRecorded())
	b.wantWhole(t)
	b.wantOrdered(t)
}

// Only VOIDED and REFUNDED take back. An invoice that is PAID again gives nothing back by itself.
func TestRecord_OtherStatesChangeNoEntitlement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	for version, state := range map[int64]pb.InvoiceState{2: unpaid, 3: paid} {
		if n := b.record(t, newly, byNothing, recording("t2", fmt.Sprint("R", version), fmt.Sprint("INV-", version), state, version)).GetRecorded().GetReversedCount(); n != 0 {
			t.Errorf("%v took back %d", state, n)
		}
	}
	b.record(t, newly, byNothing, recording("t1", "open-again", "INV-1", unpaid, 2))
	wantNow(t, "an invoice that is open again", b.want(t, already, byKey, grant("t1", "K", "INV-1")), active, 1)
	b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 3))
	again := b.record(t, newly, byNothing, recording("t1", "paid-again", "INV-1", paid, 4))
	wantSame(t, "what PAID again does", again.GetRecorded(), &pb.RecordedInvoice{InvoiceId: "INV-1", State: paid, Version: 4})
	for _, key := range []string{"K", "fresh"} {
		by := byKey
		if key == "fresh" {
			by = byBusinessKey
		}
		wantNow(t, "the grant "+key, b.want(t, already, by, grant("t1", key, "INV-1", evidence(paid, 5))), reversed, 2)
	}
	second := b.record(t, newly, byNothing, recording("t1", "refund-2", "INV-1", voided, 5))
	wantSame(t, "what a second refund takes back", second.GetRecorded(), &pb.RecordedInvoice{InvoiceId: "INV-1", State: voided, Version: 5})
	wantSame(t, "the ledger", b.ledger(t, "t1", "INV-1", "team_access"),
		[]string{"1 GRANTED K at 1", "2 REVERSED refund at 3: the invoice is REFUNDED"})
}

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

// Every rule about the ledger's requests, broken alone. Nothing malformed reaches the database, and the key stays free.
func TestValidation_Ledger(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.want(t, newly, byNothing, grant("t1", "K", "INV-1")).GetEntitlement().GetEntitlementId()
	attempts := value[int](t, b, `SELECT count(*) FROM attempts`)

	long := strings.Repeat("x", 201)
	type change = func(*pb.RecordInvoiceStateRequest)
	for name, test := range map[string]struct {
		change change
		fields []string
	}{
		"no key":            {func(r *pb.RecordInvoiceStateRequest) { r.IdempotencyKey = "" }, []string{"idempotency_key"}},
		"long key":          {func(r *pb.RecordInvoiceStateRequest) { r.IdempotencyKey = long }, []string{"idempotency_key"}},
		"no tenant":         {func(r *pb.RecordInvoiceStateRequest) { r.TenantId = "" }, []string{"tenant_id"}},
		"space in invoice":  {func(r *pb.RecordInvoiceStateRequest) { r.InvoiceId = "INV 1" }, []string{"invoice_id"}},
		"no state":          {func(r *pb.RecordInvoiceStateRequest) { r.State = 0 }, []string{"state"}},
		"unknown state":     {func(r *pb.RecordInvoiceStateRequest) { r.State = 5 }, []string{"state"}},
		"no version":        {func(r *pb.RecordInvoiceStateRequest) { r.Version = 0 }, []string{"version"}},
		"negative version":  {func(r *pb.RecordInvoiceStateRequest) { r.Version = -1 }, []string{"version"}},
		"long event":        {func(r *pb.RecordInvoiceStateRequest) { r.EventId = long }, []string{"event_id"}},
		"NUL in the source": {func(r *pb.RecordInvoiceStateRequest) { r.Source = "a\x00" }, []string{"source"}},
		"unknown field":     {func(r *pb.RecordInvoiceStateRequest) { unknownField(r) }, []string{"15"}},
		"nothing at all": {func(r *pb.RecordInvoiceStateRequest) { proto.Reset(r) },
			[]string{"idempotency_key", "tenant_id", "invoice_id", "state", "version"}},
	} {
		r := recording("t1", "R", "INV-9", paid, 1)
		test.change(r)
		_, err := b.RecordInvoiceState(t.Context(), r)
		wantViolations(t, "record: "+name, err, test.fields...)
	}

	for name, test := range map[string]struct {
		change func(*pb.ReverseEntitlementRequest)
		fields []string
	}{
		"no key":           {func(r *pb.ReverseEntitlementRequest) { r.IdempotencyKey = "" }, []string{"idempotency_key"}},
		"no tenant":        {func(r *pb.ReverseEntitlementRequest) { r.TenantId = "" }, []string{"tenant_id"}},
		"no target":        {func(r *pb.ReverseEntitlementRequest) { r.Target = nil }, []string{"target"}},
		"an empty id":      {func(r *pb.ReverseEntitlementRequest) { r.Target = &pb.ReverseEntitlementRequest_EntitlementId{} }, []string{"target"}},
		"an upper-case id": {byID(strings.ToUpper(id)), []string{"entitlement_id"}},
		"an id in braces":  {byID("{" + id + "}"), []string{"entitlement_id"}},
		"an empty effect": {func(r *pb.ReverseEntitlementRequest) {
			r.Target = &pb.ReverseEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{}}
		}, []string{"business_key.invoice_id", "business_key.entitlement_type"}},
		"a negative version":    {func(r *pb.ReverseEntitlementRequest) { r.GetBusinessKey().OperationVersion = -1 }, []string{"business_key.operation_version"}},
		"no reason":             {func(r *pb.ReverseEntitlementRequest) { r.Reason = "" }, []string{"reason"}},
		"long reason":           {func(r *pb.ReverseEntitlementRequest) { r.Reason = strings.Repeat("x", 501) }, []string{"reason"}},
		"two lines of reason":   {func(r *pb.ReverseEntitlementRequest) { r.Reason = "a\nb" }, []string{"reason"}},
		"no actor":              {func(r *pb.ReverseEntitlementRequest) { r.Actor = "" }, []string{"actor"}},
		"long actor":            {func(r *pb.ReverseEntitlementRequest) { r.Actor = long }, []string{"actor"}},
		"long event":            {func(r *pb.ReverseEntitlementRequest) { r.EventId = long }, []string{"event_id"}},
		"long source":           {func(r *pb.ReverseEntitlementRequest) { r.Source = long }, []string{"source"}},
		"unknown field":         {func(r *pb.ReverseEntitlementRequest) { unknownField(r) }, []string{"15"}},
		"unknown field, nested": {func(r *pb.ReverseEntitlementRequest) { unknownField(r.GetBusinessKey()) }, []string{"business_key.15"}},
		"nothing at all": {func(r *pb.ReverseEntitlementRequest) { proto.Reset(r) },
			[]string{"idempotency_key", "tenant_id", "target", "reason", "actor"}},
	} {
		r := reversal("t1", "CASE", "INV-1", "team_access")
		test.change(r)
		_, err := b.ReverseEntitlement(t.Context(), r)
		wantViolations(t, "reverse: "+name, err, test.fields...)

		// The two requests have the same fields, by the same numbers.
		wire, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var same pb.ReinstateEntitlementRequest
		if err := proto.Unmarshal(wire, &same); err != nil {
			t.Fatal(err)
		}
		_, err = b.ReinstateEntitlement(t.Context(), &same)
		wantViolations(t, "reinstate: "+name, err, test.fields...)
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != attempts {
		t.Errorf("malformed requests left %d attempts", n-attempts)
	}

	// The longest that passes.
	longest := reversal("t1", strings.Repeat("K", 200), "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) {
		r.Reason, r.Actor = strings.Repeat("ü", 250), strings.Repeat("ü", 100)
		r.EventId, r.Source = strings.Repeat("e", 200), strings.Repeat("s", 200)
	})
	if op := b.turn(t, newly, byNothing, longest).GetOperation(); op.GetReason() != longest.GetReason() || op.GetActor() != longest.GetActor() {
		t.Errorf("the operation: %v", op)
	}
	b.record(t, newly, byNothing, recording("t1", "R", strings.Repeat("I", 128), paid, 9223372036854775807))
}

func byID(id string) func(*pb.ReverseEntitlementRequest) {
	return func(r *pb.ReverseEntitlementRequest) {
		r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: id}
	}
}
