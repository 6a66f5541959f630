package store_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

func find(t *testing.T, b *bundle, l store.Lookup) store.Found {
	t.Helper()
	found, err := b.Operation(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestLookup_NotApplied(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("other", "k", "i", "x"), newly)
	g := grant("t", "k", "i", "x").Grant
	for name, l := range map[string]store.Lookup{
		"key":          {TenantID: "t", IdempotencyKey: "k"},
		"business key": {TenantID: "t", BusinessKey: g.BusinessKey()},
		"key, grant":   {TenantID: "t", IdempotencyKey: "k", Grant: &g},
		"full":         {TenantID: "t", IdempotencyKey: "k", Full: true},
	} {
		found := find(t, b, l)
		if found.Answer.Outcome != missing || found.Answer.Operation != nil || len(found.Attempts)+len(found.Aliases)+len(found.Entries) != 0 {
			t.Errorf("by %s: %+v", name, found)
		}
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM attempts WHERE tenant_id = 't'`); n != 0 {
		t.Errorf("the look-ups have left %d attempts", n)
	}
}

// Somebody had his hands in the tables: the effect is there, and the operation that made it is not. A replay is told that this is a bug.
// "Nothing is committed" would be a lie.
func TestLookup_WinnerIsGone(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	exec(t, b.sql, `DELETE FROM operations`)
	g := grant("t", "k", "i", "x")
	if a, err := b.Apply(t.Context(), g); err == nil {
		t.Errorf("a replay: %+v", a)
	}
	for name, l := range map[string]store.Lookup{
		"business key": {TenantID: "t", BusinessKey: g.Grant.BusinessKey()},
		"key, grant":   {TenantID: "t", IdempotencyKey: "k", Grant: &g.Grant},
	} {
		if found, err := b.Operation(t.Context(), l); err == nil {
			t.Errorf("by %s: %v", name, found.Answer.Outcome)
		}
	}
}

// Where writes are refused, what is there may be told, but not that there is nothing: a newer primary may have it.
func TestLookup_ReadOnlyNeverSaysNotApplied(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	exec(t, b.sql, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`)
	// The sessions that are there keep the setting they began with: end them.
	exec(t, b.sql, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'grantd' AND datname = current_database()`)

	eventuallyRead := func(l store.Lookup) (store.Found, error) {
		// A pool finds out that a session was ended when it uses it.
		for deadline := time.Now().Add(10 * time.Second); ; {
			found, err := b.Operation(t.Context(), l)
			var f *store.Failure
			if errors.As(err, &f) && f.Reason == store.ReasonDatabaseUnavailable && time.Now().Before(deadline) {
				continue
			}
			return found, err
		}
	}
	found, err := eventuallyRead(store.Lookup{TenantID: "t", IdempotencyKey: "k"})
	if err != nil || found.Answer.Outcome != already {
		t.Errorf("what is there: %v, %v", found.Answer.Outcome, err)
	}
	_, err = eventuallyRead(store.Lookup{TenantID: "t", IdempotencyKey: "absent"})
	var f *store.Failure
	if !errors.As(err, &f) || f.Reason != store.ReasonReadOnly || f.RetryDelay <= 0 {
		t.Errorf("what is not there: %v, want a failure for %s", err, store.ReasonReadOnly)
	}
	if r, err := b.Ready(t.Context()); err != nil || r.Writable {
		t.Errorf("ready says %+v, %v", r, err)
	}
}

func TestLookup_AliasResolvesToTheWinner(t *testing.T) {
	b := setup(t)
	first := want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	want(t, b.Store, grant("t", "k2", "i", "x"), already)
	g := grant("t", "k2", "i", "x").Grant
	for name, l := range map[string]store.Lookup{
		"winner":       {TenantID: "t", IdempotencyKey: "k1"},
		"alias":        {TenantID: "t", IdempotencyKey: "k2"},
		"business key": {TenantID: "t", BusinessKey: g.BusinessKey()},
		"same grant":   {TenantID: "t", IdempotencyKey: "k2", Grant: &g},
		"a fresh key":  {TenantID: "t", IdempotencyKey: "k3", Grant: &g},
	} {
		a := find(t, b, l).Answer
		if a.Outcome != already || a.Operation.IdempotencyKey != "k1" || a.Entitlement.ID != first.Entitlement.ID || a.CurrentState != active {
			t.Errorf("by %s: %v, %+v", name, a.Outcome, a.Operation)
		}
	}
}

func TestLookup_OtherGrantIsAConflict(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	want(t, b.Store, record("t", "s1", "j", paid, 1), newly)
	other := grant("t", "k1", "i", "x").Grant
	other.Scope = nil
	for _, c := range []struct {
		key    string
		by     pb.MatchedBy
		fields []string
	}{
		{"k1", byKey, []string{"scope.seats"}},
		{"fresh", byBusinessKey, []string{"scope.seats"}},
		{"s1", byKey, []string{"kind"}},
	} {
		a := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: c.key, Grant: &other}).Answer
		if a.Outcome != conflict || a.MatchedBy != c.by || !slices.Equal(fields(&a), c.fields) || a.Entitlement != nil {
			t.Errorf("%s: %v by %v, %v", c.key, a.Outcome, a.MatchedBy, a.Conflict)
		}
	}
}

func TestLookup_FullTellsTheStory(t *testing.T) {
	b := setup(t)
	origin := func(c *store.Command, event string) *store.Command {
		c.Origin = store.Origin{EventID: event, Source: "stripe", Caller: "spiffe://billing", TraceID: [16]byte{1}, SpanID: [8]byte{2}}
		return c
	}
	refused := origin(grant("t", "k1", "i", "x"), "evt-0")
	refused.Invoice.State = unpaid
	wantRejected(t, b.Store, refused, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID)
	want(t, b.Store, origin(grant("t", "k1", "i", "x"), "evt-1"), newly)
	want(t, b.Store, origin(grant("t", "k1", "i", "x"), "evt-1"), already)
	other := origin(grant("t", "k1", "i", "x"), "evt-2")
	other.Grant.Quantity, other.Grant.Scope = pointer(int64(1)), nil
	want(t, b.Store, other, conflict)
	want(t, b.Store, origin(grant("t", "k2", "i", "x"), "evt-3"), already)
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	want(t, b.Store, reinstate("t", "r2", "i", "x"), newly)

	for _, key := range []string{"k1", "k2"} {
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: key, Full: true})
		type told struct {
			key, event string
			outcome    pb.Outcome
		}
		var attempts []told
		for _, a := range found.Attempts {
			attempts = append(attempts, told{a.IdempotencyKey, a.Origin.EventID, a.Outcome})
			if a.Origin.Caller != "spiffe://billing" || a.Origin.Source != "stripe" || a.Origin.TraceID != [16]byte{1} || a.Origin.SpanID != [8]byte{2} {
				t.Errorf("%s: the attempt came from %+v", key, a.Origin)
			}
		}
		if want := []told{{"k1", "evt-0", rejected}, {"k1", "evt-1", newly}, {"k1", "evt-1", already}, {"k1", "evt-2", conflict},
			{"k2", "evt-3", already}}; !slices.Equal(attempts, want) {
			t.Errorf("%s: attempts %+v, want %+v", key, attempts, want)
		}
		for i, a := range found.Attempts {
			switch {
			case i > 0 && a.At.Before(found.Attempts[i-1].At):
				t.Errorf("%s: the attempts are not in the order of time", key)
			case a.Outcome == rejected && a.Reason != pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID:
				t.Errorf("%s: the refusal's reason is %v", key, a.Reason)
			case a.Outcome == conflict && !slices.Equal(a.DifferingFields, []string{"quantity", "scope.seats"}):
				t.Errorf("%s: the conflict's fields are %v", key, a.DifferingFields)
			case a.Outcome == newly && a.ID != found.Answer.Operation.AttemptID:
				t.Errorf("%s: the operation names another attempt than the winner", key)
			}
		}
		if len(found.Aliases) != 1 || found.Aliases[0].IdempotencyKey != "k2" || found.Aliases[0].BoundAt.IsZero() {
			t.Errorf("%s: aliases %+v", key, found.Aliases)
		}
		var entries []string
		for _, n := range found.Entries {
			entries = append(entries, n.OperationKey)
		}
		if !slices.Equal(entries, []string{"k1", "r", "r2"}) {
			t.Errorf("%s: entries of %v", key, entries)
		}
	}
}

func TestLookup_AttemptsOfAKeyThatWasOnlyRefused(t *testing.T) {
	b := setup(t)
	c := grant("t", "k", "i", "x")
	c.Invoice.State = unpaid
	for range 2 {
		wantRejected(t, b.Store, c, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID)
	}
	for name, l := range map[string]store.Lookup{
		"key":          {TenantID: "t", IdempotencyKey: "k", Full: true},
		"business key": {TenantID: "t", BusinessKey: c.Grant.BusinessKey(), Full: true},
	} {
		found := find(t, b, l)
		if found.Answer.Outcome != missing || len(found.Attempts) != 2 {
			t.Errorf("by %s: %v with %d attempts", name, found.Answer.Outcome, len(found.Attempts))
		}
		for _, a := range found.Attempts {
			if a.IdempotencyKey != "k" || a.Reason != pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID {
				t.Errorf("by %s: %+v", name, a)
			}
		}
	}
}

// Support has the invoice and the type, and asks why a second payment's grant came to nothing: it conflicted, under a key of its own.
func TestLookup_ByEffectShowsConflictsUnderOtherKeys(t *testing.T) {
	b := setup(t)
	c := grant("t", "k1", "i", "x")
	want(t, b.Store, c, newly)
	want(t, b.Store, c, already)
	other := grant("t", "k2", "i", "x")
	other.Grant.Scope = nil
	want(t, b.Store, other, conflict)
	wants := map[string][]string{"k1": {"k1", "k1"}, "": {"k1", "k1", "k2"}}
	for key, want := range wants {
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: key, BusinessKey: c.Grant.BusinessKey(), Full: true})
		var got []string
		for _, a := range found.Attempts {
			got = append(got, a.IdempotencyKey)
		}
		if !slices.Equal(got, want) || found.Truncated {
			t.Errorf("by key %q: attempts of %v, want %v; truncated %v", key, got, want, found.Truncated)
		}
	}
}

func TestLookup_SaysWhereAttemptsAreLeftOut(t *testing.T) {
	const kept = 500
	b := setup(t)
	c := grant("t", "k", "i", "x")
	want(t, b.Store, c, newly)
	for n := 2; n <= kept+1; n++ {
		want(t, b.Store, c, already)
		if n < kept {
			continue
		}
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "k", Full: true})
		if len(found.Attempts) != kept || found.Truncated != (n > kept) || (found.Attempts[0].Outcome == newly) != (n == kept) {
			t.Errorf("%d of %d attempts, the first %v, truncated %v", len(found.Attempts), n, found.Attempts[0].Outcome, found.Truncated)
		}
	}
}

// Whoever redelivered more than an answer holds was not told that the first of those orders were left out.
func TestLookup_SaysWhereOrdersAreLeftOut(t *testing.T) {
	const kept = 500
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	for _, n := range []int{kept, kept + 1} {
		exec(t, b.sql, `INSERT INTO operator_actions
			SELECT tenant_id, delivery_id, n, 1, 5, 1, 'me', 'because', '', now() + n * interval '1 second' FROM all_deliveries, generate_series(1, $1::int) n
			    ON CONFLICT DO NOTHING`, n)
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "k", Full: true})
		actions := found.Deliveries[0].Actions
		if len(actions) != kept || actions[kept-1].Attempts != int64(n) || found.Truncated != (n > kept) {
			t.Errorf("%d of %d orders, truncated %v", len(actions), n, found.Truncated)
		}
	}
}

func TestLookup_OfARefundNamesWhatItTookBack(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	want(t, b.Store, grant("t", "k2", "i", "y"), newly)
	want(t, b.Store, record("t", "refund", "i", refunded, 2), newly)
	want(t, b.Store, record("t", "refund-again", "i", refunded, 2), already)
	for _, key := range []string{"refund", "refund-again"} {
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: key, Full: true})
		a := found.Answer
		if a.Outcome != already || a.Operation.IdempotencyKey != "refund" || len(a.Reversed) != 2 || a.Entitlement != nil {
			t.Errorf("%s: %v, %+v, %d reversed", key, a.Outcome, a.Operation, len(a.Reversed))
		}
		if len(found.Entries) != 2 {
			t.Errorf("%s: %d entries, want those of the refund", key, len(found.Entries))
		}
	}
}

func TestEntitlement_ByIDAndBusinessKey(t *testing.T) {
	b := setup(t)
	c := grant("t", "k", "i", "x")
	c.Grant.Quantity = pointer(int64(9007199254740993))
	c.Grant.StartsAt = pointer(time.Date(2026, 1, 1, 0, 0, 0, 1000, time.UTC))
	id := want(t, b.Store, c, newly).Entitlement.ID
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	for name, target := range map[string]store.Target{
		"id": {EntitlementID: id}, "business key": {BusinessKey: c.Grant.BusinessKey()},
	} {
		e, err := b.Entitlement(t.Context(), "t", target)
		if err != nil {
			t.Fatal(err)
		}
		if e.ID != id || e.State != reversed || e.Version != 2 || *e.Grant.Quantity != 9007199254740993 ||
			!e.Grant.StartsAt.Equal(*c.Grant.StartsAt) || e.Grant.Scope["seats"] != "10" || e.Fingerprint != c.Grant.Fingerprint() {
			t.Errorf("by %s: %+v", name, e)
		}
	}
	for tenant, target := range map[string]store.Target{
		"t": {EntitlementID: uuid.New()}, "other": {EntitlementID: id}, "another": {BusinessKey: c.Grant.BusinessKey()},
	} {
		if e, err := b.Entitlement(t.Context(), tenant, target); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s: %+v, %v; want ErrNotFound", tenant, e, err)
		}
	}
}
