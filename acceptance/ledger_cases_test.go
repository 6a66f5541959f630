package acceptance_test

import (
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// The event overtakes the payment, which billing then reports by itself: the refused key is free, for the same request.
func TestKeys_RefusalDoesNotConsumeTheKeyOfAnUnpaidInvoice(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.record(t, newly, byNothing, recording("t1", "open", "INV-1", unpaid, 1))
	r := grant("t1", "K", "INV-1")
	b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, r)
	if found := b.operation(t, byName("t1", "K", full)); found.GetOutcome() != notApplied || len(found.GetAttempts()) != 1 {
		t.Errorf("the look-up of a refused key: %v", found)
	}
	b.record(t, newly, byNothing, recording("t1", "paid", "INV-1", paid, 2))
	b.want(t, newly, byNothing, r)
	b.want(t, already, byKey, r)

	// The same for what turns an entitlement.
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, reversal("t1", "CASE", "INV-1", "sso"))
	b.want(t, newly, byNothing, grant("t1", "sso", "INV-1", ofType("sso")))
	b.turn(t, newly, byNothing, reversal("t1", "CASE", "INV-1", "sso"))
	b.wantWhole(t)
	b.wantOrdered(t)
}

// purgeAliases is what the retention of aliases leaves, once the last of them is old.
func (b *bundle) purgeAliases(t testing.TB, brief *bundle) {
	t.Helper()
	if err := brief.store.Maintain(t.Context(), time.Now().Add(2*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, b, `SELECT count(*) FROM operations WHERE owner_key IS NOT NULL`); n != 0 {
		t.Fatalf("%d aliases are left", n)
	}
}

// purgeAttempts is what the retention of attempts leaves. What removes today's looks after the days from then on, so today's are made
// again behind it.
func (b *bundle) purgeAttempts(t testing.TB) {
	t.Helper()
	for _, at := range []time.Time{time.Now().Add(32 * 24 * time.Hour), time.Now()} {
		if err := b.store.Maintain(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != 0 {
		t.Fatalf("%d attempts are left", n)
	}
}

// keepsAliasesForAnHour serves the same database with so short a retention that a purge in two hours takes all aliases, and none of the
// attempts of today.
func (b *bundle) keepsAliasesForAnHour(t testing.TB) *bundle {
	t.Helper()
	return serveOn(t, b.url, b.url, func(s *settings) { s.store.AliasRetention = time.Hour })
}

// Retention takes aliases and attempts. What was recorded, reversed and reinstated stays so, and the keys that did it are known for
// ever.
func TestRetention_KeepsWhatOwnsAnEntryOrAnInvoice(t *testing.T) {
	t.Parallel()
	b := setup(t)
	brief := b.keepsAliasesForAnHour(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	gone := b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reversal("t1", "CASE-1b", "INV-1", "team_access"))
	back := b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	refund := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2))
	b.record(t, already, byBusinessKey, recording("t1", "refund-b", "INV-1", refunded, 2))
	b.want(t, already, byBusinessKey, grant("t1", "K-b", "INV-1"))

	for name, purge := range map[string]func(){
		"aliases": func() { b.purgeAliases(t, brief) }, "attempts": func() { b.purgeAttempts(t) },
		"both": func() { b.purgeAttempts(t); b.purgeAliases(t, brief) },
	} {
		purge()
		wantNow(t, name, b.want(t, already, byKey, grant("t1", "K", "INV-1")), reversed, 4)
		wantNow(t, name, b.want(t, already, byBusinessKey, grant("t1", "K-fresh-"+name, "INV-1")), reversed, 4)
		b.want(t, conflict, byBusinessKey, grant("t1", "K-other", "INV-1", seats("11")))
		wantSame(t, "the reversal, without "+name, b.turn(t, already, byKey, reversal("t1", "CASE-1", "INV-1", "team_access")).GetEntitlement(), gone.GetEntitlement())
		wantSame(t, "the reinstatement, without "+name, b.turn(t, already, byKey, reinstatement("t1", "CASE-2", "INV-1", "team_access")).GetEntitlement(), back.GetEntitlement())
		wantSame(t, "the refund, without "+name, b.record(t, already, byKey, recording("t1", "refund", "INV-1", refunded, 2)).GetRecorded(), refund.GetRecorded())
		wantSame(t, "the refund again, without "+name,
			b.record(t, already, byBusinessKey, recording("t1", "refund-fresh-"+name, "INV-1", refunded, 2)).GetRecorded(), refund.GetRecorded())
		b.record(t, conflict, byBusinessKey, recording("t1", "refund-other", "INV-1", voided, 2))
	}
	wantSame(t, "the ledger", len(b.ledger(t, "t1", "INV-1", "team_access")), 4)
	b.wantOrdered(t)
}

// The one thing that retention can reopen, as the contract says: the purged alias of a reversal acts again if the entitlement was
// reinstated in between.
func TestRetention_PurgedAliasOfAReversalActsAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reversal("t1", "CASE-1b", "INV-1", "team_access"))
	b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	wantNow(t, "the alias", b.turn(t, already, byKey, reversal("t1", "CASE-1b", "INV-1", "team_access")), active, 3)
	b.purgeAliases(t, b.keepsAliasesForAnHour(t))
	wantNow(t, "the purged alias", b.turn(t, newly, byNothing, reversal("t1", "CASE-1b", "INV-1", "team_access")), reversed, 4)
	wantNow(t, "the owner", b.turn(t, already, byKey, reversal("t1", "CASE-1", "INV-1", "team_access")), reversed, 4)
	b.wantOrdered(t)
}

