package outbox_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
)

// inbox is a receiver that deduplicates: it takes each key once, and remembers the order.
type inbox struct {
	*receiver
	t *testing.T
	// before may answer for the inbox, and says so then; count is how often the key came, from 1.
	before func(w http.ResponseWriter, r *http.Request, e *event.Event, count int) bool

	mu    sync.Mutex
	seen  map[string]int
	taken []string
	// versions are those of each entitlement, in the order in which they were taken.
	versions map[string][]string
}

func newInbox(t *testing.T, before func(w http.ResponseWriter, r *http.Request, e *event.Event, count int) bool) *inbox {
	t.Helper()
	in := &inbox{t: t, before: before, seen: map[string]int{}, versions: map[string][]string{}}
	in.receiver = newReceiver(t, in.ServeHTTP)
	return in
}

func (in *inbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var e event.Event
	if err == nil {
		err = json.Unmarshal(body, &e)
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	key := r.Header.Get("Idempotency-Key")
	in.mu.Lock()
	in.seen[key]++
	count := in.seen[key]
	in.mu.Unlock()
	if in.before != nil && in.before(w, r, &e, count) {
		return
	}
	in.take(key, &e)
}

// take has the effect, once.
func (in *inbox) take(key string, e *event.Event) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if slices.Contains(in.taken, key) {
		return
	}
	in.taken = append(in.taken, key)
	entitlement, _, _ := strings.Cut(e.ID(), "/")
	in.versions[entitlement] = append(in.versions[entitlement], fmt.Sprint(e.Extensions()["sequence"]))
}

func (in *inbox) count() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.taken)
}

// wantOrder checks that every entitlement's versions came from 1, without gaps.
func (in *inbox) wantOrder() {
	in.t.Helper()
	in.mu.Lock()
	defer in.mu.Unlock()
	for entitlement, versions := range in.versions {
		for i, v := range versions {
			if v != fmt.Sprintf("%019d", i+1) {
				in.t.Errorf("entitlement %s: versions %v", entitlement, versions)
				break
			}
		}
	}
}

func (b *bundle) entries() (n int) {
	b.t.Helper()
	if err := b.sql.QueryRow(b.t.Context(), `SELECT count(*) FROM entries`).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// A receiver fails in every way it can, two replicas send, and each event has its effect once: as many keys as entries, and none missing.
func TestOutbox_EffectHappensOnce(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	var in *inbox
	var turn sync.Mutex
	mode := 0
	in = newInbox(t, func(w http.ResponseWriter, r *http.Request, e *event.Event, count int) bool {
		if count > 2 {
			return false
		}
		turn.Lock()
		mode = (mode + 1) % 12
		now := mode
		turn.Unlock()
		switch now {
		case 0, 1, 2:
			return false
		case 3, 4, 5, 6:
			w.WriteHeader([...]int{408, 425, 500, 502}[now-3])
		case 7:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(429)
		case 8: // it has the event, and nobody hears of it
			in.take(r.Header.Get("Idempotency-Key"), e)
			hijack("")(w, r)
		case 9:
			hijack("HTTP/1.1 2")(w, r)
		case 10: // it has the event, and answers too late
			in.take(r.Header.Get("Idempotency-Key"), e)
			select {
			case <-r.Context().Done():
			case <-hang:
			}
		case 11:
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		}
		return true
	})
	b := setup(t, "destinations:"+hook("busy", in.URL, in.ca, strings.Replace(fast, "deadline: 2s", "deadline: 300ms", 1), ""))
	b.start()
	b.start(b.another)
	var commands []store.Command
	for i := range 60 {
		commands = append(commands, grant("acme", fmt.Sprint("INV-", i), "team_access"), grant("acme", fmt.Sprint("INV-", i), "storage"))
	}
	b.applyAll(commands)
	commands = nil
	for i := range 20 {
		commands = append(commands, refund("acme", fmt.Sprint("INV-", i)))
	}
	b.applyAll(commands)
	b.awaitState("busy", delivered, 160)
	if in.count() != b.entries() || len(in.seen) != b.entries() {
		t.Errorf("%d effects and %d keys for %d entries", in.count(), len(in.seen), b.entries())
	}
	in.wantOrder()
}

// Case 13a: one refund reverses three types; each is an event of its own, with a key of its own.
func TestOutbox_OneRefundThreeEvents(t *testing.T) {
	in := newInbox(t, nil)
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, fast+"\n  filter: {events: [REVERSED]}", ""))
	b.start()
	for _, name := range []string{"a", "b", "c"} {
		b.grant("acme", "INV-1", name)
	}
	b.refund("acme", "INV-1")
	b.awaitState("crm", delivered, 3)
	keys := map[string]bool{}
	for _, d := range b.list("acme", "crm") {
		keys[d.Key] = true
		if d.Event.Entry.OperationKey != "refund:INV-1" {
			t.Errorf("the operation %s", d.Event.Entry.OperationKey)
		}
	}
	if len(keys) != 3 || in.count() != 3 {
		t.Errorf("%d keys, %d taken", len(keys), in.count())
	}
}

