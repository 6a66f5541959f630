package outbox

import (
	"context"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/store"
)

const (
	// soonPoll is the wait where something is due that could not be claimed, idlePoll the longest where nothing is.
	soonPoll = 50 * time.Millisecond
	idlePoll = time.Second
	// claimEvery and settleEvery are between claims where the last one found less than there was room for, and between settlements that
	// nothing waits for: under load, many small transactions cost what a few larger ones do not.
	claimEvery  = 10 * time.Millisecond
	settleEvery = 20 * time.Millisecond
	// storeTimeout bounds a look and the recording of results, so that a database which does not answer is asked again. A claim may take
	// as long as its lease: one that is given up while it waits for the commit leaves what it has claimed in doubt.
	storeTimeout = 10 * time.Second
	// maxAhead bounds what is claimed ahead of its calls, aheadTime for how long the destination has work with that, and paceTime how
	// often its pace is taken.
	maxAhead  = 512
	aheadTime = 250 * time.Millisecond
	paceTime  = 100 * time.Millisecond
)

// worker delivers to one destination. One goroutine decides; at most one claim, one settlement and as many calls as the destination
// takes are under way beside it. What ends while a settlement is at the database is settled together, and what is claimed ahead
// waits in memory; so a fast destination costs few transactions, and waits for none of them.
type worker struct {
	config      *Config
	destination *Destination
	sender      sender
	breaker     *breaker
	meters      *meters
	tracer      trace.Tracer
	log         *slog.Logger
	label       attribute.KeyValue
	outcomes    []metric.MeasurementOption

	// wake says that deliveries were made; ready has what is to be called, finished what came of it.
	wake        chan struct{}
	ready       chan claimed
	finished    chan finished
	claims      chan claim
	settlements chan settlement

	// The rest is the deciding goroutine's. held counts what was claimed and is not settled; callers the goroutines that call.
	held, callers      int
	unsettled          []store.DeliveryResult
	claiming, settling bool
	// idle says that the last claim found nothing, and nothing happened since: the next one is preceded by a look, which costs less.
	// stirred says that something happened while a claim was under way.
	idle, stirred bool
	uncalled      uncalled
	// failing says that the database gave no answer last time.
	failing bool
	// claimFrom and settleFrom are when the database is asked again, and nextClaim when it is at the earliest, whatever happens.
	claimFrom, settleFrom, nextClaim time.Time
	pace                             pace
}

// claimed is a delivery that waits for its call.
type claimed struct {
	delivery *store.Delivery
	at       time.Time
}

// claim is what came of a claim, or of the look before it: how long until something is due.
type claim struct {
	deliveries []*store.Delivery
	at         time.Time
	limit      int
	wait       time.Duration
	err        error
}

// pace is how many deliveries a destination takes, as seen lately.
type pace struct {
	since time.Time
	count int
	ahead int
}

// note counts deliveries that have ended, and says now and then how many the destination would take within aheadTime.
func (p *pace) note(count int, now time.Time) {
	p.count += count
	if took := now.Sub(p.since); took >= paceTime {
		p.ahead = min(maxAhead, int(float64(p.count)*float64(aheadTime)/float64(took)))
		p.since, p.count = now, 0
	}
}

func newWorker(cfg *Config, d *Destination, s sender, m *meters) *worker {
	most := d.Concurrency + maxAhead
	label := attribute.String("destination", d.Name)
	return &worker{
		config: cfg, destination: d, sender: s, breaker: newBreaker(d.Retry), meters: m,
		tracer: cfg.TracerProvider.Tracer(scopeName), log: cfg.Log.With("destination", d.Name),
		label: label, outcomes: labelledOutcomes(label),
		wake: make(chan struct{}, 1), ready: make(chan claimed, most), finished: make(chan finished, most),
		claims: make(chan claim, 1), settlements: make(chan settlement, 1), uncalled: make(uncalled),
	}
}

func (w *worker) run(ctx context.Context) {
	// Attempts outlive ctx, until the grace is over.
	calls, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		timer.Reset(min(w.settle(ctx), w.claim(calls)))
		select {
		case <-ctx.Done():
		case f := <-w.finished:
			w.take(f)
		case c := <-w.claims:
			w.begin(calls, c)
		case s := <-w.settlements:
			w.settled(s)
		case <-w.wake:
			w.stir()
		case <-timer.C:
		}
	}
	w.stop(calls, cut)
}

// stir says that there may be something to claim.
func (w *worker) stir() { w.idle, w.stirred, w.claimFrom = false, w.claiming, time.Time{} }

// stop waits for the calls under way, and cuts off those that outlast the grace. What has not been called is given back. Results that the
// database does not take are tried again until the grace is over.
func (w *worker) stop(calls context.Context, cut context.CancelFunc) {
	grace := time.NewTimer(w.config.Grace)
	defer grace.Stop()
	ctx := context.WithoutCancel(calls)
	w.giveBack()
	close(w.ready)
	for over := false; w.claiming || w.settling || w.held > len(w.unsettled) || !over && w.held > 0; {
		again := time.After(w.settle(ctx))
		select {
		case f := <-w.finished:
			w.take(f)
		case s := <-w.settlements:
			w.settled(s)
		case c := <-w.claims:
			w.claiming = false
			w.forgo(c.deliveries)
		case <-again:
		case <-grace.C:
			over = true
			if calls := w.held - len(w.unsettled); calls > 0 {
				w.log.Warn("attempts are cut off", "attempts", calls)
			}
			cut()
		}
	}
	// Once more, also where that has just failed.
	w.settleFrom = time.Time{}
	w.settle(ctx)
	if w.settling {
		w.settled(<-w.settlements)
	}
}

