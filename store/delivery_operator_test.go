package store_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

const (
	arrived   = pb.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED
	sendAgain = pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN
)

// wantOrder checks what an order came to, and fails the test at an error.
func wantOrder(t testing.TB, outcome pb.Outcome, reason pb.RejectionReason) func(store.OrderAnswer, error) store.OrderAnswer {
	return func(a store.OrderAnswer, err error) store.OrderAnswer {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		got := pb.RejectionReason_REJECTION_REASON_UNSPECIFIED
		if a.Rejection != nil {
			got = a.Rejection.Reason
		}
		if a.Outcome != outcome || got != reason {
			t.Fatalf("got %v, %v; want %v, %v", a.Outcome, got, outcome, reason)
		}
		return a
	}
}

const (
	isDelivered = pb.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED
	isDiscarded = pb.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED
	isRemoved   = pb.RejectionReason_REJECTION_REASON_DELIVERY_REMOVED
	isElsewhere = pb.RejectionReason_REJECTION_REASON_DELIVERY_STATE
)

func TestRedeliver_RepeatsChangeNothing(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	if _, err := b.Settle(t.Context(), []store.DeliveryResult{{Delivery: d, Outcome: store.RetryAt, CountsAsPoison: true}}); err != nil {
		t.Fatal(err)
	}
	d = claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, d)
	o := order(d)
	o.ObservedAttempts, o.Caller = 2, "spiffe://ops"
	a := wantOrder(t, newly, 0)(b.Redeliver(t.Context(), o))
	if a.Delivery.State != pending || a.Delivery.Poison != 0 || a.Delivery.Attempts != 2 {
		t.Errorf("it is now %+v", a.Delivery)
	}
	wantOrder(t, already, 0)(b.Redeliver(t.Context(), o))
	wantOrder(t, already, 0)(b.Redeliver(t.Context(), order(d)))
	again := claimOne(t, b.Store, "crm")
	wantOrder(t, already, 0)(b.Redeliver(t.Context(), o))
	// It dies again, and only then does a copy of the first request arrive.
	settle(t, b.Store, store.Dead, again)
	wantOrder(t, already, 0)(b.Redeliver(t.Context(), o))
	wantState(t, b.Store, d, dead)
	stale := o
	stale.ObservedAttempts = 1
	wantOrder(t, rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_MOVED_ON)(b.Redeliver(t.Context(), stale))

	o.ObservedAttempts = 3
	wantOrder(t, newly, 0)(b.Redeliver(t.Context(), o))
	settle(t, b.Store, store.Delivered, claimOne(t, b.Store, "crm"))
	wantOrder(t, rejected, isDelivered)(b.Redeliver(t.Context(), order(d)))
	wantOrder(t, rejected, isDelivered)(b.Discard(t.Context(), order(d)))
	actions := storyOf(t, b.Store, d).Actions
	if len(actions) != 2 {
		t.Fatalf("the actions are %+v", actions)
	}
	for i, act := range actions {
		if act.Kind != pb.OperatorActionKind_OPERATOR_ACTION_KIND_REDELIVER || act.Attempts != int64(i+2) || act.From != dead || act.To != pending ||
			act.Actor != "ops@example.com" || act.Reason != "asked for" || act.Caller != "spiffe://ops" || act.At.IsZero() {
			t.Errorf("action %d is %+v", i, act)
		}
	}
}

func TestRedeliver_AtTheSameInstantActsOnce(t *testing.T) {
	b := setup(t, to(crm))
	other := open(t, b.url, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, d)
	var mu sync.Mutex
	outcomes := map[pb.Outcome]int{}
	var wg sync.WaitGroup
	for n := range 16 {
		wg.Go(func() {
			s := []*store.Store{b.Store, other}[n%2]
			a, err := s.Redeliver(t.Context(), order(d))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			outcomes[a.Outcome]++
		})
	}
	wg.Wait()
	if outcomes[newly] != 1 || outcomes[already] != 15 {
		t.Errorf("outcomes %v", outcomes)
	}
}

