package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

func TestClaim_CarriesTheEvent(t *testing.T) {
	b := setup(t, to(crm))
	c := grant("t", "k", "i", "x")
	c.Origin = store.Origin{EventID: "evt", TraceID: [16]byte{1}, SpanID: [8]byte{2}}
	e := want(t, b.Store, c, newly).Entitlement
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	ev := d.Event
	if ev.Entry.Number != 1 || ev.Entry.Kind != pb.EntryKind_ENTRY_KIND_GRANTED || ev.Entitlement.ID != e.ID || ev.Entitlement.State != active ||
		ev.Entitlement.Version != 1 || ev.Entitlement.Grant.Scope["seats"] != "10" || ev.Operation.IdempotencyKey != "k" || ev.Operation.Origin != c.Origin {
		t.Errorf("the event is %+v", ev)
	}
	if d.Attempts != 1 || d.State != sending || d.LeaseUntil == nil || d.ContentType != "text/plain" || d.TenantID != "t" || len(d.Key) != 64 {
		t.Errorf("the delivery is %+v", d)
	}
	if id, ok := store.DeliveryIDOf(d.Key); !ok || id != d.ID {
		t.Errorf("the id of key %s is %v, want %v", d.Key, id, d.ID)
	}
	story := storyOf(t, b.Store, d)
	if len(story.Attempts) != 1 || story.Attempts[0].Worker != "worker" || story.Attempts[0].EndedAt != nil {
		t.Errorf("before the call, its attempts are %+v", story.Attempts)
	}
	if lost := settle(t, b.Store, store.Delivered, d); lost != nil {
		t.Fatalf("lost %v", lost)
	}
	story = storyOf(t, b.Store, d)
	if a := story.Attempts; len(a) != 1 || a[0].EndedAt == nil || a[0].StatusCode != 200 || a[0].Outcome != pb.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DELIVERED {
		t.Errorf("after the call, its attempts are %+v", a)
	}
	if now := story.Delivery; now.State != delivered || now.SettledAt == nil || now.BodyBytes != int64(len(d.Body)) || now.Key != d.Key {
		t.Errorf("after the call, it is %+v", now)
	}
	if _, err := b.Claim(t.Context(), "nowhere", "w", leaseTime, 1, body); err == nil {
		t.Error("a destination that is not configured is claimed from")
	}
}

// A worker that remembers how far it has come, by number or by time, never sees what commits behind that point.
func TestClaim_FindsWhatCommitsLate(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "a", "ia", "x"), newly)
	exec(t, b.sql, `CREATE TEMP TABLE stalled AS SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at FROM all_deliveries`)
	exec(t, b.sql, `DELETE FROM deliveries WHERE tenant_id <> ''`)
	exec(t, b.sql, `BEGIN`)
	exec(t, b.sql, `INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at) SELECT * FROM stalled`)

	want(t, b.Store, grant("t", "b", "ib", "x"), newly)
	second := claimOne(t, b.Store, "crm")
	if second.Event.Operation.IdempotencyKey != "b" {
		t.Fatalf("claimed %s", second.Event.Operation.IdempotencyKey)
	}
	settle(t, b.Store, store.Delivered, second)
	if left := claim(t, b.Store, "crm"); len(left) != 0 {
		t.Fatalf("claimed what is not committed: %v", left[0])
	}
	exec(t, b.sql, `COMMIT`)
	if first := claimOne(t, b.Store, "crm"); first.Event.Operation.IdempotencyKey != "a" {
		t.Errorf("claimed %s", first.Event.Operation.IdempotencyKey)
	}
}

