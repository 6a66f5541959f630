package store_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// rounds is how often a race is run: more under GRANTD_SOAK=1.
func rounds(few, many int) int {
	if os.Getenv("GRANTD_SOAK") == "1" {
		return many
	}
	return few
}

// 50 calls at once, each with a key of its own, for one effect, half of them with another scope: one grants, its equals are told
// ALREADY, the others CONFLICT, all of them name the winner, and every key that was told ALREADY resolves.
func TestGrant_FiftyParallelCallsForOneEffect(t *testing.T) {
	b := setup(t)
	stores := []*store.Store{b.Store, open(t, b.url)}
	for round := range 4 {
		invoice := fmt.Sprint("i", round)
		const callers = 50
		commands := make([]*store.Command, callers)
		answers := make([]store.Answer, callers)
		start := make(chan struct{})
		var wg sync.WaitGroup
		for n := range callers {
			c := grant("t", fmt.Sprint("k", round, "-", n), invoice, "x")
			if n%2 == 1 {
				c.Grant.Scope = map[string]string{"seats": "20"}
			}
			commands[n] = c
			wg.Go(func() {
				<-start
				var err error
				if answers[n], err = stores[n%4/2].Apply(t.Context(), c); err != nil {
					t.Error(err)
				}
			})
		}
		close(start)
		wg.Wait()
		if t.Failed() {
			return
		}
		winner := slices.IndexFunc(answers, func(a store.Answer) bool { return a.Outcome == newly })
		if winner < 0 {
			t.Fatal("nobody was granted")
		}
		key := commands[winner].IdempotencyKey
		for n := range answers {
			a := &answers[n]
			switch {
			case n == winner:
			case n%2 == winner%2:
				if a.Outcome != already || a.MatchedBy != byBusinessKey || a.Operation.IdempotencyKey != key {
					t.Errorf("an equal call got %v by %v", a.Outcome, a.MatchedBy)
				}
				found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: commands[n].IdempotencyKey})
				if found.Answer.Outcome != already || found.Answer.MatchedBy != byKey || found.Answer.Operation.IdempotencyKey != key {
					t.Errorf("the key of an equal call resolves to %v", found.Answer.Outcome)
				}
			default:
				if a.Outcome != conflict || a.Conflict.Stored.IdempotencyKey != key || !slices.Equal(fields(a), []string{"scope.seats"}) {
					t.Errorf("a different call got %v", a.Outcome)
				}
			}
		}
	}
	checkLedgers(t, b.sql)
}