func TestDiscard_IsFinal(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	wantOrder(t, rejected, isElsewhere)(b.Discard(t.Context(), order(d)))
	settle(t, b.Store, store.Dead, d)
	a := wantOrder(t, newly, 0)(b.Discard(t.Context(), order(d)))
	if a.Delivery.State != discarded || a.Delivery.SettledAt == nil {
		t.Errorf("it is now %+v", a.Delivery)
	}
	wantOrder(t, already, 0)(b.Discard(t.Context(), order(d)))
	wantOrder(t, rejected, isDiscarded)(b.Redeliver(t.Context(), order(d)))
	if left := claim(t, b.Store, "crm"); len(left) != 0 {
		t.Error("sent after it was discarded")
	}
}

// Nobody delivers to a destination that was removed from the configuration: what its last worker left behind is an operator's.
func TestDiscard_OfARemovedDestination(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	without := open(t, b.url)
	all, _, err := without.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t", Destination: "crm"}, store.Page{})
	if err != nil || len(all) != 1 || all[0].Key != d.Key {
		t.Fatal(all, err)
	}
	leaseOut(t, b)
	wantOrder(t, newly, 0)(without.Discard(t.Context(), order(d)))
	if lost := settle(t, b.Store, store.Delivered, d); len(lost) != 1 {
		t.Error("a result overwrites what an operator did")
	}
	wantState(t, b.Store, d, discarded)
}

func TestResolve_SettlesTheUnknown(t *testing.T) {
	b := setup(t, to(ledger))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "ledger")
	wantOrder(t, rejected, isElsewhere)(b.Resolve(t.Context(), order(d), arrived))
	settle(t, b.Store, store.Unknown, d)
	if a := wantOrder(t, rejected, isElsewhere)(b.Redeliver(t.Context(), order(d))); a.Rejection.Message != "it is UNKNOWN: resolve or discard it" {
		t.Errorf("the operator is told %q", a.Rejection.Message)
	}
	o := order(d)
	o.ObservedAttempts = 1
	wantOrder(t, newly, 0)(b.Resolve(t.Context(), o, sendAgain))
	wantOrder(t, already, 0)(b.Resolve(t.Context(), o, sendAgain))
	again := claimOne(t, b.Store, "ledger")
	settle(t, b.Store, store.Unknown, again)
	// A late copy of the request must not send it a third time: there may be two mails already.
	wantOrder(t, already, 0)(b.Resolve(t.Context(), o, sendAgain))
	wantState(t, b.Store, d, unknown)
	wantOrder(t, newly, 0)(b.Resolve(t.Context(), order(d), arrived))
	wantOrder(t, already, 0)(b.Resolve(t.Context(), order(d), arrived))
	wantOrder(t, rejected, isDelivered)(b.Resolve(t.Context(), order(d), sendAgain))
	if now := wantState(t, b.Store, d, delivered); now.SettledAt == nil {
		t.Error("it has no time of settling")
	}
	if actions := storyOf(t, b.Store, d).Actions; len(actions) != 2 {
		t.Errorf("the actions are %+v", actions)
	}
}

func TestOrders_NameTheDelivery(t *testing.T) {
	b := setup(t, to(crm))
	e := want(t, b.Store, grant("t", "k", "i", "x"), newly).Entitlement
	d := claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, d)
	for what, o := range map[string]store.DeliveryOrder{
		"another tenant":          {TenantID: "u", Delivery: store.DeliveryName{ID: d.ID}},
		"another id":              {TenantID: "t", Delivery: store.DeliveryName{ID: uuid.New()}},
		"another entitlement":     {TenantID: "t", Delivery: store.DeliveryName{EntitlementID: uuid.New(), EntryNumber: 1, Destination: "crm"}},
		"another entry":           {TenantID: "t", Delivery: store.DeliveryName{EntitlementID: e.ID, EntryNumber: 2, Destination: "crm"}},
		"another tenant, by name": {TenantID: "u", Delivery: store.DeliveryName{EntitlementID: e.ID, EntryNumber: 1, Destination: "crm"}},
	} {
		if a, err := b.Redeliver(t.Context(), o); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s: %v, %v", what, a.Outcome, err)
		}
	}
	name := store.DeliveryName{EntitlementID: e.ID, EntryNumber: 1, Destination: "nowhere"}
	wantOrder(t, rejected, isRemoved)(b.Redeliver(t.Context(), store.DeliveryOrder{TenantID: "t", Delivery: name}))
	name.Destination = "crm"
	wantOrder(t, newly, 0)(b.Redeliver(t.Context(), store.DeliveryOrder{TenantID: "t", Delivery: name, Actor: "me", Reason: "because"}))
}