// The reversal of a grant must not silently overtake it, whatever becomes of it; others flow.
func TestClaim_InOrderPerEntitlement(t *testing.T) {
	for name, c := range map[string]struct {
		destination store.Destination
		hold        func(*testing.T, *bundle, *store.Delivery)
		free        func(*testing.T, *bundle, *store.Delivery)
	}{
		"sending": {crm, func(*testing.T, *bundle, *store.Delivery) {}, func(t *testing.T, b *bundle, d *store.Delivery) {
			settle(t, b.Store, store.Delivered, d)
		}},
		"waiting": {crm, func(t *testing.T, b *bundle, d *store.Delivery) {
			if _, err := b.Settle(t.Context(), []store.DeliveryResult{{Delivery: d, Outcome: store.RetryAt, RetryAfter: time.Hour}}); err != nil {
				t.Fatal(err)
			}
		}, func(t *testing.T, b *bundle, d *store.Delivery) {
			exec(t, b.sql, `UPDATE deliveries SET due_at = now() WHERE delivery_id = $1`, [16]byte(d.ID))
			settle(t, b.Store, store.Delivered, claimOne(t, b.Store, "crm"))
		}},
		"dead, discarded": {crm, func(t *testing.T, b *bundle, d *store.Delivery) { settle(t, b.Store, store.Dead, d) }, func(t *testing.T, b *bundle, d *store.Delivery) {
			if a, err := b.Discard(t.Context(), order(d)); err != nil || a.Outcome != newly {
				t.Fatal(a, err)
			}
		}},
		"dead, redelivered": {crm, func(t *testing.T, b *bundle, d *store.Delivery) { settle(t, b.Store, store.Dead, d) }, func(t *testing.T, b *bundle, d *store.Delivery) {
			if a, err := b.Redeliver(t.Context(), order(d)); err != nil || a.Outcome != newly {
				t.Fatal(a, err)
			}
			again := claimOne(t, b.Store, "crm")
			if again.Key != d.Key || !bytes.Equal(again.Body, d.Body) || again.ContentType != d.ContentType {
				t.Errorf("redelivered as %s %q, at first %s %q", again.Key, again.Body, d.Key, d.Body)
			}
			settle(t, b.Store, store.Delivered, again)
		}},
		"unknown": {ledger, func(t *testing.T, b *bundle, d *store.Delivery) { settle(t, b.Store, store.Unknown, d) }, func(t *testing.T, b *bundle, d *store.Delivery) {
			if a, err := b.Resolve(t.Context(), order(d), pb.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED); err != nil || a.Outcome != newly {
				t.Fatal(a, err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := setup(t, to(c.destination))
			name := c.destination.Name
			want(t, b.Store, grant("t", "k", "i", "x"), newly)
			want(t, b.Store, reverse("t", "r", "i", "x"), newly)
			want(t, b.Store, reinstate("t", "r2", "i", "x"), newly)
			first := claimOne(t, b.Store, name)
			if first.Event.Entry.Number != 1 {
				t.Fatalf("entry %d comes first", first.Event.Entry.Number)
			}
			c.hold(t, b, first)
			want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
			if other := claimOne(t, b.Store, name); other.Event.Operation.IdempotencyKey != "k2" {
				t.Fatalf("%s is claimed", other.Event.Operation.IdempotencyKey)
			}
			all, _, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t"}, store.Page{})
			if err != nil || len(all) != 4 || all[0].HeldBy != 0 || all[1].HeldBy != 1 || all[2].HeldBy != 1 || all[3].HeldBy != 0 {
				t.Errorf("%d deliveries, %v", len(all), err)
			}
			c.free(t, b, first)
			for number := int64(2); number <= 3; number++ {
				next := claimOne(t, b.Store, name)
				if next.Event.Entry.Number != number {
					t.Fatalf("entry %d comes after %d", next.Event.Entry.Number, number-1)
				}
				settle(t, b.Store, store.Delivered, next)
			}
		})
	}
}

// A claim that looks at everything that is held back, again and again, is slower the more that is.
func TestClaim_PutsOffWhatIsHeld(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	settle(t, b.Store, store.Dead, claimOne(t, b.Store, "crm"))
	claim(t, b.Store, "crm")
	if due := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries WHERE stuck = 0 AND due_at <= clock_timestamp()`); due != 0 {
		t.Errorf("%d are still due", due)
	}
	if next, ok, err := b.NextDue(t.Context(), "crm"); err != nil || !ok || time.Until(next) < time.Minute {
		t.Errorf("next due at %v, %v, %v", next, ok, err)
	}
}

func TestClaim_ManyWorkersNeverTwice(t *testing.T) {
	b := setup(t, to(crm))
	const entitlements, workers = 150, 8
	var commands []store.Command
	for n := range entitlements {
		commands = append(commands, *grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"))
	}
	if _, err := b.ApplyAll(t.Context(), commands, nil); err != nil {
		t.Fatal(err)
	}
	for n := range entitlements / 2 {
		want(t, b.Store, reverse("t", fmt.Sprint("r", n), fmt.Sprint("i", n), "x"), newly)
	}
	stores := []*store.Store{b.Store, open(t, b.url, to(crm))}
	var mu sync.Mutex
	calls := map[string]int{}
	last := map[uuid.UUID]int64{}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			s := stores[w%2]
			for total := 0; total < entitlements*3/2; {
				got, err := s.Claim(t.Context(), "crm", fmt.Sprint(w), leaseTime, 1+w*3, body)
				if err != nil {
					t.Error(err)
					return
				}
				var results []store.DeliveryResult
				mu.Lock()
				for _, d := range got {
					calls[d.Key]++
					n := &d.Event.Entry
					if n.Number != last[n.EntitlementID]+1 {
						t.Errorf("entry %d comes after %d", n.Number, last[n.EntitlementID])
					}
					last[n.EntitlementID] = n.Number
					results = append(results, store.DeliveryResult{Delivery: d, Outcome: store.Delivered})
				}
				total = len(calls)
				mu.Unlock()
				if lost, err := s.Settle(t.Context(), results); err != nil || len(lost) > 0 {
					t.Errorf("lost %d, %v", len(lost), err)
				}
			}
		})
	}
	wg.Wait()
	for key, n := range calls {
		if n != 1 {
			t.Errorf("%s was claimed %d times", key, n)
		}
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries WHERE state = 4 AND attempts = 1`); n != entitlements*3/2 {
		t.Errorf("%d were delivered, want %d", n, entitlements*3/2)
	}
}

// A worker dies in a call to a destination that cannot deduplicate: whether it arrived is not known, and it is not sent again. Its log ends
// with it, so whoever finds the delivery says so, once.
func TestClaim_LeaseOutWithoutDeduplicationIsUnknown(t *testing.T) {
	var log bytes.Buffer
	b := setup(t, to(ledger), func(c *store.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "ledger")
	leaseOut(t, b)
	for range 2 {
		if again := claim(t, b.Store, "ledger"); len(again) != 0 {
			t.Fatal("sent again blindly")
		}
	}
	now := wantState(t, b.Store, d, unknown)
	if now.LastError == "" || now.Attempts != 1 {
		t.Errorf("it is %+v", now)
	}
	for _, want := range []string{
		"level=WARN", "destination=ledger", "tenant_id=t", "delivery_key=" + d.Key, "entitlement.idempotency_key=k",
		"grantd deliveries resolve " + d.ID.String(), now.LastError,
	} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("%s is not logged once:\n%s", want, &log)
		}
	}
	if a := storyOf(t, b.Store, d).Attempts; len(a) != 1 || a[0].Outcome != pb.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_UNKNOWN {
		t.Errorf("the attempts are %+v", a)
	}
	t.Run("a look-up asks once at a time", func(t *testing.T) {
		taken, err := b.TakeUnknown(t.Context(), "ledger", time.Hour, 10)
		if err != nil || len(taken) != 1 || taken[0].Key != d.Key || !bytes.Equal(taken[0].Body, d.Body) {
			t.Fatal(taken, err)
		}
		if taken, err = b.TakeUnknown(t.Context(), "ledger", time.Hour, 10); err != nil || len(taken) != 0 {
			t.Error("handed out twice", err)
		}
	})
	t.Run("the call itself may still tell", func(t *testing.T) {
		if lost := settle(t, b.Store, store.Delivered, d); len(lost) != 0 {
			t.Error("its result is lost")
		}
		wantState(t, b.Store, d, delivered)
	})
}

