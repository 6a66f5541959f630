package outbox

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// meters are the outbox's instruments. Their labels are the destinations of the file and enums, never a tenant or a key.
type meters struct {
	attempts metric.Int64Counter
	duration metric.Float64Histogram
	lost     metric.Int64Counter
}

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := provider.Meter(scopeName)
	var m meters
	var errs [3]error
	m.attempts, errs[0] = meter.Int64Counter("grantd.delivery.attempts", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts that were made, by destination and outcome."))
	m.duration, errs[1] = meter.Float64Histogram("grantd.delivery.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from calling a destination to its answer, or to giving up on it."),
		metric.WithExplicitBucketBoundaries(.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60))
	m.lost, errs[2] = meter.Int64Counter("grantd.delivery.results_lost", metric.WithUnit("{attempt}"),
		metric.WithDescription("Results that came after their lease had run out, and were dropped, by destination."))
	return &m, errors.Join(errs[:]...)
}

// observe registers what is read when the metrics are.
func (o *Outbox) observe(provider metric.MeterProvider) error {
	meter := provider.Meter(scopeName)
	var errs [2]error
	_, errs[0] = meter.Int64ObservableGauge("grantd.destination.breaker",
		metric.WithDescription("1 for the state that this replica sees a destination in, 0 for the others."),
		metric.WithInt64Callback(o.observeBreakers))
	_, errs[1] = meter.Float64ObservableGauge("grantd.delivery.oldest_due_age", metric.WithUnit("s"),
		metric.WithDescription("For how long the oldest delivery of a destination has been due; 0 where none is."),
		metric.WithFloat64Callback(o.observeOldestDue))
	return errors.Join(errs[:]...)
}

func (o *Outbox) observeBreakers(_ context.Context, observer metric.Int64Observer) error {
	for _, w := range o.workers {
		current := w.breaker.current()
		for _, state := range []entitlementv1.BreakerState{closed, open, halfOpen, paused} {
			value := int64(0)
			if state == current {
				value = 1
			}
			observer.Observe(value, metric.WithAttributes(w.label,
				attribute.String("state", strings.ToLower(strings.TrimPrefix(state.String(), "BREAKER_STATE_")))))
		}
	}
	return nil
}

// scrapeTimeout bounds what one reading of the metrics may ask of the database.
const scrapeTimeout = 2 * time.Second

func (o *Outbox) observeOldestDue(ctx context.Context, observer metric.Float64Observer) error {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	for _, w := range o.workers {
		at, ok, err := o.config.Store.NextDue(ctx, w.destination.Name)
		if err != nil {
			return err
		}
		age := time.Duration(0)
		if ok {
			age = max(time.Since(at), 0)
		}
		observer.Observe(age.Seconds(), metric.WithAttributes(w.label))
	}
	return nil
}
