package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

const (
	// leaseMargin is what a lease lasts beyond the deadline of its attempt, so that the result can be recorded.
	leaseMargin = 30 * time.Second
	// soonPoll is the wait where something is due that could not be claimed, idlePoll the longest where nothing is.
	soonPoll = 50 * time.Millisecond
	idlePoll = time.Second
	// settleTimeout bounds the recording of results, so that a database which does not answer is asked again.
	settleTimeout = 10 * time.Second
)

// worker delivers to one destination. One goroutine claims and settles; each attempt has one of its own. While a claim and a settlement
// are at the database, further attempts end and are settled together, so that a fast destination costs few transactions.
type worker struct {
	config      *Config
	destination *Destination
	sender      sender
	breaker     *breaker
	meters      *meters
	tracer      trace.Tracer
	log         *slog.Logger
	label       attribute.KeyValue

	// wake says that deliveries were made; finished has what came of attempts.
	wake     chan struct{}
	finished chan finished

	// The rest is the claiming goroutine's.
	inFlight  int
	unsettled []store.DeliveryResult
	// idle says that the last claim found nothing, and nothing happened since: the next one is preceded by a look, which costs less.
	idle bool
	// failing says that the database gave no answer last time.
	failing bool
}

// finished is an attempt that has ended. cut says that the process stopped before it did.
type finished struct {
	delivery *store.Delivery
	result   result
	took     time.Duration
	cut      bool
}

func newWorker(cfg *Config, d *Destination, s sender, m *meters) *worker {
	return &worker{
		config: cfg, destination: d, sender: s, breaker: newBreaker(d.Retry), meters: m,
		tracer: cfg.TracerProvider.Tracer(scopeName), log: cfg.Log.With("destination", d.Name),
		label: attribute.String("destination", d.Name),
		wake:  make(chan struct{}, 1), finished: make(chan finished, d.Concurrency),
	}
}

func (w *worker) run(ctx context.Context) {
	// Attempts outlive ctx, until the grace is over.
	calls, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		w.settle(ctx)
		timer.Reset(w.claim(ctx, calls))
		select {
		case <-ctx.Done():
		case f := <-w.finished:
			w.take(f)
		case <-w.wake:
			w.idle = false
		case <-timer.C:
		}
	}
	w.stop(calls, cut)
}

// stop waits for the attempts under way, and cuts off those that outlast the grace.
func (w *worker) stop(calls context.Context, cut context.CancelFunc) {
	grace := time.NewTimer(w.config.Grace)
	defer grace.Stop()
	for w.inFlight > 0 {
		select {
		case f := <-w.finished:
			w.take(f)
		case <-grace.C:
			w.log.Warn("attempts are cut off; their leases run out", "attempts", w.inFlight)
			cut()
		}
	}
	w.settle(context.WithoutCancel(calls))
}

// claim takes up what is due and there is room for, and returns how long to wait if nothing else happens.
func (w *worker) claim(ctx, calls context.Context) time.Duration {
	// Results that could not be recorded keep their place, so that no more is sent than can be remembered.
	room := w.destination.Concurrency - w.inFlight - len(w.unsettled)
	limit, wait := w.breaker.allow(room, w.config.Now())
	if limit <= 0 {
		if wait == 0 {
			wait = idlePoll
		}
		return min(wait, idlePoll)
	}
	if w.idle {
		if wait := w.untilDue(ctx); wait > 0 {
			w.breaker.refund()
			return wait
		}
	}
	lease := w.destination.Deadline + leaseMargin
	claimed, err := w.config.Store.Claim(ctx, w.destination.Name, w.config.Worker, lease, limit, w.sender.render)
	if err != nil {
		w.breaker.refund()
		return w.stumbled(ctx, "deliveries cannot be claimed", err)
	}
	w.failing, w.idle = false, len(claimed) == 0
	if w.idle {
		w.breaker.refund()
	}
	for _, d := range claimed {
		w.inFlight++
		go w.attempt(calls, d)
	}
	// A claim may return less than there is.
	return soonPoll
}

// untilDue looks how long it is until something may be due. Others' deliveries can come at any time, so that it is not long.
func (w *worker) untilDue(ctx context.Context) time.Duration {
	at, ok, err := w.config.Store.NextDue(ctx, w.destination.Name)
	switch {
	case err != nil:
		return w.stumbled(ctx, "deliveries cannot be looked for", err)
	case !ok:
		return idlePoll
	default:
		return min(time.Until(at), idlePoll)
	}
}

// stumbled logs the first of a row of failures of the database.
func (w *worker) stumbled(ctx context.Context, what string, err error) time.Duration {
	if !w.failing && ctx.Err() == nil {
		w.log.Warn(what+", until further notice", "error", err)
	}
	w.failing = true
	return idlePoll
}

