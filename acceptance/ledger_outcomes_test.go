package acceptance_test

import (
	"fmt"
	"strings"
	"testing"

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
