package store

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// meters are the store's instruments. Their labels are enums of bounded size, never a tenant or a key.
type meters struct {
	operations metric.Int64Counter
	batchSize  metric.Int64Histogram
	commitTime metric.Float64Histogram
	retries    metric.Int64Counter
	failures   metric.Int64Counter
	slow       metric.Int64Counter
	// writable and standbys are what Ready found last, and daysAhead how many days of attempts have a partition already.
	writable, standbys, daysAhead atomic.Int64

	// options are kept for each answerLabels that was seen: there are some dozens, and making one allocates.
	options sync.Map
}

func newMeters(provider metric.MeterProvider, depth func() int64) (*meters, error) {
	meter := provider.Meter("github.com/grantd/grantd/store")
	var m meters
	var errs [8]error
	m.operations, errs[0] = meter.Int64Counter("grantd.operations", metric.WithUnit("{attempt}"),
		metric.WithDescription("Arrivals that the database answered, by kind, outcome, what matched and refusal reason."))
	m.batchSize, errs[1] = meter.Int64Histogram("grantd.commit.batch_size", metric.WithUnit("{command}"),
		metric.WithDescription("Commands committed by one transaction."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
	m.commitTime, errs[2] = meter.Float64Histogram("grantd.commit.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from taking up a batch to its confirmed COMMIT."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5))
	m.retries, errs[3] = meter.Int64Counter("grantd.commit.failures", metric.WithUnit("{transaction}"),
		metric.WithDescription("Transactions that failed, by SQLSTATE class (\"none\" for lost connections), retried or not."))
	m.slow, errs[4] = meter.Int64Counter("grantd.commit.diverted", metric.WithUnit("{command}"),
		metric.WithDescription("Commands that moved to the slow lane because another session held their lock."))
	_, errs[5] = meter.Int64ObservableGauge("grantd.queue.depth", metric.WithUnit("{command}"),
		metric.WithDescription("Commands that wait for a transaction."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(depth())
			return nil
		}))
	m.failures, errs[6] = meter.Int64Counter("grantd.unanswered", metric.WithUnit("{attempt}"),
		metric.WithDescription("Arrivals without an answer, by reason; \"internal\" is a bug."))
	errs[7] = m.observe(meter)
	return &m, errors.Join(errs[:]...)
}

// observe registers what the store knows of its database.
func (m *meters) observe(meter metric.Meter) error {
	var errs []error
	for name, about := range map[string]struct {
		value       *atomic.Int64
		unit        string
		description string
	}{
		"grantd.database.writable":             {&m.writable, "", "1 while a writable primary answers."},
		"grantd.database.synchronous_standbys": {&m.standbys, "{standby}", "Standbys that a commit waits for; below 0 the service may not see it."},
		"grantd.attempts.days_ahead":           {&m.daysAhead, "d", "Days from today on that have a partition for attempts; at 0 grants fail."},
	} {
		_, err := meter.Int64ObservableGauge(name, metric.WithUnit(about.unit), metric.WithDescription(about.description),
			metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
				o.Observe(about.value.Load())
				return nil
			}))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// answerLabels are what operations are counted by: numbers of the contract's enums.
type answerLabels struct {
	kind      entitlementv1.OperationKind
	outcome   entitlementv1.Outcome
	matchedBy entitlementv1.MatchedBy
	reason    entitlementv1.RejectionReason
}

func labelsOf(p *pending) answerLabels {
	l := answerLabels{kind: p.command.Kind, outcome: p.answer.Outcome, matchedBy: p.answer.MatchedBy}
	if p.answer.Rejection != nil {
		l.reason = p.answer.Rejection.Reason
	}
	return l
}

func (l answerLabels) option() metric.AddOption {
	labels := []attribute.KeyValue{
		attribute.String("kind", plain(l.kind.String(), "OPERATION_KIND_")),
		attribute.String("outcome", plain(l.outcome.String(), "OUTCOME_")),
	}
	if l.matchedBy != 0 {
		labels = append(labels, attribute.String("matched_by", plain(l.matchedBy.String(), "MATCHED_BY_")))
	}
	if l.reason != 0 {
		labels = append(labels, attribute.String("reason", plain(l.reason.String(), "REJECTION_REASON_")))
	}
	return metric.WithAttributeSet(attribute.NewSet(labels...))
}

// committed counts a batch after its COMMIT. Its scratch belongs to the committer.
func (m *meters) committed(batch []*pending, took time.Duration, counts map[answerLabels]int64) {
	ctx := context.Background()
	m.batchSize.Record(ctx, int64(len(batch)))
	m.commitTime.Record(ctx, took.Seconds())
	clear(counts)
	for _, p := range batch {
		if p.err == nil {
			counts[labelsOf(p)]++
		}
	}
	for l, n := range counts {
		option, ok := m.options.Load(l)
		if !ok {
			option, _ = m.options.LoadOrStore(l, l.option())
		}
		m.operations.Add(ctx, n, option.(metric.AddOption))
	}
}

// unanswered counts commands that got no answer.
func (m *meters) unanswered(reason string, n int) {
	m.failures.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String("reason", strings.ToLower(reason))))
}

func plain(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

func (m *meters) retried(err error) {
	class := "none"
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && len(pg.Code) == 5:
		class = pg.Code[:2]
	case errors.Is(err, errRaced):
		class = "race"
	}
	m.retries.Add(context.Background(), 1, metric.WithAttributes(attribute.String("sqlstate_class", class)))
}

func (m *meters) diverted() {
	m.slow.Add(context.Background(), 1)
}
