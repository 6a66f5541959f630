package store_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// sameEntitlement compares what two answers tell of an entitlement; absent and empty scopes are the same, and times are instants.
func sameEntitlement(a, b *store.Entitlement) bool {
	plain := func(e store.Entitlement) store.Entitlement {
		for _, at := range []*time.Time{&e.GrantedAt, &e.ChangedAt, e.EndsAt, e.Grant.StartsAt, e.Grant.ExpiresAt} {
			if at != nil {
				*at = at.UTC().Round(0)
			}
		}
		if len(e.Grant.Scope) == 0 {
			e.Grant.Scope = nil
		}
		return e
	}
	return reflect.DeepEqual(plain(*a), plain(*b))
}

func TestGrant_EveryOutcome(t *testing.T) {
	b := setup(t)
	first := want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	if first.Operation.IdempotencyKey != "k1" || first.Entitlement.State != active || first.CurrentState != active || first.CurrentVersion != 1 {
		t.Errorf("the grant is told as %+v", first)
	}
	for range 2 {
		replay := want(t, b.Store, grant("t", "k1", "i", "x"), already)
		if replay.MatchedBy != byKey || !sameEntitlement(replay.Entitlement, first.Entitlement) {
			t.Errorf("a replay is told %+v by %v, want %+v", replay.Entitlement, replay.MatchedBy, first.Entitlement)
		}
	}
	alias := want(t, b.Store, grant("t", "k2", "i", "x"), already)
	if alias.MatchedBy != byBusinessKey || alias.Operation.IdempotencyKey != "k1" || !sameEntitlement(alias.Entitlement, first.Entitlement) {
		t.Errorf("another key is told %+v", alias)
	}
	if a := want(t, b.Store, grant("t", "k2", "i", "x"), already); a.MatchedBy != byKey {
		t.Errorf("an alias is matched by %v", a.MatchedBy)
	}

	other := grant("t", "k1", "i", "x")
	other.Grant.Scope = map[string]string{"seats": "20", "region": "eu"}
	a := want(t, b.Store, other, conflict)
	if a.MatchedBy != byKey || !slices.Equal(fields(&a), []string{"scope.region", "scope.seats"}) || a.Conflict.Stored.IdempotencyKey != "k1" {
		t.Errorf("the conflict is %+v", a.Conflict)
	}
	other.IdempotencyKey = "k3"
	if a = want(t, b.Store, other, conflict); a.MatchedBy != byBusinessKey {
		t.Errorf("matched by %v", a.MatchedBy)
	}
	// The key of a conflict stays free.
	want(t, b.Store, grant("t", "k3", "j", "x"), newly)
}

// An unpaid invoice is refused, is then paid, and the same request is granted: a refusal does not consume the key.
func TestGrant_RefusalLeavesTheKeyFree(t *testing.T) {
	b := setup(t)
	c := grant("t", "k", "i", "x")
	c.Invoice.State = unpaid
	a := wantRejected(t, b.Store, c, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID)
	if a.Rejection.Retry != pb.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE {
		t.Errorf("advice %v", a.Rejection.Retry)
	}
	for _, table := range []string{"operations", "invoices", "entitlements", "entries"} {
		if n := value[int](t, b.sql, `SELECT count(*) FROM `+table); n != 0 {
			t.Errorf("the refusal has left %d rows in %s", n, table)
		}
	}
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	if n := value[int](t, b.sql, `SELECT count(*) FROM attempts`); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}
}