// The same request from 50 callers at once, through two stores: one effect, and all of them are told of it.
func TestGrant_FiftyParallelCallsOfOneKey(t *testing.T) {
	b := setup(t)
	stores := []*store.Store{b.Store, open(t, b.url)}
	var grants [2]int
	var mu sync.Mutex
	var wg sync.WaitGroup
	for n := range 50 {
		wg.Go(func() {
			a, err := stores[n%2].Apply(t.Context(), grant("t", "k", "i", "x"))
			if err != nil || a.Outcome != newly && (a.Outcome != already || a.MatchedBy != byKey) {
				t.Errorf("got %v by %v, %v", a.Outcome, a.MatchedBy, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if a.Outcome == newly {
				grants[0]++
			} else {
				grants[1]++
			}
		})
	}
	wg.Wait()
	if grants != [2]int{1, 49} {
		t.Errorf("%d were granted and %d told ALREADY", grants[0], grants[1])
	}
}

// inLongAndShortWaits runs a hunt for deadlocks twice. With the lock timeout of a service, two that wait for each other are parted before
// the database looks: a caller must still see nothing of it. With a long one, the database counts each deadlock: there must be none.
func inLongAndShortWaits(t *testing.T, hunt func(t *testing.T, b *bundle, stores []*store.Store)) {
	t.Run("short waits", func(t *testing.T) {
		b := setup(t)
		hunt(t, b, []*store.Store{b.Store, open(t, b.url)})
	})
	t.Run("long waits", func(t *testing.T) {
		b := setup(t, patient)
		exec(t, b.sql, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 20', current_database()); END $$`)
		// The sessions of stores that are opened from here on look for deadlocks soon.
		hunt(t, b, []*store.Store{open(t, b.url, patient), open(t, b.url, patient)})
		// A session hands in what it counted when it ends.
		exec(t, b.sql, endSessions)
		if n := value[int](t, b.sql, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n != 0 {
			t.Errorf("the database had to break %d deadlocks", n)
		}
	})
}

// Two replicas commit batches that hold the same keys, business keys and invoices in opposite orders. Statements that took their rows
// in the order of arrival, or all in the order of one of these keys, deadlocked here.
func TestBatches_InOppositeOrdersOnTwoReplicas(t *testing.T) {
	inLongAndShortWaits(t, func(t *testing.T, b *bundle, stores []*store.Store) {
		random := rand.New(rand.NewPCG(1, 2))
		for round := range rounds(150, 5000) {
			const size = 10
			var batches [2][]store.Command
			for n := range size {
				// Keys sort against business keys, and two effects share an invoice.
				c := grant("t", fmt.Sprintf("k%d-%d", round, size-n), fmt.Sprintf("i%d-%d", round, n/2), fmt.Sprint("x", n%2))
				batches[0] = append(batches[0], *c)
				switch {
				case round%3 == 1:
					// The same keys without the same invoices, so that the keys are all that the two meet at.
					c.Grant.InvoiceID = fmt.Sprintf("j%d-%d", round, n/2)
				case random.IntN(3) == 0:
					// The same effect under another key of this round.
					c.IdempotencyKey = fmt.Sprintf("k%d-%d", round, 1+random.IntN(2*size))
				}
				batches[1] = append(batches[1], *c)
			}
			if round%2 == 0 {
				slices.Reverse(batches[1])
			} else {
				random.Shuffle(size, func(i, j int) { batches[1][i], batches[1][j] = batches[1][j], batches[1][i] })
			}
			granted := make(map[any]int)
			var mu sync.Mutex
			var wg sync.WaitGroup
			for i, batch := range batches {
				wg.Go(func() {
					results, err := stores[i].ApplyAll(t.Context(), batch, nil)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					for n, r := range results {
						switch {
						case r.Err != nil:
							t.Errorf("round %d: %v", round, r.Err)
						case r.Answer.Outcome == newly:
							granted[batch[n].Grant.BusinessKey()]++
							granted[batch[n].IdempotencyKey]++
						case r.Answer.Outcome != already && r.Answer.Outcome != conflict:
							t.Errorf("round %d: %v, %s", round, r.Answer.Outcome, describe(&r.Answer))
						}
					}
				})
			}
			wg.Wait()
			for what, n := range granted {
				if n != 1 {
					t.Errorf("round %d: %+v was granted %d times", round, what, n)
				}
			}
			if t.Failed() {
				return
			}
		}
		checkLedgers(t, b.sql)
	})
}

// A reversal looks for an invoice that is not there; while its batch waits for the lock of another one, it is made, and somebody else
// holds it, who waits for what the batch has locked. To wait for it now, out of the order of all locks, was a deadlock.
func TestBatches_InvoiceMadeWhileOthersAreWaitedFor(t *testing.T) {
	b := setup(t, patient)
	replica := open(t, b.url)
	want(t, b.Store, record("t", "k1", "z", paid, 1), newly)
	first, _ := begin(t, b.url)
	if _, err := first.Exec(t.Context(), `SELECT FROM invoices WHERE invoice_id = 'z' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	answered := applyAllInBackground(t, b.Store, []store.Command{*grant("t", "k2", "z", "x"), *reverse("t", "k3", "m", "x")})
	eventually(t, b.sql, blockedSQL, 0.05)
	want(t, replica, record("t", "k4", "m", paid, 1), newly)
	second, _ := begin(t, b.url)
	if _, err := second.Exec(t.Context(), `SELECT FROM invoices WHERE invoice_id = 'm' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	if err := first.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The answers come while the second one holds its lock.
	results := answered()
	if len(results) != 2 || results[0].Err != nil || results[0].Answer.Outcome != newly ||
		results[1].Err != nil || results[1].Answer.Outcome != rejected {
		t.Errorf("got %+v", results)
	}
	if err := second.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkLedgers(t, b.sql)
}

// Batches of all kinds on the same invoices: what takes back and what grants meet each other's rows in every order.
func TestBatches_OfAllKindsOnTwoReplicas(t *testing.T) {
	inLongAndShortWaits(t, func(t *testing.T, b *bundle, stores []*store.Store) {
		for round := range rounds(60, 3000) {
			random := rand.New(rand.NewPCG(uint64(round), 3))
			var wg sync.WaitGroup
			for i, s := range stores {
				var batch []store.Command
				for n := range 8 {
					invoice, key := fmt.Sprint("i", round, "-", random.IntN(4)), fmt.Sprint("k", round, "-", i, "-", n)
					if random.IntN(3) == 0 {
						key = fmt.Sprint("k", round, "-", random.IntN(8))
					}
					switch random.IntN(5) {
					case 0:
						batch = append(batch, *record("t", key, invoice, refunded, int64(random.IntN(5))+2))
					case 1:
						batch = append(batch, *reverse("t", key, invoice, "x"))
					case 2:
						batch = append(batch, *reinstate("t", key, invoice, "x"))
					default:
						batch = append(batch, *grant("t", key, invoice, fmt.Sprint("x", random.IntN(2))))
					}
				}
				wg.Go(func() {
					results, err := s.ApplyAll(t.Context(), batch, nil)
					if err != nil {
						t.Error(err)
					}
					for _, r := range results {
						if r.Err != nil {
							t.Errorf("round %d: %v", round, r.Err)
						}
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
		}
		checkLedgers(t, b.sql)
	})
}

// The grant and the refund of one invoice at the same instant. Where the grant did not lock the invoice before it looked at it, both
// committed, and the customer kept what was refunded.
func TestRefund_AtTheInstantOfTheGrant(t *testing.T) {
	b := setup(t)
	stores := []*store.Store{b.Store, open(t, b.url)}
	var taken, refused int
	for round := range rounds(200, 5000) {
		invoice := fmt.Sprint("i", round)
		var granted, refund store.Answer
		var errs [2]error
		start := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			<-start
			granted, errs[0] = stores[round%2].Apply(t.Context(), grant("t", "g"+invoice, invoice, "x"))
		})
		wg.Go(func() {
			<-start
			refund, errs[1] = stores[round/2%2].Apply(t.Context(), record("t", "r"+invoice, invoice, refunded, 2))
		})
		close(start)
		wg.Wait()
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		switch {
		case refund.Outcome != newly:
			t.Fatalf("round %d: the refund got %v", round, refund.Outcome)
		case granted.Outcome == newly && len(refund.Reversed) == 1 && refund.Reversed[0].ID == granted.Entitlement.ID:
			taken++
		case granted.Outcome == rejected && granted.Rejection.Reason == pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED && len(refund.Reversed) == 0:
			refused++
		default:
			t.Fatalf("round %d: the grant got %v (%s), and the refund took back %d", round, granted.Outcome, describe(&granted), len(refund.Reversed))
		}
	}
	t.Logf("%d were granted and taken back, %d refused", taken, refused)
	checkLedgers(t, b.sql)
}

// A reversal and a reinstatement of one entitlement, and the refund of its invoice, at the same instant.
func TestReinstate_AtTheInstantOfTheRefund(t *testing.T) {
	b := setup(t)
	stores := []*store.Store{b.Store, open(t, b.url)}
	for round := range rounds(60, 3000) {
		invoice := fmt.Sprint("i", round)
		want(t, b.Store, grant("t", "g"+invoice, invoice, "x"), newly)
		want(t, b.Store, reverse("t", "v"+invoice, invoice, "x"), newly)
		var wg sync.WaitGroup
		for i, c := range []*store.Command{record("t", "r"+invoice, invoice, refunded, 2), reinstate("t", "b"+invoice, invoice, "x"), reverse("t", "w"+invoice, invoice, "x")} {
			wg.Go(func() {
				if _, err := stores[(i+round)%2].Apply(t.Context(), c); err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
	}
	checkLedgers(t, b.sql)
}
