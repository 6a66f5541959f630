package store_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

const (
	pending   = pb.DeliveryState_DELIVERY_STATE_PENDING
	sending   = pb.DeliveryState_DELIVERY_STATE_SENDING
	unknown   = pb.DeliveryState_DELIVERY_STATE_UNKNOWN
	delivered = pb.DeliveryState_DELIVERY_STATE_DELIVERED
	dead      = pb.DeliveryState_DELIVERY_STATE_DEAD
	discarded = pb.DeliveryState_DELIVERY_STATE_DISCARDED
)

// Two destinations of the two sorts.
var (
	crm    = store.Destination{Name: "crm", Deduplicates: true}
	ledger = store.Destination{Name: "ledger"}
)

func to(destinations ...store.Destination) func(*store.Config) {
	return func(c *store.Config) { c.Destinations = destinations }
}

// body renders what names the event, and never the same twice.
func body(d *store.Delivery) ([]byte, string, error) {
	return fmt.Appendf(nil, "%s %s %d %s", d.Event.Entitlement.Grant.InvoiceID, d.Event.Entry.Kind, d.Event.Entry.Number, uuid.NewString()), "text/plain", nil
}

const leaseTime = time.Minute

func claim(t testing.TB, s *store.Store, destination string) []*store.Delivery {
	t.Helper()
	all, err := s.Claim(t.Context(), destination, "worker", leaseTime, 100, body)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// claimOne claims what must be the only delivery that is due.
func claimOne(t testing.TB, s *store.Store, destination string) *store.Delivery {
	t.Helper()
	all := claim(t, s, destination)
	if len(all) != 1 {
		t.Fatalf("%d deliveries were claimed, want one", len(all))
	}
	return all[0]
}

func settle(t testing.TB, s *store.Store, outcome store.DeliveryOutcome, all ...*store.Delivery) []*store.Delivery {
	t.Helper()
	var results []store.DeliveryResult
	for _, d := range all {
		r := store.DeliveryResult{Delivery: d, Outcome: outcome, StatusCode: 200}
		if outcome != store.Delivered {
			r.StatusCode, r.Error = 500, "no"
		}
		results = append(results, r)
	}
	lost, err := s.Settle(t.Context(), results)
	if err != nil {
		t.Fatal(err)
	}
	return lost
}

// leaseOut makes every lease run out now.
func leaseOut(t testing.TB, b *bundle) {
	t.Helper()
	exec(t, b.sql, `UPDATE deliveries SET leased_until = clock_timestamp() WHERE state = 2`)
}

func storyOf(t testing.TB, s *store.Store, d *store.Delivery) *store.DeliveryStory {
	t.Helper()
	story, err := s.Delivery(t.Context(), d.TenantID, store.DeliveryName{ID: d.ID})
	if err != nil {
		t.Fatal(err)
	}
	return story
}

func wantState(t testing.TB, s *store.Store, d *store.Delivery, state pb.DeliveryState) *store.Delivery {
	t.Helper()
	now := storyOf(t, s, d).Delivery
	if now.State != state {
		t.Fatalf("%s of entry %d is %v, want %v", d.Destination, d.Event.Entry.Number, now.State, state)
	}
	return now
}

func order(d *store.Delivery) store.DeliveryOrder {
	return store.DeliveryOrder{TenantID: d.TenantID, Delivery: store.DeliveryName{ID: d.ID}, Actor: "ops@example.com", Reason: "asked for"}
}

func TestDeliveries_AreMadeWithTheEntryAlone(t *testing.T) {
	mail := store.Destination{Name: "mail", Template: "welcome"}
	reversals := store.Destination{Name: "reversals", Kinds: []pb.EntryKind{pb.EntryKind_ENTRY_KIND_REVERSED}}
	b := setup(t, to(crm, mail, reversals, store.Destination{Name: "y", EntitlementTypes: []string{"y"}}))
	made := func(want ...string) {
		t.Helper()
		var got []string
		all, _, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t"}, store.Page{})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			got = append(got, fmt.Sprintf("%s/%d>%s", d.Event.Entitlement.Grant.EntitlementType, d.Event.Entry.Number, d.Destination))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Fatalf("deliveries %v, want %v", got, want)
		}
	}
	refused := grant("t", "k", "i", "x")
	refused.Invoice.State = unpaid
	wantRejected(t, b.Store, refused, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID)
	made()
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	made("x/1>crm")
	again := grant("t", "k", "i", "x")
	again.Notify = &store.Notify{Recipient: "a@example.com", Locale: "en"}
	want(t, b.Store, again, already)
	again.IdempotencyKey = "k2"
	want(t, b.Store, again, already)
	again.Grant.Scope = nil
	want(t, b.Store, again, conflict)
	made("x/1>crm")
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	made("x/1>crm", "x/2>crm", "x/2>reversals")
	want(t, b.Store, grant("t", "k3", "i", "y"), newly)
	made("x/1>crm", "x/2>crm", "x/2>reversals", "y/1>crm", "y/1>y")

	// A destination that was taken away keeps what it was given; one that is new gets what comes.
	other := open(t, b.url, to(store.Destination{Name: "new"}))
	want(t, other, grant("t", "k4", "i", "z"), newly)
	made("x/1>crm", "x/2>crm", "x/2>reversals", "y/1>crm", "y/1>y", "z/1>new")
}

