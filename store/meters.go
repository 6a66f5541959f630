package store

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// meters are the store's instruments. Their labels are enums of bounded size, never a tenant or a key.
type meters struct {
	operations metric.Int64Counter
	duplicates metric.Int64Counter
	violations metric.Int64Counter
	batchSize  metric.Int64Histogram
	commitTime metric.Float64Histogram
	queueWait  metric.Float64Histogram
	failures   metric.Int64Counter
	retries    metric.Int64Counter
	slow       metric.Int64Counter
	noAnswer   metric.Int64Counter
	purged     metric.Int64Counter
	orders     metric.Int64Counter
	// writable and standbys are what Ready found last.
	writable, standbys atomic.Int64
	// partitionsEnd is when the partitions of attempts end, and maintained when the last round of maintenance ended well, in Unix seconds.
	partitionsEnd, maintained atomic.Int64

	// options are kept for each answerLabels that was seen: there are some dozens, and making one allocates.
	options sync.Map
}

// instruments makes a meter's instruments, and collects what goes wrong.
type instruments struct {
	metric.Meter
	errs []error
}

func (i *instruments) counter(name, unit, description string) metric.Int64Counter {
	c, err := i.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	i.errs = append(i.errs, err)
	return c
}

func (i *instruments) seconds(name, description string, bounds ...float64) metric.Float64Histogram {
	h, err := i.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(bounds...))
	i.errs = append(i.errs, err)
	return h
}

func (i *instruments) gauge(name, unit, description string, value func() int64) {
	_, err := i.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(value())
			return nil
		}))
	i.errs = append(i.errs, err)
}

