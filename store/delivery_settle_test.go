package store_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// A worker takes 90 s for a call under a lease of 60 s. Another one claims and delivers; then the first comes back and says that it
// has failed, or has not. Leases are in database time, so it makes no difference what the workers' clocks say.
func TestSettle_AnOlderLeaseCannotOverwrite(t *testing.T) {
	for name, late := range map[string]store.DeliveryOutcome{"dead": store.Dead, "retry": store.RetryAt, "delivered": store.Delivered} {
		t.Run(name, func(t *testing.T) {
			b := setup(t, to(crm))
			other := open(t, b.url, to(crm))
			want(t, b.Store, grant("t", "k", "i", "x"), newly)
			slow, err := b.Claim(t.Context(), "crm", "slow", 200*time.Millisecond, 10, body)
			if err != nil || len(slow) != 1 {
				t.Fatal(slow, err)
			}
			if early := claim(t, other, "crm"); len(early) != 0 {
				t.Fatal("claimed while the lease runs")
			}
			eventually(t, b.sql, `SELECT leased_until <= clock_timestamp() FROM all_deliveries`)
			fast := claimOne(t, other, "crm")
			if fast.Key != slow[0].Key || !bytes.Equal(fast.Body, slow[0].Body) || fast.Attempts != 2 || fast.LeaseToken == slow[0].LeaseToken {
				t.Errorf("claimed again as %+v, first as %+v", fast, slow[0])
			}
			if lost := settle(t, b.Store, late, slow...); len(lost) != 1 || lost[0] != slow[0] {
				t.Errorf("lost %v", lost)
			}
			wantState(t, b.Store, fast, sending)
			if lost := settle(t, other, store.Delivered, fast); len(lost) != 0 {
				t.Errorf("the newer claim lost %v", lost)
			}
			if lost := settle(t, b.Store, late, slow...); len(lost) != 1 {
				t.Errorf("later, lost %v", lost)
			}
			// The reply to the recording was lost, and it is sent once more.
			if lost := settle(t, other, store.Delivered, fast); len(lost) != 0 {
				t.Errorf("recorded again, the newer claim lost %v", lost)
			}
			wantState(t, b.Store, fast, delivered)
			if a := storyOf(t, b.Store, fast).Attempts; len(a) != 2 || a[0].EndedAt == nil || a[0].Worker != "slow" {
				t.Errorf("the attempts are %+v", a)
			}
		})
	}
}

