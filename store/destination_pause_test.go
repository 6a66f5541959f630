package store_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// gone is the result of a call that was answered 410.
func gone(d *store.Delivery) store.DeliveryResult {
	return store.DeliveryResult{Delivery: d, Outcome: store.Dead, Pauses: true, StatusCode: 410, Error: "410 Gone"}
}

func settleAll(t testing.TB, s *store.Store, results ...store.DeliveryResult) {
	t.Helper()
	if lost, err := s.Settle(t.Context(), results); err != nil || len(lost) > 0 {
		t.Fatalf("%d lost, %v", len(lost), err)
	}
}

func resumeOf(destination string, number int64, actor string) store.ResumeOrder {
	return store.ResumeOrder{Destination: destination, PauseNumber: number, Actor: actor, Reason: "moved to v2", Caller: "desk"}
}

func wantResumed(t testing.TB, s *store.Store, o store.ResumeOrder, outcome pb.Outcome, number int64, actor string) {
	t.Helper()
	got, p, err := s.Resume(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if got != outcome || p.Number != number || p.Actor != actor || p.ResumedAt == nil {
		t.Fatalf("got %v, %+v; want %v of pause %d by %s", got, p, outcome, number, actor)
	}
}

func wantPauses(t testing.TB, s *store.Store, names ...string) {
	t.Helper()
	all, err := s.Pauses(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range all {
		got = append(got, fmt.Sprintf("%s %d", p.Destination, p.Number))
	}
	if fmt.Sprint(got) != fmt.Sprint(names) {
		t.Fatalf("paused are %v, want %v", got, names)
	}
}

// A pause used to end when the process started again, and each replica found out by itself, at the price of one delivery.
func TestPause_HoldsForEverybodyUntilResumed(t *testing.T) {
	b := setup(t, to(crm, ledger))
	other := open(t, b.url, to(crm, ledger))
	want(t, b.Store, grant("t", "k1", "i1", "x"), newly)
	want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
	all := claim(t, b.Store, "crm")
	if len(all) != 2 {
		t.Fatalf("%d deliveries were claimed", len(all))
	}
	settleAll(t, b.Store, gone(all[0]), store.DeliveryResult{Delivery: all[1], Outcome: store.RetryAt})
	want(t, b.Store, grant("t", "k3", "i3", "x"), newly)
	for name, s := range map[string]*store.Store{"the same": b.Store, "another": other, "one that starts later": open(t, b.url, to(crm, ledger))} {
		if got := claim(t, s, "crm"); len(got) != 0 {
			t.Errorf("%s replica claims %d deliveries of a paused destination", name, len(got))
		}
		wantPauses(t, s, "crm 1")
	}
	if got := claim(t, other, "ledger"); len(got) != 3 {
		t.Errorf("%d deliveries of another destination were claimed, want 3", len(got))
	}

	wantResumed(t, other, resumeOf("crm", 1, "ana"), newly, 1, "ana")
	wantResumed(t, b.Store, resumeOf("crm", 1, "bo"), already, 1, "ana")
	wantResumed(t, b.Store, resumeOf("crm", 0, "bo"), already, 1, "ana")
	wantPauses(t, other)
	again := claim(t, b.Store, "crm")
	if len(again) != 2 {
		t.Fatalf("%d deliveries were claimed after the pause, want 2", len(again))
	}
	wantState(t, b.Store, all[0], dead)

	// It is gone again. A late repeat of the first order does not end the second pause.
	settleAll(t, other, gone(again[0]))
	wantResumed(t, b.Store, resumeOf("crm", 1, "ana"), already, 1, "ana")
	wantPauses(t, b.Store, "crm 2")
	wantResumed(t, b.Store, resumeOf("crm", 0, "bo"), newly, 2, "bo")
}

// Whoever mistyped a name was told the same as who named a destination that was never paused. Replicas may have different files, and the
// database has no list of destinations: what one of them has never heard of may still wait, or have waited, for another.
func TestPause_OfAnUnknownDestination(t *testing.T) {
	b := setup(t, to(crm, ledger))
	other := open(t, b.url, to(store.Destination{Name: "sales"}))
	want(t, b.Store, grant("t", "k1", "i1", "x"), newly)
	settleAll(t, b.Store, gone(claimOne(t, b.Store, "crm")))
	wantResumed(t, b.Store, resumeOf("crm", 0, "ana"), newly, 1, "ana")
	for _, test := range []struct {
		name  string
		s     *store.Store
		order store.ResumeOrder
		want  error
	}{
		{"a pause that never was", b.Store, resumeOf("crm", 3, "ana"), store.ErrNotFound},
		{"a pause that never was, at a replica without the destination", other, resumeOf("crm", 3, "ana"), store.ErrNotFound},
		{"in the file", other, resumeOf("sales", 0, "ana"), store.ErrNotFound},
		{"not in the file, and something waits", other, resumeOf("ledger", 0, "ana"), store.ErrNotFound},
		{"neither in the file nor in the database", b.Store, resumeOf("sales", 0, "ana"), store.ErrUnknownDestination},
	} {
		if _, _, err := test.s.Resume(t.Context(), test.order); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
	}
	settleAll(t, b.Store, store.DeliveryResult{Delivery: claimOne(t, b.Store, "ledger"), Outcome: store.Dead})
	if _, _, err := other.Resume(t.Context(), resumeOf("ledger", 0, "ana")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a destination with a delivery that is dead: %v", err)
	}
}

// The reply to a settlement is lost, and an operator ends the pause before the worker records the same result again.
func TestPause_RecordedAgainDoesNotPauseAgain(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	settleAll(t, b.Store, gone(d))
	settleAll(t, b.Store, gone(d))
	wantPauses(t, b.Store, "crm 1")
	wantResumed(t, b.Store, resumeOf("crm", 0, "ana"), newly, 1, "ana")
	settleAll(t, b.Store, gone(d))
	wantPauses(t, b.Store)
}

// Two calls were under way when the destination said that it is gone. An operator looks, and resumes it; then the second one is recorded,
// which was answered 410 too, before the operator looked.
func TestPause_CallsFromBeforeTheResumeDoNotPauseAgain(t *testing.T) {
	b := setup(t, to(crm))
	for _, n := range []string{"1", "2", "3"} {
		want(t, b.Store, grant("t", "k"+n, "i"+n, "x"), newly)
	}
	all := claim(t, b.Store, "crm")
	settleAll(t, b.Store, gone(all[0]))
	wantResumed(t, b.Store, resumeOf("crm", 0, "ana"), newly, 1, "ana")
	settleAll(t, b.Store, gone(all[1]), store.DeliveryResult{Delivery: all[2], Outcome: store.RetryAt})
	wantState(t, b.Store, all[1], dead)
	wantPauses(t, b.Store)
	settleAll(t, b.Store, gone(claimOne(t, b.Store, "crm")))
	wantPauses(t, b.Store, "crm 2")
}

// A destination that wants nothing is not asked about what it has, either.
func TestPause_NothingIsLookedUp(t *testing.T) {
	b := setup(t, to(ledger))
	want(t, b.Store, grant("t", "k1", "i1", "x"), newly)
	want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
	all := claim(t, b.Store, "ledger")
	settleAll(t, b.Store, store.DeliveryResult{Delivery: all[0], Outcome: store.Unknown}, gone(all[1]))
	take := func() int {
		t.Helper()
		taken, err := b.TakeUnknown(t.Context(), "ledger", time.Minute, 10)
		if err != nil {
			t.Fatal(err)
		}
		return len(taken)
	}
	if n := take(); n != 0 {
		t.Errorf("%d are looked up during the pause", n)
	}
	wantResumed(t, b.Store, resumeOf("ledger", 0, "ana"), newly, 1, "ana")
	if n := take(); n != 1 {
		t.Errorf("%d are looked up after the pause, want 1", n)
	}
}

// Every replica gets the answer at the same moment, and then several operators end the pause.
func TestPause_AtTheSameInstantIsOne(t *testing.T) {
	b := setup(t, to(crm))
	stores := []*store.Store{b.Store, open(t, b.url, to(crm))}
	const calls = 12
	for n := range calls {
		want(t, b.Store, grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"), newly)
	}
	all := claim(t, b.Store, "crm")
	var running sync.WaitGroup
	for n, d := range all {
		running.Go(func() {
			if _, err := stores[n%2].Settle(t.Context(), []store.DeliveryResult{gone(d)}); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
	wantPauses(t, b.Store, "crm 1")
	var mu sync.Mutex
	outcomes := map[pb.Outcome]int{}
	for n := range calls {
		running.Go(func() {
			outcome, _, err := stores[n%2].Resume(t.Context(), resumeOf("crm", 1, fmt.Sprint("operator ", n)))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			outcomes[outcome]++
		})
	}
	running.Wait()
	if len(all) != calls || outcomes[newly] != 1 || outcomes[already] != calls-1 {
		t.Errorf("%d claimed, outcomes %v", len(all), outcomes)
	}
}