// A customer paid, was refunded, and paid another invoice. Then the refund's webhook comes again, and the first grant's job is
// retried: the second invoice must not be touched, and the first never grants again.
func TestRefund_AgainLeavesTheNextInvoiceAlone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.want(t, newly, byNothing, grant("t1", "K1", "INV-1"))
	refund := recording("t1", "billing:invoice:INV-1:2", "INV-1", refunded, 2)
	refund.EventId = "evt_1"
	took := b.record(t, newly, byNothing, refund)
	second := b.want(t, newly, byNothing, grant("t1", "K2", "INV-2"))
	before := b.written(t)

	refund.EventId = "evt_2"
	wantSame(t, "the refund again", b.record(t, already, byKey, refund).GetRecorded(), took.GetRecorded())
	retried := b.want(t, already, byKey, grant("t1", "K1", "INV-1"))
	wantSame(t, "the first grant's result", retried.GetEntitlement(), first.GetEntitlement())
	wantNow(t, "the first grant", retried, reversed, 2)
	wantSame(t, "what both wrote beside their attempts", b.written(t), before)
	// The webhook's sender made another key of the new event.
	refund.IdempotencyKey = "evt_2"
	wantSame(t, "the refund under another key", b.record(t, already, byBusinessKey, refund).GetRecorded(), took.GetRecorded())

	again := b.want(t, already, byKey, grant("t1", "K2", "INV-2"))
	wantSame(t, "the second grant's result", again.GetEntitlement(), second.GetEntitlement())
	wantNow(t, "the second grant", again, active, 1)
	check, err := b.CheckEntitlement(t.Context(), &pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "team_access"})
	if err != nil || !check.GetHeld() || len(check.GetEntitlements()) != 1 || check.GetEntitlements()[0].GetEntitlementId() != second.GetEntitlement().GetEntitlementId() {
		t.Errorf("the check: %v %v", check, err)
	}
	b.wantWhole(t)
	b.wantOrdered(t)
}

// One refund takes back three types: three entries with three places of their own, under the one key.
func TestRefund_OfThreeTypesIsThreeEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, typeName := range []string{"team_access", "sso", "audit_log"} {
		b.want(t, newly, byNothing, grant("t1", "K-"+typeName, "INV-1", ofType(typeName)))
	}
	if n := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2)).GetRecorded().GetReversedCount(); n != 3 {
		t.Errorf("the refund took back %d", n)
	}
	entries := b.operation(t, byName("t1", "refund", full)).GetEntries()
	ids := map[string]bool{}
	for _, n := range entries {
		ids[n.GetEntitlementId()] = true
		if n.GetKind() != pb.EntryKind_ENTRY_KIND_REVERSED || n.GetEntryNumber() != 2 || n.GetIdempotencyKey() != "refund" || n.GetInvoiceVersion() != 2 {
			t.Errorf("an entry of the refund: %v", n)
		}
	}
	if len(entries) != 3 || len(ids) != 3 {
		t.Errorf("%d entries of %d entitlements, want three of three", len(entries), len(ids))
	}
	b.wantOrdered(t)
}