func TestOpen_RefusesBadDestinations(t *testing.T) {
	b := setup(t)
	for _, bad := range [][]store.Destination{
		{{Name: ""}}, {{Name: "Crm"}}, {{Name: "a b"}}, {{Name: strings.Repeat("a", 64)}}, {{Name: "a"}, {Name: "a"}},
		{{Name: "a", Kinds: []pb.EntryKind{0}}}, {{Name: "a", Kinds: []pb.EntryKind{9}}}, {{Name: "a", Template: strings.Repeat("t", 64)}},
	} {
		s, err := store.Open(t.Context(), store.Config{DatabaseURL: b.url, Destinations: bad})
		if err == nil {
			s.Close()
			t.Errorf("%+v is accepted", bad)
		}
	}
}

// One refund takes back three types: a consumer that deduplicates must get three events, not one.
func TestDeliveries_OneRefundThreeKeys(t *testing.T) {
	b := setup(t, to(crm, ledger))
	for _, typ := range []string{"x", "y", "z"} {
		want(t, b.Store, grant("t", "k"+typ, "i", typ), newly)
	}
	for _, d := range []string{"crm", "ledger"} {
		settle(t, b.Store, store.Delivered, claim(t, b.Store, d)...)
	}
	want(t, b.Store, record("t", "refund", "i", refunded, 2), newly)
	keys := map[string]bool{}
	for _, name := range []string{"crm", "ledger"} {
		all := claim(t, b.Store, name)
		for _, d := range all {
			keys[d.Key] = true
			if d.Event.Operation.IdempotencyKey != "refund" || d.Event.Entry.Kind != pb.EntryKind_ENTRY_KIND_REVERSED {
				t.Errorf("the event is %+v", d.Event)
			}
		}
		settle(t, b.Store, store.Delivered, all...)
	}
	if len(keys) != 6 {
		t.Errorf("%d keys, want six", len(keys))
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries WHERE state = 4`); n != 12 {
		t.Errorf("%d were delivered, want 12", n)
	}
}

func TestBacklog_CountsByState(t *testing.T) {
	b := setup(t, to(crm, ledger))
	for n := range 6 {
		want(t, b.Store, grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"), newly)
	}
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() + interval '1 hour'`)
	got := func(want store.Backlog) time.Duration {
		t.Helper()
		now, err := b.Backlog(t.Context(), "crm")
		if err != nil {
			t.Fatal(err)
		}
		due := now.OldestDue
		if now.OldestDue = 0; now != want {
			t.Errorf("the backlog is %+v, want %+v", now, want)
		}
		return due
	}
	if due := got(store.Backlog{Pending: 6}); due != 0 {
		t.Errorf("due for %v", due)
	}
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() - interval '1 hour'`)
	if due := got(store.Backlog{Pending: 6}); due < time.Hour || due > 2*time.Hour {
		t.Errorf("due for %v", due)
	}
	all := claim(t, b.Store, "crm")
	got(store.Backlog{Sending: 6})
	settle(t, b.Store, store.Dead, all[:3]...)
	settle(t, b.Store, store.Unknown, all[3:5]...)
	settle(t, b.Store, store.Delivered, all[5:]...)
	got(store.Backlog{Unknown: 2, Dead: 3})
}

func TestDeliveriesMade_WakesWhoDelivers(t *testing.T) {
	b := setup(t, to(crm))
	woken := func(wanted bool) {
		t.Helper()
		select {
		case <-b.DeliveriesMade():
			if !wanted {
				t.Error("woken for nothing")
			}
		default:
			if wanted {
				t.Error("not woken")
			}
		}
	}
	woken(false)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	woken(true)
	want(t, b.Store, grant("t", "k", "i", "x"), already)
	woken(false)
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	woken(true)
	d := claimOne(t, b.Store, "crm")
	claim(t, b.Store, "crm")
	settle(t, b.Store, store.Delivered, d)
	woken(true) // the reversal is free
	d = claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, d)
	woken(false)
	if _, err := b.Redeliver(t.Context(), order(d)); err != nil {
		t.Fatal(err)
	}
	woken(true)
}

// Everybody at once: writers, workers that fail in every way, leases that run out, operators. Nothing deadlocks, order holds, and in
// the end everything is delivered.
func TestDeliveries_EverybodyAtOnce(t *testing.T) {
	b := setup(t, to(crm, ledger))
	stores := []*store.Store{b.Store, open(t, b.url, to(crm, ledger))}
	const invoices = 12
	ctx, stop := context.WithCancel(t.Context())
	var wg, writers sync.WaitGroup
	for w := range 3 {
		writers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 1))
			for n := range 60 {
				key, invoice := fmt.Sprint("k", w, "-", n), fmt.Sprint("i", random.IntN(invoices))
				c := grant("t", key, invoice, "x")
				switch random.IntN(3) {
				case 0:
					c = reverse("t", key, invoice, "x")
				case 1:
					c = reinstate("t", key, invoice, "x")
				}
				if _, err := stores[w%2].Apply(ctx, c); err != nil {
					t.Errorf("%v: %v", c.Kind, err)
				}
			}
		})
	}
	operate := func(s *store.Store, d *store.Delivery, outcome store.DeliveryOutcome, random *rand.Rand) error {
		var err error
		switch o := order(d); {
		case outcome == store.Dead && random.IntN(4) == 0:
			_, err = s.Discard(ctx, o)
		case outcome == store.Dead:
			_, err = s.Redeliver(ctx, o)
		case outcome == store.Unknown && random.IntN(2) == 0:
			_, err = s.Resolve(ctx, o, pb.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED)
		case outcome == store.Unknown:
			_, err = s.Resolve(ctx, o, pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN)
		}
		return err
	}
	for w := range 6 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 2))
			s, destination := stores[w%2], []string{"crm", "ledger"}[w/2%2]
			for ctx.Err() == nil {
				lease := leaseTime
				if random.IntN(4) == 0 {
					lease = 0
				}
				got, err := s.Claim(ctx, destination, fmt.Sprint(w), lease, 5, body)
				var results []store.DeliveryResult
				for _, d := range got {
					outcome := store.DeliveryOutcome(1 + random.IntN(4))
					results = append(results, store.DeliveryResult{Delivery: d, Outcome: outcome})
				}
				if err == nil {
					_, err = s.Settle(ctx, results)
				}
				for i := range results {
					if err == nil {
						err = operate(s, results[i].Delivery, results[i].Outcome, random)
					}
				}
				if err != nil && ctx.Err() == nil {
					t.Errorf("worker %d: %v", w, err)
				}
			}
		})
	}
	writers.Wait()
	// What a lease of nothing left in doubt is an operator's.
	for deadline := time.Now().Add(30 * time.Second); ; {
		all, _, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t", State: unknown}, store.Page{Size: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			if _, err := b.Resolve(t.Context(), order(d), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil {
				t.Error(err)
			}
		}
		if value[bool](t, b.sql, `SELECT NOT EXISTS (SELECT FROM all_deliveries WHERE settled_at IS NULL)`) {
			break
		}
		if time.Now().After(deadline) {
			t.Error("not everything is settled in 30 s")
			break
		}
	}
	stop()
	wg.Wait()
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries a JOIN all_deliveries b USING (tenant_id, entitlement_id, destination)
		WHERE a.entry_number < b.entry_number AND a.settled_at > b.settled_at`); n != 0 {
		t.Errorf("%d were overtaken", n)
	}
	if entries, made := value[int](t, b.sql, `SELECT count(*) FROM entries`), value[int](t, b.sql, `SELECT count(*) FROM all_deliveries`); made != 2*entries {
		t.Errorf("%d deliveries of %d entries to two destinations", made, entries)
	}
}
