package outbox_test

import (
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
)

// gated is a receiver that was fast, and then answers nothing until its gate opens.
type gated struct {
	*bundle
	in      *inbox
	gate    chan struct{}
	failing atomic.Bool
}

const (
	gatedDeliveries = 1500
	gateAfter       = 400
)

// setupGated returns when much is claimed ahead, and no call ends.
func setupGated(t *testing.T) (*gated, *replica) {
	g := &gated{gate: make(chan struct{})}
	var arrived atomic.Int64
	g.in = newInbox(t, func(w http.ResponseWriter, _ *http.Request, _ *event.Event, _ int) bool {
		// So that the worker has taken the destination's pace before the gate shuts.
		time.Sleep(time.Millisecond)
		if arrived.Add(1) > gateAfter {
			<-g.gate
		}
		if g.failing.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return g.failing.Load()
	})
	g.bundle = setup(t, "destinations:"+hook("crm", g.in.URL, g.in.ca, `deduplicates: true
  concurrency: 2
  retry: {limit: 3, min_delay: 20ms, max_delay: 100ms}`, ""))
	var commands []store.Command
	for i := range gatedDeliveries {
		commands = append(commands, grant("acme", fmt.Sprint("INV-", i), "team_access"))
	}
	g.applyAll(commands)
	r := g.start(func(c *outbox.Config) { c.Grace = time.Minute })
	waitFor(t, func() (string, bool) { return "the gate is not reached", arrived.Load() > gateAfter })
	g.await("much is claimed ahead", `SELECT count(*) > 10 FROM deliveries WHERE state = 2`)
	return g, r
}

// wantAllOnce waits for every delivery, and checks that each had its effect once and none of its budget used up.
func (g *gated) wantAllOnce() {
	g.t.Helper()
	g.awaitState("crm", delivered, gatedDeliveries)
	if !g.is(`SELECT sum(poison) = 0 FROM all_deliveries`) || g.in.count() != gatedDeliveries {
		g.t.Errorf("%d taken\n%s", g.in.count(), g.states())
	}
}

const unsentSQL = `SELECT count(*) > 0 FROM all_delivery_attempts WHERE outcome = 2 AND error LIKE 'the call was not made%'`

// A fast destination breaks down while much is claimed ahead for it. None of that is thrown at it, nor held until its lease runs out.
func TestOutbox_GivesBackWhatIsClaimedAhead(t *testing.T) {
	g, _ := setupGated(t)
	g.failing.Store(true)
	close(g.gate)
	g.await("all but a probe is given back", `SELECT count(*) <= 1 FROM deliveries WHERE state = 2`)
	if !g.is(unsentSQL) {
		t.Errorf("nothing was given back\n%s", g.states())
	}
	g.failing.Store(false)
	g.wantAllOnce()
}

// The process is told to stop while much is claimed ahead. It ends the calls under way, and leaves the rest to the next one at once.
func TestOutbox_StopGivesBackWhatIsClaimedAhead(t *testing.T) {
	g, r := setupGated(t)
	stopped := make(chan struct{})
	go func() { r.stop(); close(stopped) }()
	g.await("the rest is given back", `SELECT count(*) <= 2 FROM deliveries WHERE state = 2`)
	if !g.is(unsentSQL) {
		t.Errorf("nothing was given back\n%s", g.states())
	}
	close(g.gate)
	<-stopped
	g.awaitState("crm", sending, 0)
	g.start()
	g.wantAllOnce()
}

// A destination is down, and the probe hangs when the process is told to stop. What waits for its call was given back by then, and there
// is nothing more to give back when the probe ends: a worker that looked for it went on for ever, and took all the memory there was.
func TestOutbox_StopsWhileTheDestinationIsDown(t *testing.T) {
	var hangs atomic.Bool
	hanging := make(chan struct{}, 16)
	in := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if hangs.Load() {
			hanging <- struct{}{}
			<-r.Context().Done()
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, `deduplicates: true
  retry: {limit: 5, min_delay: 10ms, max_delay: 50ms}`, ""))
	r := b.start(func(c *outbox.Config) { c.Grace = time.Millisecond })
	for i := range 6 {
		b.grant("acme", fmt.Sprint("INV-", i), "team_access")
	}
	waitFor(t, func() (string, bool) {
		state := r.BreakerState("crm")
		return state.String(), state != entitlementv1.BreakerState_BREAKER_STATE_CLOSED
	})
	hangs.Store(true)
	<-hanging
	r.awaitStop(t)
}

// The process is told to stop, and one call hangs for the whole of the grace. What comes of the others is recorded meanwhile: the last
// result came too soon after a settlement to be settled at once, and waited for the call that hung.
func TestOutbox_StopRecordsWhileACallHangs(t *testing.T) {
	const calls = 12
	arrived, answer, hung := make(chan struct{}, calls), make(chan struct{}), make(chan struct{})
	var count atomic.Int64
	in := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		gate := answer
		if count.Add(1) == 1 {
			gate = hung
		}
		arrived <- struct{}{}
		<-gate
	})
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, fmt.Sprintf("timeout: 5m\n  deadline: 5m\n  concurrency: %d", calls), ""))
	r := b.start(func(c *outbox.Config) { c.Grace = 4 * time.Minute })
	for i := range calls {
		b.grant("acme", fmt.Sprint("INV-", i), "team_access")
	}
	for range calls {
		<-arrived
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	defer func() { close(hung); <-stopped }()
	for range calls - 1 {
		answer <- struct{}{}
		// So that the answers come one by one.
		time.Sleep(3 * time.Millisecond)
	}
	b.awaitState("crm", sending, 1)
}
