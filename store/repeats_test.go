package store_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// A batch may hold one key, or one effect, over and over: position decides, and each item has an attempt of its own.
func TestApplyAll_RepeatsOfOne(t *testing.T) {
	b := setup(t)
	const n = 100
	for name, key := range map[string]func(i int) string{
		"one key":    func(int) string { return "k" },
		"one effect": func(i int) string { return fmt.Sprint("e", i) },
	} {
		t.Run(name, func(t *testing.T) {
			commands := make([]store.Command, n)
			for i := range commands {
				commands[i] = *grant(name, key(i), "i", "x")
			}
			commands[n/2].Grant.Scope = map[string]string{"seats": "20"}
			by := byKey
			if key(0) != key(1) {
				by = byBusinessKey
			}
			results, err := b.ApplyAll(t.Context(), commands, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, r := range results {
				outcome, matched := already, by
				switch i {
				case 0:
					outcome, matched = newly, 0
				case n / 2:
					outcome = conflict
				}
				if r.Err != nil || r.Answer.Outcome != outcome || r.Answer.MatchedBy != matched {
					t.Errorf("%d: got %v by %v, %v", i, r.Answer.Outcome, r.Answer.MatchedBy, r.Err)
				}
			}
			if got := value[int](t, b.sql, `SELECT count(*) FROM attempts WHERE tenant_id = $1`, name); got != n {
				t.Errorf("%d attempts", got)
			}
		})
	}
	checkLedgers(t, b.sql)
}

// A batch is told what its items would be told one by one: refusals leave keys free, records move invoices, conflicts name the first.
func TestApplyAll_IsLikeOneByOne(t *testing.T) {
	b := setup(t)
	told := func(r store.Result) string {
		a := &r.Answer
		return fmt.Sprint(a.Outcome, a.MatchedBy, operationNamed(a), describe(a), r.Err)
	}
	outcomes := make(map[string]int)
	for seed := range uint64(40) {
		random := rand.New(rand.NewPCG(seed, 5))
		together, apart := make([]store.Command, 60), make([]store.Command, 60)
		for i := range together {
			c := grant("", fmt.Sprint("k", random.IntN(6)), fmt.Sprint("i", random.IntN(3)), fmt.Sprint("x", random.IntN(2)))
			switch random.IntN(10) {
			case 0, 1, 2:
				c.Invoice.State = unpaid
			case 3:
				c.Grant.Scope = map[string]string{"seats": "20"}
			case 4:
				c = record("", c.IdempotencyKey, c.Grant.InvoiceID, paid, 1+int64(random.IntN(3)))
			case 5:
				c = record("", c.IdempotencyKey, c.Grant.InvoiceID, refunded, 1+int64(random.IntN(3)))
			}
			together[i], apart[i] = *c, *c
			together[i].TenantID, together[i].Grant.TenantID = fmt.Sprint("together", seed), fmt.Sprint("together", seed)
			apart[i].TenantID, apart[i].Grant.TenantID = fmt.Sprint("apart", seed), fmt.Sprint("apart", seed)
		}
		results, err := b.ApplyAll(t.Context(), together, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range apart {
			a, err := b.Apply(t.Context(), &apart[i])
			outcomes[a.Outcome.String()]++
			if got, want := told(results[i]), told(store.Result{Answer: a, Err: err}); got != want {
				t.Errorf("seed %d, %d of %v %s: got %s, want %s", seed, i, apart[i].Kind, apart[i].IdempotencyKey, got, want)
			}
		}
	}
	if len(outcomes) != 4 {
		t.Errorf("the batches are too tame: %v", outcomes)
	}
	checkLedgers(t, b.sql)
}

// The first of a key is refused and leaves it free; those behind it are blocked by somebody's lock. Whoever divides their batches and moves
// what is blocked aside must not bring the third before the second.
func TestLocks_RepeatsKeepTheirOrder(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "before", "i", "y"), newly)
	tx, _ := begin(t, b.url)
	if _, err := tx.Exec(t.Context(), `SELECT FROM invoices FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	commands := make([]store.Command, 9)
	for i := range commands {
		commands[i] = *grant("t", "k", "i", "x")
	}
	commands[0].Invoice.State = unpaid
	results := applyAllInBackground(t, b.Store, commands)
	eventually(t, b.sql, blockedSQL, 0.1)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, r := range results() {
		outcome := already
		switch i {
		case 0:
			outcome = rejected
		case 1:
			outcome = newly
		}
		if r.Err != nil || r.Answer.Outcome != outcome {
			t.Errorf("%d: got %v, %v, want %v", i, r.Answer.Outcome, r.Err, outcome)
		}
	}
	checkLedgers(t, b.sql)
}

// While one of a batch waits for its invoice, another replica grants its effect. The one behind it in the batch, which brings no evidence, must
// not be refused by what was so before that: the earlier item, which is told of the winner, comes first.
func TestApplyAll_WinnerInBetweenKeepsTheOrder(t *testing.T) {
	for name, keys := range map[string][2]string{"one effect": {"b", "c"}, "one key": {"winner", "winner"}} {
		t.Run(name, func(t *testing.T) {
			b := setup(t, patient)
			tx, _ := begin(t, b.url)
			insertGrant(t, tx, grant("t", "winner", "i", "x"))
			commands := []store.Command{
				// Refused, both, and so the rest have waited.
				*grant("t", keys[0], "i", "x"), *grant("t", "r", "j", "x"),
				*grant("t", keys[0], "i", "x"), *grant("t", keys[1], "i", "x"),
				*record("t", "r", "k", paid, 1),
			}
			for _, i := range []int{0, 1, 3} {
				commands[i].Invoice.State = unpaid
			}
			results := applyAllInBackground(t, b.Store, commands)
			eventually(t, b.sql, blockedSQL, 0)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			for i, r := range results() {
				if want := []pb.Outcome{rejected, rejected, already, already, newly}[i]; r.Err != nil || r.Answer.Outcome != want {
					t.Errorf("%d: got %v, %v, want %v", i, r.Answer.Outcome, r.Err, want)
				}
			}
		})
	}
}
