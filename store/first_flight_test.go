package store_test

import (
	"testing"

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
			type results struct {
				all []store.Result
				err error
			}
			ended := make(chan results, 1)
			go func() {
				all, err := b.ApplyAll(t.Context(), []store.Command{*grant("t", "k2", "a", "x"), *under}, nil)
				ended <- results{all, err}
			}()
			eventually(t, b.sql, blockedSQL, 0.05)
			if n := value[int64](t, b.sql, `SELECT purge_aliases(now() + interval '1 hour', 10)`); n != 1 {
				t.Fatalf("%d aliases purged", n)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			r := <-ended
			if r.err != nil {
				t.Fatal(r.err)
			}
			if r.all[0].Err != nil || r.all[0].Answer.Outcome != already {
				t.Errorf("the one that waited got %v, %v", r.all[0].Answer.Outcome, r.all[0].Err)
			}
			if r.all[1].Err != nil || r.all[1].Answer.Outcome != newly {
				t.Errorf("the one under the freed key got %v, %v: %s", r.all[1].Answer.Outcome, r.all[1].Err, describe(&r.all[1].Answer))
			}
			checkLedgers(t, b.sql)
		})
	}
}
