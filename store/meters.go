package store

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// meters are the store's instruments. Their labels are enums of bounded size, never a tenant or a key.
type meters struct {
	operations metric.Int64Counter
	batchSize  metric.Int64Histogram
	commitTime metric.Float64Histogram
	retries    metric.Int64Counter
	slow       metric.Int64Counter
}

func newMeters(provider metric.MeterProvider, depth func() int64) (*meters, error) {
	meter := provider.Meter("github.com/grantd/grantd/store")
	var m meters
	var errs [6]error
	m.operations, errs[0] = meter.Int64Counter("grantd.operations",
		metric.WithDescription("Arrivals that the database answered, by kind, outcome, what matched and refusal reason."))
	m.batchSize, errs[1] = meter.Int64Histogram("grantd.commit.batch_size", metric.WithUnit("{command}"),
		metric.WithDescription("Commands committed by one transaction."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
	m.commitTime, errs[2] = meter.Float64Histogram("grantd.commit.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from taking up a batch to its confirmed COMMIT."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5))
	m.retries, errs[3] = meter.Int64Counter("grantd.commit.failures",
		metric.WithDescription("Transactions that failed, by SQLSTATE class (\"none\" for lost connections), retried or not."))
	m.slow, errs[4] = meter.Int64Counter("grantd.commit.diverted",
		metric.WithDescription("Commands that moved to the slow lane because another session held their lock."))
	_, errs[5] = meter.Int64ObservableGauge("grantd.queue.depth", metric.WithUnit("{command}"),
		metric.WithDescription("Commands that wait for a transaction."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(depth())
			return nil
		}))
	return &m, errors.Join(errs[:]...)
}

// answerLabels are what operations are counted by.
type answerLabels struct {
	kind, outcome, matchedBy, reason int32
}

func (m *meters) committed(batch []*pending, took time.Duration) {
	ctx := context.Background()
	m.batchSize.Record(ctx, int64(len(batch)))
	m.commitTime.Record(ctx, took.Seconds())
	counts := make(map[answerLabels]*pending, 4)
	numbers := make(map[answerLabels]int64, 4)
	for _, p := range batch {
		l := answerLabels{kind: int32(p.command.Kind), outcome: int32(p.answer.Outcome), matchedBy: int32(p.answer.MatchedBy)}
		if p.answer.Rejection != nil {
			l.reason = int32(p.answer.Rejection.Reason)
		}
		counts[l] = p
		numbers[l]++
	}
	for l, p := range counts {
		labels := []attribute.KeyValue{
			attribute.String("kind", plain(p.command.Kind.String(), "OPERATION_KIND_")),
			attribute.String("outcome", plain(p.answer.Outcome.String(), "OUTCOME_")),
		}
		if l.matchedBy != 0 {
			labels = append(labels, attribute.String("matched_by", plain(p.answer.MatchedBy.String(), "MATCHED_BY_")))
		}
		if p.answer.Rejection != nil {
			labels = append(labels, attribute.String("reason", plain(p.answer.Rejection.Reason.String(), "REJECTION_REASON_")))
		}
		m.operations.Add(ctx, numbers[l], metric.WithAttributes(labels...))
	}
}

func plain(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

func (m *meters) retried(err error) {
	class := "none"
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg):
		class = pg.Code[:2]
	case errors.Is(err, errRaced):
		class = "race"
	}
	m.retries.Add(context.Background(), 1, metric.WithAttributes(attribute.String("sqlstate_class", class)))
}

func (m *meters) diverted() {
	m.slow.Add(context.Background(), 1)
}