// The authority's record of an invoice moves forward by evidence, and then decides.
func TestGrant_EvidenceAndRecord(t *testing.T) {
	b := setup(t)
	for _, c := range []struct {
		name     string
		state    pb.InvoiceState // on record, none when 0
		version  int64
		evidence int64
		outcome  pb.Outcome
		reason   pb.RejectionReason
		stands   store.InvoiceVersion
	}{
		{"none, evidence of version 0", 0, 0, 0, newly, 0, store.InvoiceVersion{State: paid, Version: 0}},
		{"none, evidence of version 7", 0, 0, 7, newly, 0, store.InvoiceVersion{State: paid, Version: 7}},
		{"paid, newer evidence", paid, 3, 7, newly, 0, store.InvoiceVersion{State: paid, Version: 7}},
		{"paid, older evidence", paid, 8, 7, newly, 0, store.InvoiceVersion{State: paid, Version: 8}},
		{"open, newer evidence", unpaid, 3, 7, newly, 0, store.InvoiceVersion{State: paid, Version: 7}},
		{"open, older evidence", unpaid, 8, 7, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, store.InvoiceVersion{State: unpaid, Version: 8}},
		{"open, evidence of the same version", unpaid, 7, 7, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, store.InvoiceVersion{State: unpaid, Version: 7}},
		{"open, evidence of version 0", unpaid, 1, 0, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, store.InvoiceVersion{State: unpaid, Version: 1}},
		{"refunded, older evidence", refunded, 8, 7, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, store.InvoiceVersion{State: refunded, Version: 8}},
		{"voided, older evidence", voided, 8, 7, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, store.InvoiceVersion{State: voided, Version: 8}},
		{"refunded, evidence of version 0", refunded, 1, 0, rejected, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, store.InvoiceVersion{State: refunded, Version: 1}},
		{"refunded, newer evidence", refunded, 3, 7, newly, 0, store.InvoiceVersion{State: paid, Version: 7}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tenant := strings.ReplaceAll(c.name, " ", "-")
			if c.state != 0 {
				want(t, b.Store, record(tenant, "s", "i", c.state, c.version), newly)
			}
			g := grant(tenant, "k", "i", "x")
			g.Invoice.Version = c.evidence
			if a := want(t, b.Store, g, c.outcome); a.Rejection != nil && a.Rejection.Reason != c.reason {
				t.Errorf("rejected for %v, want %v", a.Rejection.Reason, c.reason)
			}
			var got store.InvoiceVersion
			if err := b.sql.QueryRow(t.Context(), `SELECT state, version FROM invoices WHERE tenant_id = $1`, tenant).Scan((*int32)(&got.State), &got.Version); err != nil {
				t.Fatal(err)
			}
			if got != c.stands {
				t.Errorf("on record is %v, want %v", got, c.stands)
			}
		})
	}
}

// Tenants and names never meet through a joined string, and one tenant's keys are nothing to another.
func TestGrant_TenantsAreApart(t *testing.T) {
	b := setup(t)
	one, other := grant("A", "1", "i", "x"), grant("B", "1", "j", "y")
	want(t, b.Store, one, newly)
	want(t, b.Store, other, newly)
	for n, sep := range []string{"|", ":", "/"} {
		key := fmt.Sprint("sep", n)
		want(t, b.Store, grant("a"+sep+"b", key, "c", "x"), newly)
		want(t, b.Store, grant("a", key, "b"+sep+"c", "x"), newly)
	}
	want(t, b.Store, grant("t", "case1", "INV-a", "x"), newly)
	want(t, b.Store, grant("t", "case2", "inv-A", "x"), newly)
	if found := find(t, b, store.Lookup{TenantID: "B", BusinessKey: one.Grant.BusinessKey()}); found.Answer.Outcome != missing {
		t.Errorf("B sees %v of A's grant", found.Answer.Outcome)
	}
}