func TestClaim_WhatCannotBeRenderedIsDead(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "bad", "i", "x"), newly)
	want(t, b.Store, grant("t", "good", "i", "y"), newly)
	broken := true
	render := func(d *store.Delivery) ([]byte, string, error) {
		if broken && d.Event.Operation.IdempotencyKey == "bad" {
			return nil, "", errors.New("no template")
		}
		return body(d)
	}
	got, err := b.Claim(t.Context(), "crm", "w", leaseTime, 10, render)
	if err != nil || len(got) != 1 || got[0].Event.Operation.IdempotencyKey != "good" {
		t.Fatal(got, err)
	}
	all, _, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t", State: dead}, store.Page{})
	if err != nil || len(all) != 1 || all[0].LastError != "render: no template" || all[0].Body != nil || all[0].Attempts != 1 {
		t.Fatal(all, err)
	}
	broken = false
	if a, err := b.Redeliver(t.Context(), order(all[0])); err != nil || a.Outcome != newly {
		t.Fatal(a, err)
	}
	if got, err = b.Claim(t.Context(), "crm", "w", leaseTime, 10, render); err != nil || len(got) != 1 || got[0].Body == nil || got[0].Attempts != 2 {
		t.Fatal(got, err)
	}
}

// A claim finds a delivery held back by one that is being settled at that moment. Were it put off then, nobody would come to make it due:
// the settling has looked for it already.
func TestClaim_DoesNotPutOffWhatIsJustFreed(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	first := claimOne(t, b.Store, "crm")
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() WHERE state = 1`)

	tx, _ := begin(t, b.url)
	if _, err := tx.Exec(t.Context(), `DELETE FROM deliveries WHERE delivery_id = $1`, [16]byte(first.ID)); err != nil {
		t.Fatal(err)
	}
	if early := claim(t, b.Store, "crm"); len(early) != 0 {
		t.Fatal("claimed before the other is settled")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if next := claimOne(t, b.Store, "crm"); next.Event.Entry.Number != 2 {
		t.Errorf("entry %d is next", next.Event.Entry.Number)
	}
}

// The primary is made read-only and writable again. Sessions that were there keep what they began with; nobody starts the service anew.
func TestClaim_ComesBackAfterReadOnly(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	exec(t, b.sql, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$`)
	exec(t, b.sql, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'grantd' AND datname = current_database()`)
	for range 3 {
		got, err := b.Claim(t.Context(), "crm", "w", leaseTime, 10, body)
		var f *store.Failure
		if len(got) != 0 || !errors.As(err, &f) {
			t.Fatalf("claimed %d, %v", len(got), err)
		}
	}
	exec(t, b.sql, `SET default_transaction_read_only = off`)
	exec(t, b.sql, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$`)
	for deadline := time.Now().Add(10 * time.Second); ; {
		got, err := b.Claim(t.Context(), "crm", "w", leaseTime, 10, body)
		if err == nil && len(got) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("still %d, %v", len(got), err)
		}
	}
}