// ahead is how many deliveries may wait for their calls. Nothing is claimed ahead where a crash would leave its fate unknown.
func (w *worker) ahead() int {
	if !w.destination.Deduplicates {
		return 0
	}
	return w.pace.ahead
}

// room is how much more may be claimed. Results that could not be recorded keep their place, so that no more is sent than can be
// remembered.
func (w *worker) room() int { return w.destination.Concurrency + w.ahead() - w.held }

// claim takes up what is due and there is room for, and returns how long to wait if nothing else happens. It outlives the order to stop,
// as calls do: what it has claimed is given back then.
func (w *worker) claim(calls context.Context) time.Duration {
	if w.claiming {
		return idlePoll
	}
	now := time.Now()
	if wait := max(w.claimFrom.Sub(now), w.nextClaim.Sub(now)); wait > 0 {
		return wait
	}
	room := w.room()
	if room < w.ahead()/2 {
		// Soon there is room for more at once.
		room = 0
	}
	limit, wait := w.breaker.allow(room, w.config.Now())
	if limit <= 0 {
		if wait == 0 {
			wait = idlePoll
		}
		return min(wait, idlePoll)
	}
	w.claiming = true
	idle := w.idle
	go func() { w.claims <- w.takeUp(calls, claim{at: now, limit: limit}, idle) }()
	return idlePoll
}

// takeUp asks the database, and completes the claim.
func (w *worker) takeUp(calls context.Context, c claim, idle bool) (done claim) {
	lease := w.destination.Deadline + w.config.LeaseMargin
	ctx, cancel := context.WithTimeout(calls, lease)
	defer cancel()
	done = c
	defer caught(w.log, "a claim", "", &done.err)
	if idle {
		if done.wait, done.err = w.untilDue(ctx); done.wait > 0 || done.err != nil {
			return done
		}
	}
	done.deliveries, done.err = w.config.Store.Claim(ctx, w.destination.Name, w.config.Worker, lease, c.limit, w.render)
	return done
}

// untilDue looks how long it is until something may be due. Others' deliveries can come at any time, so that it is not long.
func (w *worker) untilDue(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	at, ok, err := w.config.Store.NextDue(ctx, w.destination.Name)
	switch {
	case err != nil:
		return 0, err
	case !ok:
		return idlePoll, nil
	default:
		return min(time.Until(at), idlePoll), nil
	}
}

// begin hands what was claimed to those who call.
func (w *worker) begin(calls context.Context, c claim) {
	w.claiming = false
	if c.err != nil {
		w.breaker.refund()
		w.forgo(c.deliveries)
		w.claimFrom = time.Now().Add(w.stumbled(calls, "deliveries cannot be claimed", c.err))
		return
	}
	w.failing = false
	if len(c.deliveries) < c.limit {
		w.nextClaim = c.at.Add(claimEvery)
	}
	if len(c.deliveries) == 0 {
		w.breaker.refund()
		if !w.stirred {
			// A claim may return less than there is.
			w.idle, w.claimFrom = true, time.Now().Add(max(c.wait, soonPoll))
		}
		w.stirred = false
		return
	}
	w.idle, w.stirred = false, false
	w.held += len(c.deliveries)
	for _, d := range c.deliveries {
		w.uncalled.note(d)
		w.ready <- claimed{d, c.at}
	}
	if state := w.breaker.current(); state == open || state == paused {
		// It broke down while this was claimed.
		w.giveBack()
	}
	for ; w.callers < min(w.destination.Concurrency, w.held); w.callers++ {
		go w.call(calls)
	}
}

// call makes calls one by one, until there will be no more.
func (w *worker) call(calls context.Context) {
	for c := range w.ready {
		if time.Since(c.at) > w.config.LeaseMargin/3 || w.breaker.current() == paused {
			w.finished <- finished{delivery: c.delivery, unsent: true}
			continue
		}
		w.finished <- w.attempt(calls, c.delivery)
	}
}

// forgo gives back what was claimed, or may have been, and nobody was called about.
func (w *worker) forgo(deliveries []*store.Delivery) {
	w.held += len(deliveries)
	for _, d := range deliveries {
		w.unsettled = append(w.unsettled, w.judge(finished{delivery: d, unsent: true}))
	}
}

// giveBack has everything that waits for its call wait in the database again.
func (w *worker) giveBack() {
	for {
		select {
		case c, there := <-w.ready:
			if !there {
				// It is closed: the worker stops.
				return
			}
			w.unsettled = append(w.unsettled, w.judge(finished{delivery: c.delivery, unsent: true}))
		default:
			return
		}
	}
}

// take judges an attempt that has ended, and those that ended meanwhile.
func (w *worker) take(f finished) {
	for called := 0; ; {
		if !f.unsent {
			called++
		}
		if f.cut {
			f.endSpan("cut_off")
			w.held--
		} else {
			w.unsettled = append(w.unsettled, w.judge(f))
		}
		select {
		case f = <-w.finished:
			continue
		default:
		}
		w.pace.note(called, time.Now())
		break
	}
	if w.breaker.current() != closed {
		w.giveBack()
	}
}

// stumbled logs the first of a row of failures of the database.
func (w *worker) stumbled(ctx context.Context, what string, err error) time.Duration {
	if !w.failing && ctx.Err() == nil {
		w.log.WarnContext(ctx, what+", until further notice", "error", err)
	}
	w.failing = true
	return idlePoll
}