func TestRecord_EveryOutcome(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "g1", "i", "x"), newly)
	want(t, b.Store, grant("t", "g2", "i", "y"), newly)
	want(t, b.Store, grant("t", "g3", "i", "z"), newly)
	want(t, b.Store, reverse("t", "r", "i", "z"), newly)
	want(t, b.Store, grant("t", "g4", "j", "x"), newly)

	first := want(t, b.Store, record("t", "s1", "i", refunded, 5), newly)
	if len(first.Reversed) != 2 || first.CurrentInvoice != (store.InvoiceVersion{State: refunded, Version: 5}) {
		t.Fatalf("the refund is told as %+v", first)
	}
	for _, e := range first.Reversed {
		if e.State != reversed || e.Version != 2 {
			t.Errorf("taken back: %+v", e)
		}
	}
	replay := want(t, b.Store, record("t", "s1", "i", refunded, 5), already)
	if replay.MatchedBy != byKey || len(replay.Reversed) != 2 {
		t.Fatalf("a replay is told %+v", replay)
	}
	byID := func(e, f *store.Entitlement) int { return slices.Compare(e.ID[:], f.ID[:]) }
	slices.SortFunc(first.Reversed, byID)
	slices.SortFunc(replay.Reversed, byID)
	for i := range first.Reversed {
		if !sameEntitlement(first.Reversed[i], replay.Reversed[i]) {
			t.Errorf("a replay tells %+v, want %+v", replay.Reversed[i], first.Reversed[i])
		}
	}
	if a := want(t, b.Store, record("t", "s2", "i", refunded, 5), already); a.MatchedBy != byBusinessKey || a.Operation.IdempotencyKey != "s1" ||
		len(a.Reversed) != 2 {
		t.Errorf("another key is told %+v", a)
	}
	a := want(t, b.Store, record("t", "s3", "i", paid, 5), conflict)
	if a.MatchedBy != byBusinessKey || !slices.Equal(fields(&a), []string{"state"}) || a.Conflict.Stored.IdempotencyKey != "s1" {
		t.Errorf("the conflict is %+v", a.Conflict)
	}
	if a = want(t, b.Store, record("t", "s1", "i", voided, 6), conflict); !slices.Equal(fields(&a), []string{"state", "version"}) {
		t.Errorf("the conflict is %+v", a.Conflict)
	}
	a = wantRejected(t, b.Store, record("t", "s4", "i", paid, 4), pb.RejectionReason_REJECTION_REASON_STALE_VERSION)
	if a.Rejection.Retry != pb.RetryAdvice_RETRY_ADVICE_NEVER {
		t.Errorf("advice %v", a.Rejection.Retry)
	}
	// Paid again reinstates nothing by itself.
	if a = want(t, b.Store, record("t", "s5", "i", paid, 6), newly); len(a.Reversed) != 0 {
		t.Errorf("a payment is told to take back %+v", a.Reversed)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM entitlements WHERE invoice_id = 'i' AND state = 1`); n != 0 {
		t.Errorf("%d entitlements are active again", n)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM entitlements WHERE invoice_id = 'j' AND state = 1`); n != 1 {
		t.Error("another invoice's entitlement was touched")
	}
}

// A refund that arrives before its payment, and before anything else of its invoice, still counts.
func TestRecord_RefundBeforePayment(t *testing.T) {
	b := setup(t)
	want(t, b.Store, record("t", "s", "i", refunded, 2), newly)
	wantRejected(t, b.Store, grant("t", "k", "i", "x"), pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED)
}