func TestSettle_RetryComesBackInItsTime(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	if _, err := b.Settle(t.Context(), []store.DeliveryResult{{
		Delivery: d, Outcome: store.RetryAt, RetryAfter: time.Hour, CountsAsPoison: true, StatusCode: 503, Error: "down\x00" + strings.Repeat("é", 2000),
	}}); err != nil {
		t.Fatal(err)
	}
	now := wantState(t, b.Store, d, pending)
	if now.Poison != 1 || len(now.LastError) > 1024 || !strings.HasPrefix(now.LastError, "down") {
		t.Errorf("poison %d, error of %d bytes", now.Poison, len(now.LastError))
	}
	if wait := value[float64](t, b.sql, `SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM all_deliveries`); wait < 3500 || wait > 3600 {
		t.Errorf("due in %v s, want an hour", wait)
	}
	if next, ok, err := b.NextDue(t.Context(), "crm"); err != nil || !ok || time.Until(next) < 3500*time.Second || time.Until(next) > time.Hour {
		t.Errorf("next due at %v, %v, %v", next, ok, err)
	}
	if _, ok, err := b.NextDue(t.Context(), "ledger"); err != nil || ok {
		t.Errorf("something waits at a destination without deliveries: %v", err)
	}
	if early := claim(t, b.Store, "crm"); len(early) != 0 {
		t.Error("claimed before its time")
	}
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() WHERE tenant_id <> ''`)
	again := claimOne(t, b.Store, "crm")
	if again.Key != d.Key || !bytes.Equal(again.Body, d.Body) || again.Poison != 1 || again.Attempts != 2 {
		t.Errorf("comes back as %+v", again)
	}
	settle(t, b.Store, store.RetryAt, again)
	if now := wantState(t, b.Store, d, pending); now.Poison != 1 {
		t.Errorf("an outage counts as poison: %d", now.Poison)
	}
}

func TestResolve_SendAgainEndsTheCall(t *testing.T) {
	b := setup(t, to(ledger))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "ledger")
	settle(t, b.Store, store.Unknown, d)
	if a, err := b.Resolve(t.Context(), order(d), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil || a.Outcome != newly || a.Delivery.State != pending {
		t.Fatal(a, err)
	}
	if lost := settle(t, b.Store, store.Dead, d); len(lost) != 1 {
		t.Error("a result from before the resolution counts")
	}
	again := claimOne(t, b.Store, "ledger")
	if again.Key != d.Key || !bytes.Equal(again.Body, d.Body) {
		t.Errorf("sent again as %s", again.Key)
	}
}

// The other way about: the claim has put it off and not committed yet. The settling waits for that, and makes it due.
func TestSettle_WaitsForWhoPutsOff(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	first := claimOne(t, b.Store, "crm")
	tx, _ := begin(t, b.url)
	// As holdSQL does it.
	for _, sql := range []string{
		`SELECT FROM deliveries WHERE entry_number = 1 FOR NO KEY UPDATE`,
		`UPDATE deliveries SET due_at = now() + interval '1 hour' WHERE entry_number = 2`,
	} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	settled := make(chan error, 1)
	go func() {
		_, err := b.Settle(context.Background(), []store.DeliveryResult{{Delivery: first, Outcome: store.Delivered}})
		settled <- err
	}()
	eventually(t, b.sql, blockedSQL, 0.02)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	if next := claimOne(t, b.Store, "crm"); next.Event.Entry.Number != 2 {
		t.Errorf("entry %d is next", next.Event.Entry.Number)
	}
}

// A claim remembers where it left its rows. Some have been moved since, and other rows stand in their places: the results must find
// their own all the same, and touch no other.
func TestSettle_FindsRowsThatWereMoved(t *testing.T) {
	b := setup(t, to(crm))
	for _, n := range []string{"1", "2", "3", "4"} {
		want(t, b.Store, grant("t", "k"+n, "i"+n, "x"), newly)
	}
	all := claim(t, b.Store, "crm")
	if len(all) != 4 {
		t.Fatalf("%d deliveries were claimed", len(all))
	}
	exec(t, b.sql, `UPDATE deliveries SET last_error = 'moved' WHERE delivery_id = $1`, [16]byte(all[0].ID))
	if lost := settle(t, b.Store, store.Delivered, all[0], all[1]); len(lost) != 0 {
		t.Errorf("%d results are lost", len(lost))
	}
	// The table is written anew, in another order.
	exec(t, b.sql, `CLUSTER deliveries USING deliveries_id`)
	if lost := settle(t, b.Store, store.Dead, all[3]); len(lost) != 0 {
		t.Errorf("%d results are lost", len(lost))
	}
	for i, state := range []pb.DeliveryState{delivered, delivered, sending, dead} {
		wantState(t, b.Store, all[i], state)
		attempts := storyOf(t, b.Store, all[i]).Attempts
		if len(attempts) != 1 || (attempts[0].EndedAt != nil) != (state != sending) {
			t.Errorf("delivery %d has the attempts %+v", i, attempts)
		}
	}
}

// Two results come back at once. One makes its delivery UNKNOWN, and a second look for what was not found finds it again; that does not
// make up for the other one, whose delivery an operator has decided about.
func TestSettle_TellsWhatIsLostBesideUnknown(t *testing.T) {
	b := setup(t, to(ledger))
	want(t, b.Store, grant("t", "k1", "i1", "x"), newly)
	want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
	all := claim(t, b.Store, "ledger")
	if len(all) != 2 {
		t.Fatalf("%d deliveries were claimed", len(all))
	}
	settle(t, b.Store, store.Unknown, all[1])
	if a, err := b.Resolve(t.Context(), order(all[1]), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil || a.Outcome != newly {
		t.Fatal(a, err)
	}
	lost, err := b.Settle(t.Context(), []store.DeliveryResult{
		{Delivery: all[0], Outcome: store.Unknown}, {Delivery: all[1], Outcome: store.Delivered},
	})
	if err != nil || len(lost) != 1 || lost[0] != all[1] {
		t.Errorf("lost %v, %v", lost, err)
	}
	wantState(t, b.Store, all[0], unknown)
	wantState(t, b.Store, all[1], pending)
}
