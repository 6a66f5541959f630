package store_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// The key was an alias when the batch's locks were looked for, so that its invoice was not locked, and was purged while they were waited
// for, so that nothing was known of it any more. The grant was refused by an old record, or by none, whatever its evidence said.
func TestFirstFlight_AliasPurgedDuringTheWait(t *testing.T) {
	for _, c := range []struct {
		name   string
		record func(*testing.T, *bundle)
	}{
		{"no record", func(*testing.T, *bundle) {}},
		{"an older record", func(t *testing.T, b *bundle) { want(t, b.Store, record("t", "open", "z", unpaid, 1), newly) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := setup(t, patient)
			c.record(t, b)
			want(t, b.Store, grant("t", "k", "i", "x"), newly)
			want(t, b.Store, grant("t", "alias", "i", "x"), already)
			tx, _ := begin(t, b.url)
			insertGrant(t, tx, grant("t", "elsewhere", "a", "x"))

			under := grant("t", "alias", "z", "x")
			under.Invoice.Version = 2
			results := applyAllInBackground(t, b.Store, []store.Command{*grant("t", "k2", "a", "x"), *under})
			eventually(t, b.sql, blockedSQL, 0.05)
			if n := value[int64](t, b.sql, `SELECT purge_aliases(now() + interval '1 hour', 10)`); n != 1 {
				t.Fatalf("%d aliases purged", n)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			all := results()
			if all[0].Err != nil || all[0].Answer.Outcome != already {
				t.Errorf("the one that waited got %v, %v", all[0].Answer.Outcome, all[0].Err)
			}
			if all[1].Err != nil || all[1].Answer.Outcome != newly {
				t.Errorf("the one under the freed key got %v, %v: %s", all[1].Answer.Outcome, all[1].Err, describe(&all[1].Answer))
			}
			checkLedgers(t, b.sql)
		})
	}
}

// The batch waits for its first invoice while another replica commits winners, refunds and payments for all of the others. The locks are
// taken by what was known before; what is answered, and what the records say, is by what the others left behind.
func TestFirstFlight_OthersCommitDuringTheWait(t *testing.T) {
	other := func(c *store.Command) *store.Command {
		c.Grant.Scope = nil
		return c
	}
	cases := []struct {
		name string
		// elsewhere is committed during the wait, and command is in the batch, with version 5 of its invoice.
		elsewhere, command *store.Command
		outcome            pb.Outcome
		// version is the record's in the end, -1 where there is none.
		version int64
	}{
		{"same key", grant("t", "b", "b", "x"), grant("t", "b", "b", "x"), already, 1},
		{"same effect", grant("t", "c0", "c", "x"), grant("t", "c", "c", "x"), already, 1},
		{"same key, another payload", grant("t", "d", "d", "x"), other(grant("t", "d", "d", "x")), conflict, 1},
		{"same effect, another payload", grant("t", "e0", "e", "x"), other(grant("t", "e", "e", "x")), conflict, 1},
		{"same key, another invoice", grant("t", "f", "zz", "x"), grant("t", "f", "f", "x"), conflict, -1},
		{"same key, another kind", record("t", "g", "g", paid, 1), grant("t", "g", "g", "x"), conflict, 1},
		{"refunded later", record("t", "h0", "h", refunded, 9), grant("t", "h", "h", "x"), rejected, 9},
		{"refunded as late", record("t", "i0", "i", refunded, 5), grant("t", "i", "i", "x"), rejected, 5},
		{"refunded before", record("t", "j0", "j", refunded, 3), grant("t", "j", "j", "x"), newly, 5},
		{"paid later", record("t", "k0", "k", paid, 9), grant("t", "k", "k", "x"), newly, 9},
		{"another type", grant("t", "l0", "l", "y"), grant("t", "l", "l", "x"), newly, 5},
		{"nothing", nil, grant("t", "m", "m", "x"), newly, 5},
	}
	for _, replaysBefore := range []bool{false, true} {
		t.Run(fmt.Sprint("replays before: ", replaysBefore), func(t *testing.T) {
			b := setup(t, patient, func(c *store.Config) { c.Committers = 1 })
			replica := open(t, b.url)
			want(t, b.Store, grant("t", "before", "before", "x"), newly)
			if replaysBefore {
				want(t, b.Store, grant("t", "before", "before", "x"), already)
			}
			tx, _ := begin(t, b.url)
			insertGrant(t, tx, grant("t", "elsewhere", "a", "x"))
			batch := []store.Command{*grant("t", "k2", "a", "x")}
			for _, c := range cases {
				c.command.Invoice.Version = 5
				batch = append(batch, *c.command)
			}
			results := applyAllInBackground(t, b.Store, batch)
			eventually(t, b.sql, blockedSQL, 0.05)
			for _, c := range cases {
				if c.elsewhere != nil {
					want(t, replica, c.elsewhere, newly)
				}
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			all := results()
			if all[0].Err != nil || all[0].Answer.Outcome != already {
				t.Errorf("the one that waited got %v, %v", all[0].Answer.Outcome, all[0].Err)
			}
			for n, c := range cases {
				if got := all[n+1]; got.Err != nil || got.Answer.Outcome != c.outcome {
					t.Errorf("%s: got %v, %v; want %v", c.name, got.Answer.Outcome, got.Err, c.outcome)
				}
				if got := value[int64](t, b.sql, `SELECT COALESCE((SELECT version FROM invoices WHERE invoice_id = $1), -1)`, c.command.Grant.InvoiceID); got != c.version {
					t.Errorf("%s: the record has version %d, want %d", c.name, got, c.version)
				}
			}
			checkLedgers(t, b.sql)
		})
	}
}

// Grants of one invoice each, new ones and replays with other evidence, in batches on two replicas: whatever is known of a command moves
// nothing, so that each record has the version that its grant was made under.
func TestFirstFlight_NewAndKnownOnTwoReplicas(t *testing.T) {
	inLongAndShortWaits(t, func(t *testing.T, b *bundle, stores []*store.Store) {
		for round := range rounds(60, 1500) {
			random := rand.New(rand.NewPCG(uint64(round), 11))
			var wg sync.WaitGroup
			for _, s := range stores {
				for range 2 {
					var batch []store.Command
					for n := range 12 {
						c := grant("t", fmt.Sprint("k", round, "-", random.IntN(16)), fmt.Sprint("i", round, "-", n), "x")
						if random.IntN(2) == 0 {
							c.IdempotencyKey = fmt.Sprint("k", round, "-", n)
						}
						if random.IntN(8) == 0 {
							c.Grant.Scope = nil
						}
						c.Invoice.Version = int64(random.IntN(4))
						batch = append(batch, *c)
					}
					random.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
					refund := record("t", fmt.Sprint("r", round, "-", random.Int()), fmt.Sprint("i", round, "-", random.IntN(12)), refunded, 2)
					wg.Go(func() {
						results, err := s.ApplyAll(t.Context(), batch, nil)
						if err != nil {
							t.Error(err)
						}
						for n, r := range results {
							if r.Err != nil {
								t.Errorf("round %d: %s: %v", round, batch[n].IdempotencyKey, r.Err)
							}
						}
					})
					if random.IntN(3) == 0 {
						wg.Go(func() {
							if _, err := s.Apply(t.Context(), refund); err != nil {
								t.Error(err)
							}
						})
					}
				}
			}
			wg.Wait()
			if t.Failed() {
				return
			}
		}
		checkLedgers(t, b.sql)
		if n := value[int](t, b.sql, `
SELECT count(*) FROM invoices i JOIN operations o ON (o.tenant_id, o.idempotency_key) = (i.tenant_id, i.recorded_by)
  LEFT JOIN entries n ON (n.tenant_id, n.operation_key, n.kind) = (i.tenant_id, i.recorded_by, 1)
 WHERE o.invoice_id <> i.invoice_id OR COALESCE(o.invoice_version, n.invoice_version) IS DISTINCT FROM i.version`); n != 0 {
			t.Errorf("%d records were moved by a command that was not applied", n)
		}
	})
}