// The payment that a grant brought as evidence is on record: to record it again is no news.
// One refund may take back more than a database writes within the time that a usual transaction has. Its sessions were cut off, it was told
// to try again, and was cut off again, for ever: what was refunded stayed.
func TestRecord_LargeRefundHasItsTime(t *testing.T) {
	const entitlements = 8000
	b := setup(t, func(c *store.Config) { c.CommitTimeout = 2 * time.Second })
	repeatable := open(t, b.url, func(c *store.Config) {
		c.Catalog = &store.Catalog{Types: map[string]store.CatalogType{"x": {Repeatable: true}}}
	})
	var all []store.Command
	for n := range entitlements {
		c := grant("t", fmt.Sprint("k", n), "i", "x")
		c.Grant.OperationVersion = int64(n)
		all = append(all, *c)
	}
	if _, err := repeatable.ApplyAll(t.Context(), all, nil); err != nil {
		t.Fatal(err)
	}
	exec(t, b.sql, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3); RETURN NULL; END $$`)
	exec(t, b.sql, `CREATE TRIGGER slow AFTER INSERT ON entries EXECUTE FUNCTION slow()`)
	if a := want(t, b.Store, record("t", "r", "i", refunded, 9), newly); len(a.Reversed) != entitlements {
		t.Errorf("%d are taken back, want %d", len(a.Reversed), entitlements)
	}
}

func TestRecord_WhatAGrantBrought(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	for range 2 {
		if a := want(t, b.Store, record("t", "s", "i", paid, 1), already); a.Operation.IdempotencyKey != "k" {
			t.Errorf("told of %+v", a.Operation)
		}
	}
}

func TestTurn_EveryOutcome(t *testing.T) {
	b := setup(t)
	granted := want(t, b.Store, grant("t", "k", "i", "x"), newly)
	id := granted.Entitlement.ID

	first := want(t, b.Store, reverse("t", "r1", "i", "x"), newly)
	if first.Entitlement.ID != id || first.CurrentState != reversed || first.CurrentVersion != 2 || first.Operation.EntryNumber != 2 {
		t.Errorf("the reversal is told as %+v", first)
	}
	// Named by id it is the same target.
	sameByID := reverse("t", "r1", "", "")
	sameByID.Target = store.Target{EntitlementID: id}
	for _, c := range []*store.Command{reverse("t", "r1", "i", "x"), sameByID} {
		if a := want(t, b.Store, c, already); a.MatchedBy != byKey || !sameEntitlement(a.Entitlement, first.Entitlement) {
			t.Errorf("a replay is told %+v, want %+v", a.Entitlement, first.Entitlement)
		}
	}
	other := reverse("t", "r2", "i", "x")
	other.Reason, other.Actor = "another reason", "somebody else"
	if a := want(t, b.Store, other, already); a.MatchedBy != byBusinessKey || a.Operation.IdempotencyKey != "r1" {
		t.Errorf("another key is told %+v", a)
	}
	other.IdempotencyKey = "r1"
	if a := want(t, b.Store, other, conflict); !slices.Equal(fields(&a), []string{"actor", "reason"}) {
		t.Errorf("the conflict is %+v", a.Conflict)
	}
	if a := want(t, b.Store, reinstate("t", "r1", "i", "x"), conflict); !slices.Equal(fields(&a), []string{"kind"}) {
		t.Errorf("the conflict is %+v", a.Conflict)
	}
	absent := reverse("t", "r3", "", "")
	absent.Target = store.Target{EntitlementID: uuid.New()}
	wantRejected(t, b.Store, absent, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED)
	wantRejected(t, b.Store, reverse("t", "r3", "i", "other"), pb.RejectionReason_REJECTION_REASON_NOT_GRANTED)
	wantRejected(t, b.Store, reinstate("u", "r3", "i", "x"), pb.RejectionReason_REJECTION_REASON_NOT_GRANTED)

	back := want(t, b.Store, reinstate("t", "r3", "i", "x"), newly)
	if back.CurrentState != active || back.CurrentVersion != 3 {
		t.Errorf("reinstated is told as %+v", back)
	}
	if a := want(t, b.Store, reinstate("t", "r4", "i", "x"), already); a.Operation.IdempotencyKey != "r3" {
		t.Errorf("what is active is told as %+v", a.Operation)
	}
	// The replay of the reversal has its own result, and what is now beside it.
	if a := want(t, b.Store, reverse("t", "r1", "i", "x"), already); a.Entitlement.State != reversed || a.CurrentState != active || a.CurrentVersion != 3 {
		t.Errorf("the old reversal is told as %+v, now %v", a.Entitlement, a.CurrentState)
	}
	want(t, b.Store, record("t", "s", "i", refunded, 9), newly)
	a := wantRejected(t, b.Store, reinstate("t", "r5", "i", "x"), pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED)
	if a.Rejection.Retry != pb.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE {
		t.Errorf("advice %v", a.Rejection.Retry)
	}
	// Reversed by the refund: a reversal is told so.
	if a := want(t, b.Store, reverse("t", "r6", "i", "x"), already); a.Operation.IdempotencyKey != "s" {
		t.Errorf("told of %+v", a.Operation)
	}
}

// Granted, refunded, granted for the next invoice: the refund arrives again, and the first grant is sent again. Neither may touch the
// second invoice or grant a second time.
func TestGrant_ReplayAfterRefundGrantsNothing(t *testing.T) {
	b := setup(t)
	first := want(t, b.Store, grant("t", "k1", "inv-1", "x"), newly)
	want(t, b.Store, record("t", "refund-1", "inv-1", refunded, 2), newly)
	want(t, b.Store, grant("t", "k2", "inv-2", "x"), newly)
	want(t, b.Store, record("t", "refund-again", "inv-1", refunded, 2), already)
	a := want(t, b.Store, grant("t", "k1", "inv-1", "x"), already)
	if a.CurrentState != reversed || a.CurrentVersion != 2 || !sameEntitlement(a.Entitlement, first.Entitlement) {
		t.Errorf("the first grant is told as %+v, now %v", a.Entitlement, a.CurrentState)
	}
	e, err := b.Entitlement(t.Context(), "t", store.Target{BusinessKey: store.BusinessKey{InvoiceID: "inv-2", EntitlementType: "x"}})
	if err != nil || e.State != active || e.Version != 1 {
		t.Errorf("the second invoice's entitlement is %+v, %v", e, err)
	}
}

func TestGrant_OneKeyForTwoKinds(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	want(t, b.Store, record("t", "s", "i", paid, 2), newly)
	for _, c := range []*store.Command{record("t", "k", "i", refunded, 9), reverse("t", "k", "i", "x"), grant("t", "s", "i", "x"), reverse("t", "s", "i", "x")} {
		if a := want(t, b.Store, c, conflict); !slices.Equal(fields(&a), []string{"kind"}) || a.MatchedBy != byKey {
			t.Errorf("%v %s: %+v", c.Kind, c.IdempotencyKey, a.Conflict)
		}
	}
	if v := value[int64](t, b.sql, `SELECT version FROM invoices`); v != 2 {
		t.Errorf("a conflict moved the invoice to %d", v)
	}
}

// Within one batch, the same key or business key twice is decided by position.
func TestApplyAll_DuplicatesAreDecidedByPosition(t *testing.T) {
	b := setup(t)
	other := func(c *store.Command) *store.Command {
		c.Grant.Scope = map[string]string{"seats": "20"}
		return c
	}
	refused := grant("t", "late", "u", "x")
	refused.Invoice.State = unpaid
	steps := []struct {
		c       *store.Command
		outcome pb.Outcome
		by      pb.MatchedBy
		winner  string
	}{
		{grant("t", "a", "i", "x"), newly, 0, "a"},
		{grant("t", "a", "i", "x"), already, byKey, "a"},
		{other(grant("t", "a", "i", "x")), conflict, byKey, "a"},
		{grant("t", "b", "i", "x"), already, byBusinessKey, "a"},
		{other(grant("t", "c", "i", "x")), conflict, byBusinessKey, "a"},
		{grant("t", "b", "i", "y"), conflict, byKey, "a"}, // b is an alias by now
		{grant("t", "c", "i", "y"), newly, 0, "c"},        // the conflict left c free
		{refused, rejected, 0, ""},
		{grant("t", "late", "u", "x"), newly, 0, "late"},
		{record("t", "s", "i", refunded, 2), newly, 0, "s"},
		{grant("t", "d", "i", "z"), rejected, 0, ""},
		{reverse("t", "r", "i", "x"), already, byBusinessKey, "s"},
		{record("t", "s2", "i", paid, 3), newly, 0, "s2"},
		{reinstate("t", "r2", "i", "x"), newly, 0, "r2"},
		{grant("t", "d", "i", "z"), newly, 0, "d"},
		{grant("u", "a", "i", "x"), newly, 0, "a"},
	}
	commands := make([]store.Command, len(steps))
	for i := range steps {
		commands[i] = *steps[i].c
	}
	// The targets are granted before, so that the batch can name them.
	want(t, b.Store, grant("t", "a", "i", "x"), newly)
	steps[0].outcome, steps[0].by = already, byKey
	results, err := b.ApplyAll(t.Context(), commands, nil)
	if err != nil || len(results) != len(steps) {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, r := range results {
		if r.Err != nil {
			t.Fatalf("%d: %v", i, r.Err)
		}
		a := &r.Answer
		winner := operationNamed(a)
		if a.Outcome != steps[i].outcome || a.MatchedBy != steps[i].by || winner != steps[i].winner {
			t.Errorf("%d %s: got %v by %v of %q (%s), want %v by %v of %q", i, steps[i].c.IdempotencyKey, a.Outcome, a.MatchedBy, winner,
				describe(a), steps[i].outcome, steps[i].by, steps[i].winner)
		}
	}
	checkLedgers(t, b.sql)
}

func TestApplyAll_OfNothing(t *testing.T) {
	b := setup(t)
	if results, err := b.ApplyAll(t.Context(), nil, nil); err != nil || len(results) != 0 {
		t.Errorf("%v, %v", results, err)
	}
}

// One command whose data the database refuses is not the others' trouble.
func TestApplyAll_OneBadItemSinksNoOther(t *testing.T) {
	b := setup(t)
	var commands []store.Command
	for i := range 20 {
		commands = append(commands, *grant("t", fmt.Sprint("k", i), fmt.Sprint("i", i), "x"))
	}
	commands[7].Origin.Source = "not \xff UTF-8"
	results, err := b.ApplyAll(t.Context(), commands, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		if i == 7 {
			if r.Err == nil {
				t.Error("the bad item had an answer")
			}
		} else if r.Err != nil || r.Answer.Outcome != newly {
			t.Errorf("%d: %v, %v", i, r.Answer.Outcome, r.Err)
		}
	}
}