// Case 14: a call outlasts its lease, and the next worker sends again. What the first one gets to hear in the end must not overwrite the
// newer result. Neither worker's clock matters.
func TestOutbox_LeaseRunsOut(t *testing.T) {
	healthy := newInbox(t, nil)
	release, held := make(chan struct{}), make(chan string, 1)
	slow := newInbox(t, func(w http.ResponseWriter, r *http.Request, e *event.Event, count int) bool {
		if e.Extensions()["tenantid"] != "acme" || count > 1 {
			return false
		}
		held <- r.Header.Get("Idempotency-Key")
		<-release
		w.WriteHeader(http.StatusBadRequest)
		return true
	})
	b := setup(t, "destinations:"+
		hook("slow", slow.URL, slow.ca, "deduplicates: true\n  deadline: 90s\n  timeout: 90s", "")+hook("healthy", healthy.URL, healthy.ca, fast, ""))
	first := b.start(func(c *outbox.Config) {
		c.Worker = "first"
		c.Now = func() time.Time { return time.Now().Add(5 * time.Minute) }
	})
	b.grant("acme", "INV-0", "team_access")
	key := <-held
	var commands []store.Command
	for i := range 49 {
		commands = append(commands, grant(fmt.Sprint("tenant-", i), fmt.Sprint("INV-", i), "team_access"))
	}
	second := b.start(b.another, func(c *outbox.Config) { c.Worker = "second" })
	b.applyAll(commands)
	b.awaitState("healthy", delivered, 50)
	if healthy.count() != 50 || len(healthy.seen) != 50 {
		t.Errorf("%d taken, %d keys", healthy.count(), len(healthy.seen))
	}
	for k, n := range healthy.seen {
		if n != 1 {
			t.Errorf("%s came %d times", k, n)
		}
	}
	// The lease of the first one is over.
	b.exec(`UPDATE deliveries SET leased_until = clock_timestamp() WHERE destination = 'slow' AND tenant_id = 'acme'`)
	b.await("it was delivered by another call", `SELECT state = 4 AND attempts = 2 FROM all_deliveries WHERE destination = 'slow' AND tenant_id = 'acme'`)
	close(release)
	second.stop()
	first.stop()
	d := b.list("acme", "slow")[0]
	if d.Key != key || d.State != delivered || d.Attempts != 2 || d.LastError != "" {
		t.Errorf("%+v", d)
	}
}