func TestDeliveries_ListsByFilterAndPage(t *testing.T) {
	b := setup(t, to(crm, ledger))
	for n := range 7 {
		want(t, b.Store, grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"), newly)
	}
	want(t, b.Store, grant("u", "k", "i", "x"), newly)
	all := claim(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, all[:5]...)
	settle(t, b.Store, store.Delivered, all[5:]...)
	for _, c := range []struct {
		filter store.DeliveryFilter
		n      int
	}{
		{store.DeliveryFilter{TenantID: "t"}, 14},
		{store.DeliveryFilter{TenantID: "t", Destination: "crm"}, 7},
		{store.DeliveryFilter{TenantID: "t", Destination: "crm", State: dead}, 5},
		{store.DeliveryFilter{TenantID: "t", Destination: "ledger", State: dead}, 0},
		{store.DeliveryFilter{TenantID: "t", State: delivered}, 2},
		{store.DeliveryFilter{TenantID: "t", State: pending}, 7},
		{store.DeliveryFilter{TenantID: "u"}, 2},
		{store.DeliveryFilter{TenantID: "v"}, 0},
	} {
		var got []*store.Delivery
		for token, first := "", true; first || token != ""; first = false {
			page, next, err := b.Deliveries(t.Context(), c.filter, store.Page{Size: 3, Token: token})
			if err != nil {
				t.Fatal(err)
			}
			if len(page) > 3 || next != "" && len(page) == 0 {
				t.Errorf("%+v: a page of %d", c.filter, len(page))
			}
			got, token = append(got, page...), next
		}
		seen := map[uuid.UUID]bool{}
		for _, d := range got {
			seen[d.ID] = true
			if d.TenantID != c.filter.TenantID {
				t.Errorf("%+v: a delivery of %s", c.filter, d.TenantID)
			}
		}
		if len(got) != c.n || len(seen) != c.n {
			t.Errorf("%+v: %d deliveries, %d of them distinct; want %d", c.filter, len(got), len(seen), c.n)
		}
	}
	_, token, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "t"}, store.Page{Size: 3})
	if err != nil || token == "" {
		t.Fatal(token, err)
	}
	if _, _, err := b.Deliveries(t.Context(), store.DeliveryFilter{TenantID: "u"}, store.Page{Size: 3, Token: token}); !errors.Is(err, store.ErrPageToken) {
		t.Errorf("another tenant's token: %v", err)
	}
}

func TestLookup_FullShowsDeliveriesAndWhoWasTold(t *testing.T) {
	b := setup(t, to(crm, store.Destination{Name: "mail", Template: "welcome"}))
	c := grant("t", "k", "i", "x")
	c.Notify = &store.Notify{Recipient: "a@example.com", Locale: "de-CH"}
	want(t, b.Store, c, newly)
	want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
	settle(t, b.Store, store.Delivered, claim(t, b.Store, "mail")...)
	want(t, b.Store, record("t", "refund", "i", refunded, 2), newly)

	found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "k", Full: true})
	var got []string
	for _, s := range found.Deliveries {
		got = append(got, fmt.Sprintf("%d>%s %v %d", s.Delivery.Event.Entry.Number, s.Delivery.Destination, s.Delivery.State, len(s.Attempts)))
	}
	if want := []string{"1>crm DELIVERY_STATE_PENDING 0", "1>mail DELIVERY_STATE_DELIVERED 1", "2>crm DELIVERY_STATE_PENDING 0"}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("deliveries %v, want %v", got, want)
	}
	if n := found.Notifications; len(n) != 1 || n[0].Notify != *c.Notify || n[0].Template != "welcome" || n[0].Destination != "mail" ||
		n[0].EntryNumber != 1 || n[0].RequestedAt.IsZero() || n[0].SentAt == nil {
		t.Errorf("notifications %+v", n)
	}
	if found = find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "refund", Full: true}); len(found.Deliveries) != 1 || len(found.Notifications) != 0 {
		t.Errorf("of the refund: %d deliveries, %d notifications", len(found.Deliveries), len(found.Notifications))
	}
}