// attempt calls the destination once, and never blocks on handing over what came of it.
func (w *worker) attempt(calls context.Context, d *store.Delivery) {
	ctx, span := w.tracer.Start(originContext(calls, d), "grantd.deliver "+w.destination.Name,
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
			attribute.String(telemetry.KeyName, d.Event.Entry.OperationKey),
			attribute.String("grantd.delivery.key", d.Key),
			attribute.String("grantd.delivery.destination", w.destination.Name),
			attribute.Int64("grantd.delivery.attempt", d.Attempts),
			attribute.String("entitlement.tenant_id", d.TenantID),
			attribute.String("entitlement.event_id", d.Event.Operation.Origin.EventID),
		))
	ctx, cancel := context.WithTimeout(ctx, w.destination.Deadline)
	defer cancel()
	started := time.Now()
	r := w.send(ctx, d)
	r.reason = sanitise(r.reason)
	if r.verdict != delivered {
		span.SetStatus(codes.Error, r.reason)
	}
	if r.statusCode != 0 {
		span.SetAttributes(attribute.Int("grantd.delivery.status_code", r.statusCode))
	}
	span.End()
	w.finished <- finished{delivery: d, result: r, took: time.Since(started), cut: calls.Err() != nil && r.verdict != delivered}
}

// send keeps a panic of a sender's library from ending the process, and with it every other delivery.
func (w *worker) send(ctx context.Context, d *store.Delivery) (r result) {
	defer func() {
		if p := recover(); p != nil {
			w.log.ErrorContext(ctx, "an attempt panicked", "delivery_key", d.Key, "panic", p)
			r = result{verdict: uncertain, reason: errPanic.Error()}
		}
	}()
	return w.sender.send(ctx, d)
}

// take judges an attempt that has ended, and those that ended meanwhile.
func (w *worker) take(f finished) {
	for {
		w.inFlight--
		if !f.cut {
			w.unsettled = append(w.unsettled, w.judge(f))
		}
		select {
		case f = <-w.finished:
		default:
			return
		}
	}
}

// judge turns what came of an attempt into what is recorded of the delivery.
func (w *worker) judge(f finished) store.DeliveryResult {
	d, r, now := f.delivery, f.result, w.config.Now()
	s := store.DeliveryResult{Delivery: d, StatusCode: r.statusCode, Error: r.reason, Note: r.note}
	switch {
	case r.verdict == delivered:
		w.breaker.succeeded(d.ID)
		s.Outcome, s.Error = store.Delivered, ""
	case r.verdict == uncertain && !w.destination.Deduplicates:
		w.breaker.failed(d.ID, r.unreachable, now, random())
		s.Outcome = store.Unknown
	case r.verdict == gone:
		w.breaker.pause()
		w.log.ErrorContext(originContext(context.Background(), d), "the destination says that it is gone: it is paused until the process starts again", "delivery_key", d.Key)
		s.Outcome = store.Dead
	case r.verdict == permanent:
		w.breaker.refused(d.ID, now, random())
		s.Outcome = store.Dead
	default:
		counts, probe := w.breaker.failed(d.ID, r.unreachable, now, random())
		s.Outcome, s.CountsAsPoison = store.RetryAt, counts
		s.RetryAfter = w.destination.Retry.delay(d.Attempts, r.retryAfter, random())
		if probe > 0 {
			s.RetryAfter = max(probe, min(r.retryAfter, w.destination.Retry.MaxDelay))
		}
		if counts && d.Poison+1 >= int64(w.destination.Retry.Limit) {
			s.Outcome = store.Dead
			s.Error = sanitise(fmt.Sprintf("failed %d times while others passed: %s", d.Poison+1, r.reason))
		}
	}
	w.observe(f, &s)
	return s
}

func (w *worker) observe(f finished, s *store.DeliveryResult) {
	outcome := outcomeNames[s.Outcome]
	labels := metric.WithAttributes(w.label, attribute.String("outcome", outcome))
	ctx := context.Background()
	w.meters.attempts.Add(ctx, 1, labels)
	w.meters.duration.Record(ctx, f.took.Seconds(), labels)
	if isRepeat(f, w.destination.Deduplicates) {
		w.meters.repeated(w.destination.Kind, 1)
	}
	if s.Outcome == store.Dead || s.Outcome == store.Unknown {
		w.log.WarnContext(originContext(ctx, f.delivery), "a delivery waits for an operator",
			"state", outcome, "tenant_id", f.delivery.TenantID, "delivery_key", f.delivery.Key, "error", s.Error)
	}
}

// settle records what came of the attempts that have ended. What cannot be recorded is tried again, until its lease has run out and
// somebody else has it.
func (w *worker) settle(ctx context.Context) {
	if len(w.unsettled) == 0 {
		return
	}
	// A result that is here must be recorded, also when the process is told to stop.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	lost, err := w.config.Store.Settle(ctx, w.unsettled)
	if err != nil {
		w.stumbled(ctx, "results of deliveries cannot be recorded", err)
		return
	}
	for _, d := range lost {
		w.meters.lost.Add(ctx, 1, metric.WithAttributes(w.label))
		w.log.WarnContext(originContext(ctx, d), "a result came after its lease had run out, and was dropped", "delivery_key", d.Key, "attempt", d.Attempts)
	}
	clear(w.unsettled)
	w.unsettled = w.unsettled[:0]
	w.failing, w.idle = false, false
}