func newMeters(provider metric.MeterProvider, q *queue, destinations []Destination) (*meters, error) {
	i := &instruments{Meter: provider.Meter("github.com/grantd/grantd/store")}
	m := &meters{
		operations: i.counter("grantd.operations", "{attempt}",
			"Arrivals that the database answered, by kind, outcome, what matched and refusal reason."),
		duplicates: i.counter("grantd.duplicates", "{duplicate}",
			DuplicatesDescription),
		violations: i.counter("grantd.commit.constraint_violations", "{transaction}",
			"Transactions that a constraint stopped, by constraint. Those of unique keys lost a race, and the next try sees the winner."),
		commitTime: i.seconds("grantd.commit.duration", "Time from taking up a batch to its confirmed COMMIT.",
			.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5),
		queueWait: i.seconds("grantd.queue.wait", "How long the oldest command of each batch had waited when it was taken up.",
			.0001, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5),
		failures: i.counter("grantd.commit.failures", "{transaction}",
			"Transactions that failed, by SQLSTATE class (\"none\" for lost connections), retried or not."),
		retries: i.counter("grantd.commit.retries", "{transaction}", "Transactions that were run again at once, by SQLSTATE class of the failure."),
		slow: i.counter("grantd.commit.diverted", "{command}",
			"Commands that moved to the slow lane because another session held their lock."),
		noAnswer: i.counter("grantd.unanswered", "{attempt}", "Arrivals without an answer, by reason; \"internal\" is a bug."),
		purged: i.counter("grantd.purged", "{item}",
			"What was removed after its retention: rows of aliases and of deliveries, days of attempts."),
		orders: i.counter("grantd.delivery.orders", "{order}",
			"What operators, and look-ups at destinations, did to deliveries, by destination and kind."),
	}
	var err error
	m.batchSize, err = i.Int64Histogram("grantd.commit.batch_size", metric.WithUnit("{command}"),
		metric.WithDescription("Commands committed by one transaction."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
	i.errs = append(i.errs, err)
	i.gauge("grantd.queue.depth", "{command}", "Commands that wait for a transaction.", q.depth)
	i.gauge("grantd.queue.limit", "{command}", "Commands that may wait; more are turned away.", func() int64 { return int64(q.limit) })
	i.gauge("grantd.database.writable", "", "1 while a writable primary answers.", m.writable.Load)
	i.gauge("grantd.database.synchronous_standbys", "{standby}",
		"Standbys that a commit waits for; below 0 the service may not see it.", m.standbys.Load)
	i.gauge("grantd.attempts.partitions_ahead", "{day}", "Whole days from now that have a partition for attempts; without one, writes fail.",
		func() int64 { return (m.partitionsEnd.Load() - time.Now().Unix()) / secondsPerDay })
	i.gauge("grantd.maintenance.last_success_timestamp", "s", "When partitions were made and the expired was removed last, in Unix time.", m.maintained.Load)
	m.beginAtZero(destinations)
	return m, errors.Join(i.errs...)
}

const secondsPerDay = 24 * 60 * 60

// DuplicatesDescription describes grantd.duplicates, which the store and the outbox have in common.
const DuplicatesDescription = "Repeats, by what keeps them from a second effect: the idempotency key, the business key, the record of " +
	"who was notified or, for a webhook or a message that may arrive more than once, its receiver."

// beginAtZero makes series before they have something to count: the rate of one that begins at ten is zero, and a name that is not
// there looks like one that is misspelt.
func (m *meters) beginAtZero(destinations []Destination) {
	counts := make(map[answerLabels]int64)
	for n := range entitlementv1.OperationKind_name {
		kind := entitlementv1.OperationKind(n)
		if kind == 0 {
			continue
		}
		for _, by := range []entitlementv1.MatchedBy{byKey, byBusinessKey} {
			counts[answerLabels{kind: kind, outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED, matchedBy: by}] = 0
			counts[answerLabels{kind: kind, outcome: entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD, matchedBy: by}] = 0
		}
	}
	m.answered(counts)
	m.notifiedBefore(0)
	for _, reason := range []string{
		ReasonQueueFull, ReasonDatabaseUnavailable, ReasonReadOnly, ReasonCommitUnknown, ReasonLockTimeout, ReasonContention,
		ReasonNewerRecipe, ReasonShuttingDown, reasonInternal,
	} {
		m.unanswered(reason, 0)
	}
	for _, what := range []string{purgedAliases, purgedDeliveries, purgedDays} {
		m.removed(what, 0)
	}
	ctx := context.Background()
	m.slow.Add(ctx, 0)
	for _, class := range []string{"none", "23", "40", "55"} {
		o := metric.WithAttributes(attribute.String("sqlstate_class", class))
		m.failures.Add(ctx, 0, o)
		m.retries.Add(ctx, 0, o)
	}
	for constraint := range raced {
		m.violations.Add(ctx, 0, metric.WithAttributes(attribute.String("constraint", constraint)))
	}
	for _, d := range destinations {
		for n := range entitlementv1.OperatorActionKind_name {
			if n != 0 {
				m.ordered(entitlementv1.OperatorActionKind(n), d.Name, 0)
			}
		}
	}
}

// observePool shows how a pool of connections is used, under the names of OpenTelemetry's conventions where they have one.
func observePool(provider metric.MeterProvider, pool *pgxpool.Pool, name string) error {
	i := &instruments{Meter: provider.Meter("github.com/grantd/grantd/store")}
	connections, err := i.Int64ObservableUpDownCounter("db.client.connection.count", metric.WithUnit("{connection}"),
		metric.WithDescription("Connections of a pool, by whether they are in use."))
	limit, err2 := i.Int64ObservableUpDownCounter("db.client.connection.max", metric.WithUnit("{connection}"),
		metric.WithDescription("Connections that a pool may have."))
	waits, err3 := i.Int64ObservableCounter("grantd.pool.waits", metric.WithUnit("{acquisition}"),
		metric.WithDescription("Acquisitions that had to wait for a connection of a pool."))
	waited, err4 := i.Float64ObservableCounter("grantd.pool.wait_duration", metric.WithUnit("s"),
		metric.WithDescription("How long acquisitions have waited for a connection of a pool, in all."))
	of := attribute.String("db.client.connection.pool.name", name)
	whole := metric.WithAttributeSet(attribute.NewSet(of))
	used := metric.WithAttributeSet(attribute.NewSet(of, attribute.String("db.client.connection.state", "used")))
	idle := metric.WithAttributeSet(attribute.NewSet(of, attribute.String("db.client.connection.state", "idle")))
	_, err5 := i.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s := pool.Stat()
		o.ObserveInt64(connections, int64(s.AcquiredConns()), used)
		o.ObserveInt64(connections, int64(s.IdleConns()), idle)
		o.ObserveInt64(limit, int64(s.MaxConns()), whole)
		o.ObserveInt64(waits, s.EmptyAcquireCount(), whole)
		o.ObserveFloat64(waited, s.EmptyAcquireWaitTime().Seconds(), whole)
		return nil
	}, connections, limit, waits, waited)
	return errors.Join(err, err2, err3, err4, err5)
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

// answerOptions are what an answer is counted with; duplicate is nil for what is none.
type answerOptions struct{ operation, duplicate metric.AddOption }

func (l answerLabels) options() answerOptions {
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
	o := answerOptions{operation: metric.WithAttributeSet(attribute.NewSet(labels...))}
	if l.outcome == entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED {
		o.duplicate = metric.WithAttributes(attribute.String("cause", plain(l.matchedBy.String(), "MATCHED_BY_")))
	}
	return o
}

// committed counts a batch after its COMMIT, also those of its commands that got no answer. The scratch belongs to the committer.
func (m *meters) committed(batch []*pending, took time.Duration, counts map[answerLabels]int64) {
	ctx := context.Background()
	m.batchSize.Record(ctx, int64(len(batch)))
	m.commitTime.Record(ctx, took.Seconds())
	clear(counts)
	for _, p := range batch {
		if p.err == nil {
			counts[labelsOf(p)]++
		} else {
			m.unanswered(failureReason(p.err), 1)
		}
	}
	m.answered(counts)
}

func (m *meters) answered(counts map[answerLabels]int64) {
	ctx := context.Background()
	for l, n := range counts {
		options, ok := m.options.Load(l)
		if !ok {
			options, _ = m.options.LoadOrStore(l, l.options())
		}
		o := options.(answerOptions)
		m.operations.Add(ctx, n, o.operation)
		if o.duplicate != nil {
			m.duplicates.Add(ctx, n, o.duplicate)
		}
	}
}

// notifiedBefore counts mails that are not sent because their recipient was told already.
func (m *meters) notifiedBefore(n int) {
	m.duplicates.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String("cause", "notification")))
}