// Retention removes settled deliveries. Nothing that asks for one afterwards has it sent again.
func TestMaintain_PurgedDeliveriesAreNotMadeAnew(t *testing.T) {
	mail := store.Destination{Name: "mail", Template: "welcome"}
	b := setup(t, to(crm, mail, ledger))
	c := grant("t", "k", "i", "x")
	c.Notify = &store.Notify{Recipient: "a@example.com", Locale: "en"}
	e := want(t, b.Store, c, newly).Entitlement
	d := claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Delivered, append(claim(t, b.Store, "mail"), d)...)
	gone := claimOne(t, b.Store, "ledger")
	settle(t, b.Store, store.Dead, gone)
	wantOrder(t, newly, 0)(b.Discard(t.Context(), order(gone)))
	want(t, b.Store, reverse("t", "r", "i", "x"), newly)
	settle(t, b.Store, store.Dead, claimOne(t, b.Store, "ledger"))

	maintain(t, b.Store, time.Now().AddDate(0, 0, 29))
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries`); n != 5 {
		t.Fatalf("%d deliveries are left before the retention, want 5", n)
	}
	maintain(t, b.Store, time.Now().AddDate(0, 0, 31))
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries WHERE settled_at IS NULL`); n != 2 {
		t.Errorf("%d that are not settled are left, want 2", n)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries`); n != 2 {
		t.Errorf("%d deliveries are left, want 2", n)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_delivery_attempts`); n != 1 {
		t.Errorf("%d attempts are left, want one", n)
	}
	maintain(t, b.Store, time.Now())

	want(t, b.Store, c, already)
	fresh := *c
	fresh.IdempotencyKey = "fresh"
	want(t, b.Store, &fresh, already)
	name := store.DeliveryName{EntitlementID: e.ID, EntryNumber: 1}
	for _, name.Destination = range []string{"crm", "mail", "ledger"} {
		o := store.DeliveryOrder{TenantID: "t", Delivery: name, Actor: "me", Reason: "because"}
		wantOrder(t, rejected, isRemoved)(b.Redeliver(t.Context(), o))
		wantOrder(t, rejected, isRemoved)(b.Resolve(t.Context(), o, sendAgain))
	}
	if _, err := b.Redeliver(t.Context(), order(d)); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("by its id: %v", err)
	}
	if lost := settle(t, b.Store, store.Dead, d); len(lost) != 1 {
		t.Error("a late result has found its delivery")
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries WHERE entry_number = 1`); n != 0 {
		t.Errorf("%d deliveries were made anew", n)
	}
	// The facts stay.
	if n := value[int](t, b.sql, `SELECT count(*) FROM operator_actions`); n != 1 {
		t.Errorf("%d actions are left, want one", n)
	}
	if found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "k", Full: true}); len(found.Notifications) != 1 || found.Notifications[0].SentAt == nil {
		t.Errorf("notifications %+v", found.Notifications)
	}
}

func TestMaintain_PurgesDeliveriesInBatches(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	exec(t, b.sql, `
INSERT INTO settled_deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, created_at, settled_at)
SELECT 't', gen_random_uuid(), 1, 'crm', gen_random_uuid(), 4, now(), now() - interval '31 days' FROM generate_series(1, 2500)`)
	maintain(t, b.Store, time.Now())
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries`); n != 1 {
		t.Errorf("%d are left, want one", n)
	}
}