// Case 15: a destination is away while a thousand events come to wait, and then comes back. All arrive, in few calls made meanwhile, and
// nothing of the poison budget is used up.
func TestOutbox_OutageUsesUpNothing(t *testing.T) {
	in := newInbox(t, nil)
	addr := in.Listener.Addr().String()
	in.Close()
	b := setup(t, "destinations:"+hook("away", in.URL, in.ca, `deduplicates: true
  retry: {limit: 3, min_delay: 20ms, max_delay: 1s}`, ""))
	r := b.start()
	var commands []store.Command
	for i := range 1000 {
		commands = append(commands, grant("acme", fmt.Sprint("INV-", i), "team_access"))
	}
	b.applyAll(commands)
	// Many more probes than the limit allows failures.
	b.await("it was probed", `SELECT count(*) > 20 FROM all_delivery_attempts`)
	if state := r.BreakerState("away"); !strings.Contains(state.String(), "OPEN") {
		t.Errorf("the breaker is %v", state)
	}
	b.awaitState("away", pending, 1000-b.sendingNow("away"))
	back := &httptest.Server{Listener: listenOn(t, addr), TLS: in.TLS.Clone(), Config: &http.Server{Handler: in}}
	back.StartTLS()
	t.Cleanup(back.Close)
	b.awaitState("away", delivered, 1000)
	if !b.is(`SELECT sum(poison) = 0 FROM all_deliveries`) || in.count() != 1000 {
		t.Errorf("%d taken\n%s", in.count(), b.states())
	}
}

func (b *bundle) sendingNow(destination string) (n int) {
	b.t.Helper()
	if err := b.sql.QueryRow(b.t.Context(), `SELECT count(*) FROM deliveries WHERE destination = $1 AND state = 2`, destination).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// Case 15: an event that its receiver always fails at ends DEAD, and what follows it for the same entitlement waits; everybody else flows.
func TestOutbox_PoisonHoldsItsSuccessors(t *testing.T) {
	for name, status := range map[string]int{"errors": 500, "refusal": 422} {
		t.Run(name, func(t *testing.T) {
			in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, e *event.Event, _ int) bool {
				if e.Extensions()["tenantid"] != "poison" || e.Type() != "entitlement.granted" {
					return false
				}
				http.Error(w, "I cannot\x1b[31m do this", status)
				return true
			})
			b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, fast, ""))
			b.start()
			b.grant("poison", "INV-1", "team_access")
			b.refund("poison", "INV-1")
			others := 0
			for !b.is(`SELECT state = 5 FROM deliveries WHERE tenant_id = 'poison' AND entry_number = 1`) {
				if others == 500 {
					t.Fatalf("it does not die\n%s", b.states())
				}
				b.grant("other", fmt.Sprint("INV-", others), "team_access")
				others++
				b.await("the others flow", `SELECT count(*) = $1 FROM all_deliveries WHERE tenant_id = 'other' AND state = 4`, others)
			}
			b.grant("other", "INV-last", "team_access")
			b.await("the others flow", `SELECT count(*) = $1 FROM all_deliveries WHERE tenant_id = 'other' AND state = 4`, others+1)
			all := b.list("poison", "crm")
			if len(all) != 2 || in.count() != others+1 {
				t.Fatalf("%d deliveries, %d taken of %d", len(all), in.count(), others+1)
			}
			for _, d := range all {
				switch d.Event.Entry.Number {
				case 1:
					if d.State != dead || !strings.Contains(d.LastError, "I cannot\uFFFD[31m do this") {
						t.Errorf("the grant: %v, %q", d.State, d.LastError)
					}
					// All that it died of counts, and a refusal does not.
					if want := map[string]int64{"errors": 5}[name]; d.Poison != want {
						t.Errorf("%d failures count against the grant, want %d", d.Poison, want)
					}
				case 2:
					if d.State != pending || d.Attempts != 0 || d.HeldBy != 1 {
						t.Errorf("the reversal: %v after %d attempts, held by %d", d.State, d.Attempts, d.HeldBy)
					}
				}
			}
		})
	}
}

// Nobody waits for a destination that hangs but its own deliveries.
func TestOutbox_SlowDestinationDelaysNobody(t *testing.T) {
	healthy := newInbox(t, nil)
	release := make(chan struct{})
	hung := newReceiver(t, func(http.ResponseWriter, *http.Request) { <-release })
	b := setup(t, "destinations:"+
		hook("hung", hung.URL, hung.ca, "deadline: 90s\n  timeout: 90s\n  concurrency: 2", "")+hook("healthy", healthy.URL, healthy.ca, fast, ""))
	b.start()
	for i := range 20 {
		b.grant("acme", fmt.Sprint("INV-", i), "team_access")
	}
	b.awaitState("healthy", delivered, 20)
	b.awaitState("hung", sending, 2)
	close(release)
	b.awaitState("hung", delivered, 20)
}

