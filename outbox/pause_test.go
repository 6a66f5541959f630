package outbox_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/grantd/grantd/store"
)

// A receiver answers 410: nothing more goes there, from no replica, also after a restart, until an operator says so.
func TestOutbox_GonePausesEveryReplica(t *testing.T) {
	var back atomic.Bool
	in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, _ *event.Event, _ int) bool {
		if !back.Load() {
			w.WriteHeader(http.StatusGone)
			return true
		}
		return false
	})
	b := setup(t, "destinations:"+hook("old", in.URL, in.ca, "concurrency: 1", ""))
	first := b.start()
	other := b.start(b.another)
	b.grant("acme", "INV-0", "team_access")
	isPaused := func(r *replica) bool { return strings.HasSuffix(r.BreakerState("old").String(), "PAUSED") }
	b.awaitState("old", dead, 1)
	for deadline := time.Now().Add(patience); !isPaused(first) || !isPaused(other); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("one says %v, the other %v", first.BreakerState("old"), other.BreakerState("old"))
		}
	}
	b.grant("acme", "INV-1", "team_access")
	first.stop()
	other.stop()
	again := b.start(b.another)
	b.grant("acme", "INV-2", "team_access")
	for deadline := time.Now().Add(patience); !isPaused(again); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after a restart it is %v", again.BreakerState("old"))
		}
	}
	b.awaitState("old", pending, 2)
	in.mu.Lock()
	if len(in.seen) != 1 {
		t.Errorf("%d keys came", len(in.seen))
	}
	in.mu.Unlock()

	back.Store(true)
	if outcome, _, err := b.store.Resume(t.Context(), store.ResumeOrder{Destination: "old", Actor: "ana", Reason: "it is back"}); err != nil {
		t.Fatal(outcome, err)
	}
	b.awaitState("old", delivered, 2)
	b.awaitState("old", dead, 1)
}

// Two calls are under way when the receiver is given up. The second one's 410 comes after an operator has resumed the destination: it is
// old news, and must not end what the operator began.
func TestOutbox_GoneBeforeTheResumptionPausesNoMore(t *testing.T) {
	arrived := make(chan string, 2)
	answer := map[string]chan struct{}{"first": make(chan struct{}), "second": make(chan struct{})}
	in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, e *event.Event, _ int) bool {
		tenant := e.Extensions()["tenantid"].(string)
		if answer[tenant] == nil {
			return false
		}
		arrived <- tenant
		<-answer[tenant]
		w.WriteHeader(http.StatusGone)
		return true
	})
	b := setup(t, "destinations:"+hook("old", in.URL, in.ca, "timeout: 5m\n  deadline: 5m", ""))
	r := b.start()
	state := func(paused bool) {
		t.Helper()
		waitFor(t, func() (string, bool) {
			s := r.BreakerState("old").String()
			return s, strings.HasSuffix(s, "PAUSED") == paused
		})
	}
	for tenant := range answer {
		b.grant(tenant, "INV-1", "team_access")
		<-arrived
	}
	close(answer["first"])
	b.awaitState("old", dead, 1)
	state(true)
	if _, _, err := b.store.Resume(t.Context(), store.ResumeOrder{Destination: "old", Actor: "ana", Reason: "it is back"}); err != nil {
		t.Fatal(err)
	}
	state(false)
	close(answer["second"])
	b.awaitState("old", dead, 2)
	b.grant("acme", "INV-2", "team_access")
	b.awaitState("old", delivered, 1)
	if !b.is(`SELECT count(*) = 1 FROM destination_pauses`) {
		t.Error("it was paused again")
	}
}

// A paused destination is not to be called, and so not asked either about what it may have had.
func TestOutbox_PausedIsNotAsked(t *testing.T) {
	var asked [2]atomic.Int64
	in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, _ *event.Event, _ int) bool {
		w.WriteHeader(http.StatusBadGateway)
		return true
	})
	lookup := func(i int) string {
		r := newReceiver(t, func(http.ResponseWriter, *http.Request) { asked[i].Add(1) })
		return "lookup_url: " + r.URL + "/{key}"
	}
	b := setup(t, "destinations:"+hook("old", in.URL, in.ca, "", lookup(0))+hook("crm", in.URL, in.ca, "", lookup(1)))
	b.grant("acme", "INV-0", "team_access")
	b.exec(`INSERT INTO destination_pauses (destination, pause_number, paused_at, tenant_id, delivery_id, attempt_number)
	        SELECT destination, 1, clock_timestamp(), tenant_id, delivery_id, 1 FROM deliveries WHERE destination = 'old'`)
	b.exec(`UPDATE deliveries SET state = 3, attempts = 1, due_at = clock_timestamp() WHERE destination = 'old'`)
	b.start()
	// Two rounds of look-ups, which the other destination has at the same times.
	b.awaitState("crm", delivered, 1)
	b.grant("acme", "INV-1", "team_access")
	b.awaitState("crm", delivered, 2)
	if n := asked[0].Load(); n != 0 {
		t.Errorf("it was asked %d times", n)
	}
	if _, _, err := b.store.Resume(t.Context(), store.ResumeOrder{Destination: "old", Actor: "ana", Reason: "it is back"}); err != nil {
		t.Fatal(err)
	}
	b.awaitState("old", delivered, 2)
}
