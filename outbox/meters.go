package outbox

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// meters are the outbox's instruments. Their labels are the destinations of the file and enums, never a tenant or a key.
type meters struct {
	attempts metric.Int64Counter
	duration metric.Float64Histogram
	lost     metric.Int64Counter
	repeats  metric.Int64Counter
}

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := provider.Meter(scopeName)
	var m meters
	var errs [4]error
	m.attempts, errs[0] = meter.Int64Counter("grantd.delivery.attempts", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts that were made, by destination and outcome."))
	m.duration, errs[1] = meter.Float64Histogram("grantd.delivery.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from calling a destination to its answer, or to giving up on it."),
		metric.WithExplicitBucketBoundaries(.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60))
	m.lost, errs[2] = meter.Int64Counter("grantd.delivery.results_lost", metric.WithUnit("{attempt}"),
		metric.WithDescription("Results that were dropped, by destination and cause: late, after the lease had run out; refused, by the database."))
	// The store has the other causes.
	m.repeats, errs[3] = meter.Int64Counter("grantd.duplicates", metric.WithUnit("{duplicate}"), metric.WithDescription(store.DuplicatesDescription))
	return &m, errors.Join(errs[:]...)
}

// beginAtZero makes series before they have something to count, so that the rate of the first is known.
func (m *meters) beginAtZero(d *Destination, label attribute.KeyValue) {
	ctx := context.Background()
	m.resultLost(label, causeLate, 0)
	m.resultLost(label, causeRefused, 0)
	for _, labels := range labelledOutcomes(label)[1:] {
		m.attempts.Add(ctx, 0, labels)
	}
	if d.Deduplicates {
		m.repeated(d.Kind, 0)
	}
}

// outcomeNames are the labels of what an attempt comes to.
var outcomeNames = [...]string{store.Delivered: "delivered", store.RetryAt: "retry", store.Dead: "dead", store.Unknown: "unknown"}

// labelledOutcomes are made once: with each attempt, they would take more time than counting it.
func labelledOutcomes(label attribute.KeyValue) []metric.MeasurementOption {
	all := make([]metric.MeasurementOption, len(outcomeNames))
	for i, outcome := range outcomeNames {
		all[i] = metric.WithAttributes(label, attribute.String("outcome", outcome))
	}
	return all
}

// The causes for which a result is dropped.
const (
	causeLate    = "late"
	causeRefused = "refused"
)

func (m *meters) resultLost(label attribute.KeyValue, cause string, n int64) {
	m.lost.Add(context.Background(), n, metric.WithAttributes(label, attribute.String("cause", cause)))
}

// repeated counts calls that repeat one which the destination may have had, and which it recognises by its key. cause is its kind.
func (m *meters) repeated(cause string, n int64) {
	m.repeats.Add(context.Background(), n, metric.WithAttributes(attribute.String("cause", cause)))
}

// isRepeat says of an attempt that has ended whether it repeats one that the destination may have had, or will be so repeated. Only
// destinations that deduplicate are sent such repeats.
func isRepeat(f finished, deduplicates bool) bool {
	return deduplicates && (f.delivery.Repeated || f.result.verdict == uncertain)
}

// observe registers what is read when the metrics are.
func (o *Outbox) observe(provider metric.MeterProvider) error {
	meter := provider.Meter(scopeName)
	var errs [4]error
	_, errs[0] = meter.Int64ObservableGauge("grantd.destination.breaker",
		metric.WithDescription("1 for the state that this replica sees a destination in, 0 for the others."),
		metric.WithInt64Callback(o.observeBreakers))
	var age metric.Float64ObservableGauge
	age, errs[1] = meter.Float64ObservableGauge("grantd.delivery.oldest_due_age", metric.WithUnit("s"),
		metric.WithDescription("For how long the oldest delivery of a destination has been due; 0 where none is."))
	var waiting metric.Int64ObservableGauge
	waiting, errs[2] = meter.Int64ObservableGauge("grantd.deliveries", metric.WithUnit("{delivery}"),
		metric.WithDescription("Deliveries that are not settled, by destination and state; 100,000 stands for that many or more."))
	_, errs[3] = meter.RegisterCallback(func(ctx context.Context, observer metric.Observer) error {
		o.observeBacklogs(ctx, observer, age, waiting)
		return nil
	}, age, waiting)
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

const (
	// scrapeTimeout bounds what one reading of the metrics may ask of the database.
	scrapeTimeout = 2 * time.Second
	// backlogFreshness is how long what the database said is shown, however often the metrics are read.
	backlogFreshness = 10 * time.Second
)

// backlogs are what waits at each destination, as it was last asked for.
type backlogs struct {
	mu    sync.Mutex
	asked time.Time
	// last has no entry for a destination about which the database gave no answer: no number is better than an old one.
	last map[string]store.Backlog
}

func (o *Outbox) observeBacklogs(ctx context.Context, observer metric.Observer, age metric.Float64ObservableGauge, waiting metric.Int64ObservableGauge) {
	o.backlogs.mu.Lock()
	defer o.backlogs.mu.Unlock()
	if time.Since(o.backlogs.asked) > backlogFreshness {
		o.askBacklogs(ctx)
	}
	for _, w := range o.workers {
		b, ok := o.backlogs.last[w.destination.Name]
		if !ok {
			continue
		}
		observer.ObserveFloat64(age, b.OldestDue.Seconds(), metric.WithAttributes(w.label))
		for state, n := range map[string]int64{"pending": b.Pending, "sending": b.Sending, "unknown": b.Unknown, "dead": b.Dead} {
			observer.ObserveInt64(waiting, n, metric.WithAttributes(w.label, attribute.String("state", state)))
		}
	}
}

func (o *Outbox) askBacklogs(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	o.backlogs.last = make(map[string]store.Backlog, len(o.workers))
	for _, w := range o.workers {
		b, err := w.backlog(ctx)
		if err != nil {
			w.log.Warn("what waits at the destination cannot be counted", "error", err)
			break
		}
		o.backlogs.last[w.destination.Name] = b
	}
	o.backlogs.asked = time.Now()
}

func (w *worker) backlog(ctx context.Context) (b store.Backlog, err error) {
	defer caught(w.log, "a count of what waits", "", &err)
	return w.config.Store.Backlog(ctx, w.destination.Name)
}