// reasonInternal is the reason of failures that are no Failure.
const reasonInternal = "internal"

func failureReason(err error) string {
	if f, ok := errors.AsType[*Failure](err); ok {
		return f.Reason
	}
	return reasonInternal
}

// unanswered counts commands that got no answer.
func (m *meters) unanswered(reason string, n int) {
	m.noAnswer.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String("reason", strings.ToLower(reason))))
}

func plain(name, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(name, prefix))
}

// failed counts a transaction that failed, whatever is done about it.
func (m *meters) failed(err error) {
	m.failures.Add(context.Background(), 1, sqlstateClass(err))
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && strings.HasPrefix(pg.Code, "23") {
		m.violations.Add(context.Background(), 1, metric.WithAttributes(attribute.String("constraint", constraintOf(pg))))
	}
}

// retried counts a transaction that is run again because of err.
func (m *meters) retried(err error) {
	m.retries.Add(context.Background(), 1, sqlstateClass(err))
}

func sqlstateClass(err error) metric.MeasurementOption {
	class := "none"
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && len(pg.Code) == 5:
		class = pg.Code[:2]
	case errors.Is(err, errRaced):
		class = "race"
	}
	return metric.WithAttributes(attribute.String("sqlstate_class", class))
}

// constraintOf names the constraint that was violated, that of a partition by its table's. A schema has few.
func constraintOf(pg *pgconn.PgError) string {
	switch {
	case partitionPattern.MatchString(pg.TableName):
		return "attempts" + strings.TrimPrefix(pg.ConstraintName, pg.TableName)
	case pg.ConstraintName == "":
		return pg.TableName
	default:
		return pg.ConstraintName
	}
}

// ordered counts orders that were carried out.
func (m *meters) ordered(kind entitlementv1.OperatorActionKind, destination string, n int64) {
	m.orders.Add(context.Background(), n, metric.WithAttributes(
		attribute.String("destination", destination), attribute.String("kind", plain(kind.String(), "OPERATOR_ACTION_KIND_"))))
}

// What Maintain removes.
const (
	purgedAliases    = "alias"
	purgedDeliveries = "delivery"
	purgedDays       = "attempt_day"
)

// removed counts what was purged.
func (m *meters) removed(what string, n int64) {
	m.purged.Add(context.Background(), n, metric.WithAttributes(attribute.String("kind", what)))
}

func (m *meters) diverted() {
	m.slow.Add(context.Background(), 1)
}
