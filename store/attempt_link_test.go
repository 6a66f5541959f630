package store_test

import (
	"testing"

	"github.com/grantd/grantd/store"
)

// Every attempt but the winner names the winner's trace, also where another key or another payload met it.
func TestAttempt_NamesTheWinnersTrace(t *testing.T) {
	b := setup(t)
	traced := func(c *store.Command, trace byte, tries int32) *store.Command {
		c.Origin = store.Origin{TraceID: [16]byte{trace}, SpanID: [8]byte{trace}, Sampled: trace == 1}
		c.PreviousTries = tries
		return c
	}
	other := func(key string) *store.Command {
		c := grant("t", key, "i", "x")
		c.Grant.Scope = nil
		return c
	}
	want(t, b.Store, traced(grant("t", "k1", "i", "x"), 1, 0), newly)
	want(t, b.Store, traced(grant("t", "k1", "i", "x"), 2, 1), already)
	want(t, b.Store, traced(grant("t", "k2", "i", "x"), 3, 0), already)
	want(t, b.Store, traced(grant("t", "k2", "i", "x"), 4, 2), already)
	want(t, b.Store, traced(other("k1"), 5, 0), conflict)
	want(t, b.Store, traced(other("k2"), 6, 0), conflict)
	refused := grant("t", "k3", "i2", "x")
	refused.Invoice.State = unpaid
	want(t, b.Store, traced(refused, 7, 3), rejected)

	winner := [16]byte{1}
	for key, attempts := range map[string][]struct {
		trace  byte
		winner [16]byte
		tries  int32
	}{
		"k1": {{trace: 1}, {2, winner, 1}, {3, winner, 0}, {4, winner, 2}, {5, winner, 0}, {6, winner, 0}},
		"k3": {{trace: 7, tries: 3}},
	} {
		found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: key, Full: true})
		if len(found.Attempts) != len(attempts) {
			t.Errorf("%s: %d attempts, want %d", key, len(found.Attempts), len(attempts))
			continue
		}
		for i, a := range found.Attempts {
			w := attempts[i]
			if a.Origin.TraceID != [16]byte{w.trace} || a.WinnerTraceID != w.winner || a.PreviousTries != w.tries {
				t.Errorf("%s: attempt %d is %x, of %x after %d tries, want %+v", key, i, a.Origin.TraceID, a.WinnerTraceID, a.PreviousTries, w)
			}
		}
	}
	if !value[bool](t, b.sql, `SELECT winner_trace_id IS NULL AND previous_tries IS NULL FROM attempts WHERE outcome = 1`) {
		t.Error("the winner's row pays for links that it has not")
	}
}

// Whether the winner's trace was sampled is known ever after, and costs nothing where it was not.
func TestOperation_KeepsWhetherItsTraceWasSampled(t *testing.T) {
	b := setup(t)
	for key, sampled := range map[string]bool{"sampled": true, "unsampled": false} {
		c := grant("t", key, key, "x")
		c.Origin = store.Origin{TraceID: [16]byte{1}, SpanID: [8]byte{2}, Sampled: sampled}
		want(t, b.Store, c, newly)
		if got := want(t, b.Store, grant("t", key, key, "x"), already).Operation.Origin; got != c.Origin {
			t.Errorf("%s: %+v, want %+v", key, got, c.Origin)
		}
		if null := value[bool](t, b.sql, `SELECT trace_sampled IS NULL FROM operations WHERE idempotency_key = $1`, key); null == sampled {
			t.Errorf("%s: NULL is %v", key, null)
		}
	}
}