// A receiver that does not deduplicate may have had the event: it is asked, and only what did not arrive is sent again.
func TestOutbox_UnknownIsLookedUp(t *testing.T) {
	var in *inbox
	asked := map[string]bool{}
	in = newInbox(t, func(w http.ResponseWriter, r *http.Request, e *event.Event, count int) bool {
		if count > 1 {
			return false
		}
		if e.Subject() == "arrives" {
			in.take(r.Header.Get("Idempotency-Key"), e)
		}
		hijack("")(w, r)
		return true
	})
	// httptest has one certificate for all.
	lookups := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		key := strings.TrimPrefix(r.URL.Path, "/")
		in.mu.Lock()
		defer in.mu.Unlock()
		asked[key] = true
		if !slices.Contains(in.taken, key) {
			w.WriteHeader(http.StatusNotFound)
		}
	})
	b := setup(t, "destinations:"+hook("asked", in.URL, in.ca, "deduplicates: false", "lookup_url: "+lookups.URL+"/{key}")+
		hook("silent", in.URL, in.ca, "deduplicates: false", ""))
	b.start()
	b.grant("acme", "INV-1", "arrives")
	b.grant("acme", "INV-1", "is_lost")
	b.awaitState("asked", delivered, 2)
	b.awaitState("silent", unknown, 2)
	for _, d := range b.list("acme", "asked") {
		want := int64(1)
		if d.Event.Entitlement.Grant.EntitlementType == "is_lost" {
			want = 2
		}
		if d.Attempts != want || !asked[d.Key] || in.seen[d.Key] != int(want) {
			t.Errorf("%s: %d attempts, %d arrivals, asked %t", d.Event.Entitlement.Grant.EntitlementType, d.Attempts, in.seen[d.Key], asked[d.Key])
		}
	}
}

// Told to stop, an outbox takes up nothing more, and records what was under way.
func TestOutbox_StopFinishesCalls(t *testing.T) {
	release, held := make(chan struct{}), make(chan struct{}, 1)
	in := newInbox(t, func(http.ResponseWriter, *http.Request, *event.Event, int) bool {
		held <- struct{}{}
		<-release
		return false
	})
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, "concurrency: 1", ""))
	r := b.start(func(c *outbox.Config) { c.Grace = time.Minute })
	b.grant("acme", "INV-1", "team_access")
	<-held
	b.grant("acme", "INV-2", "team_access")
	stopped := make(chan struct{})
	go func() { r.stop(); close(stopped) }()
	select {
	case <-stopped:
		t.Fatal("it did not wait for the call")
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	<-stopped
	b.awaitState("crm", delivered, 1)
	b.awaitState("crm", pending, 1)
}

// A call that outlasts the grace is cut off; its lease runs out, and the next worker sends again with the same key.
func TestOutbox_StopCutsOffCalls(t *testing.T) {
	held := make(chan struct{}, 1)
	in := newInbox(t, func(_ http.ResponseWriter, r *http.Request, _ *event.Event, count int) bool {
		if count > 1 {
			return false
		}
		held <- struct{}{}
		<-r.Context().Done()
		return true
	})
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, "deduplicates: true\n  deadline: 5m\n  timeout: 5m", ""))
	r := b.start(func(c *outbox.Config) { c.Grace = time.Millisecond })
	b.grant("acme", "INV-1", "team_access")
	<-held
	r.stop()
	b.awaitState("crm", sending, 1)
	b.exec(`UPDATE deliveries SET leased_until = clock_timestamp() WHERE state = 2`)
	b.start()
	b.awaitState("crm", delivered, 1)
	if in.count() != 1 || len(in.seen) != 1 {
		t.Errorf("%d taken, keys %v", in.count(), in.seen)
	}
}
