package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// finished is an attempt that has ended. cut says that the process stopped before anybody could know whether it arrived, unsent that the
// call was never made.
type finished struct {
	delivery *store.Delivery
	result   result
	started  time.Time
	took     time.Duration
	// span is nil where the call was never made.
	span   trace.Span
	cut    bool
	unsent bool
}

// endSpan says what is recorded of the attempt, and ends its span where the call ended.
func (f *finished) endSpan(outcome string) {
	f.span.SetAttributes(attribute.String("grantd.delivery.outcome", outcome))
	f.span.End(trace.WithTimestamp(f.started.Add(f.took)))
}

// attempt calls the destination once. Its span is ended by whoever judges it.
func (w *worker) attempt(calls context.Context, d *store.Delivery) finished {
	ctx, span := w.tracer.Start(originContext(calls, d), "grantd.deliver "+w.destination.Name,
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
			attribute.String(telemetry.KeyName, d.Event.Entry.OperationKey),
			attribute.String("grantd.delivery.key", d.Key),
			attribute.String("grantd.delivery.destination", w.destination.Name),
			attribute.Int64("grantd.delivery.attempt", d.Attempts),
			store.TenantAttribute.String(d.TenantID),
			store.EventAttribute.String(d.Event.Operation.Origin.EventID),
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
	return finished{delivery: d, result: r, started: started, took: time.Since(started), span: span, cut: calls.Err() != nil && r.verdict == uncertain}
}

// send is the sender's. It may have sent something before it panicked.
func (w *worker) send(ctx context.Context, d *store.Delivery) (r result) {
	var err error
	defer func() {
		if err != nil {
			r = result{verdict: uncertain, reason: err.Error()}
		}
	}()
	defer caught(w.log, "an attempt", d.Key, &err)
	return w.sender.send(ctx, d)
}

// render is the sender's. Its error is stored with the delivery.
func (w *worker) render(d *store.Delivery) (body []byte, contentType string, err error) {
	defer caught(w.log, "rendering a delivery", d.Key, &err)
	body, contentType, err = w.sender.render(d)
	if err != nil {
		err = errors.New(sanitise(err.Error()))
		w.log.ErrorContext(originContext(context.Background(), d), "a delivery cannot be rendered", "tenant_id", d.TenantID, "delivery_key", d.Key, "error", err)
	}
	return body, contentType, err
}

// reasonUnsent is recorded of an attempt whose call was not made. It counts against nobody, and its text is how the next claim knows.
const reasonUnsent = "the call was not made: the destination fell silent, or the process was stopped"

// judge turns what came of an attempt into what is recorded of the delivery.
func (w *worker) judge(f finished) store.DeliveryResult {
	d, r, now := f.delivery, f.result, w.config.Now()
	s := store.DeliveryResult{Delivery: d, StatusCode: r.statusCode, Error: r.reason, Note: r.note}
	switch {
	case f.unsent:
		// Were it the probe, nobody would ever send another.
		w.breaker.refund()
		s.Outcome, s.Error = store.RetryAt, reasonUnsent
		return s
	case r.verdict == delivered:
		w.breaker.succeeded(d.ID)
		s.Outcome, s.Error = store.Delivered, ""
	case r.verdict == uncertain && !w.destination.Deduplicates:
		w.breaker.failed(d.ID, r.unreachable, 0, now, random())
		s.Outcome = store.Unknown
	case r.verdict == gone && w.breaker.pause(f.started):
		w.log.ErrorContext(originContext(context.Background(), d), "the destination says that it is gone: it is paused until an operator resumes it", "delivery_key", d.Key)
		s.Outcome, s.Pauses = store.Dead, true
	case r.verdict == permanent, r.verdict == gone:
		w.breaker.refused(d.ID, now, random())
		s.Outcome = store.Dead
	default:
		asked := time.Duration(0)
		if r.unreachable {
			asked = r.retryAfter
		}
		counts, probe := w.breaker.failed(d.ID, r.unreachable, asked, now, random())
		s.Outcome, s.CountsAsPoison = store.RetryAt, counts
		s.RetryAfter = w.destination.Retry.delay(w.uncalled.calls(d), r.retryAfter, random())
		if probe > 0 {
			s.RetryAfter = max(probe, min(r.retryAfter, w.destination.Retry.MaxDelay))
		}
		if counts && d.Poison+1 >= int64(w.destination.Retry.Limit) {
			s.Outcome = store.Dead
			s.Error = sanitise(fmt.Sprintf("failed %d times while others passed: %s", d.Poison+1, r.reason))
		}
	}
	if s.Outcome != store.RetryAt {
		delete(w.uncalled, d.ID)
	}
	w.observe(f, &s)
	return s
}

func (w *worker) observe(f finished, s *store.DeliveryResult) {
	outcome := outcomeNames[s.Outcome]
	f.endSpan(outcome)
	labels := w.outcomes[s.Outcome]
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
