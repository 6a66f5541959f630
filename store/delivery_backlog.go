package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// nextDueSQL finds the first that nobody has, passing over what is leased. Where that is not due, all that is due is leased, and the end of
// a lease may come first.
const nextDueSQL = `
SELECT EXTRACT(EPOCH FROM at - clock_timestamp())::float8
  FROM (SELECT CASE WHEN free <= statement_timestamp() THEN free ELSE LEAST(free, (
                 SELECT min(leased_until) FROM deliveries
                  WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity' AND due_at <= statement_timestamp())) END AS at
          FROM (SELECT (SELECT due_at FROM deliveries
                         WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity' AND leased_until IS NULL
                         ORDER BY due_at LIMIT 1) AS free OFFSET 0) d) d
 WHERE at IS NOT NULL`

// NextDue says when Claim may find something next at the destination, and false when nothing waits there. The time is that of the
// caller's clock, whatever the database's says; it may lie in the past.
func (s *Store) NextDue(ctx context.Context, destination string) (time.Time, bool, error) {
	rows, err := s.outbox.Query(ctx, nextDueSQL, destination)
	if err != nil {
		return time.Time{}, false, readFailure(err)
	}
	waits, err := pgx.CollectRows(rows, pgx.RowTo[float64])
	if err != nil {
		return time.Time{}, false, readFailure(err)
	}
	if len(waits) == 0 {
		return time.Time{}, false, nil
	}
	return time.Now().Add(time.Duration(waits[0] * float64(time.Second))), true, nil
}

// Backlog is what a destination has before it. Of what waits, and of each other state, at most backlogLimit are counted.
type Backlog struct {
	Pending, Sending int64
	// Unknown and Dead wait for an operator.
	Unknown, Dead int64
	// OldestDue is for how long the oldest delivery that nobody has a lease of has been due, 0 when none is.
	OldestDue time.Duration
}

// backlogLimit bounds what a count costs, some 50 ms, however long a destination has been away.
const backlogLimit = 100_000

const (
	// inOrderSQL keeps the planner from bitmaps, which are made whole before the first row of them is counted.
	inOrderSQL = `SELECT set_config('enable_bitmapscan', 'off', true)`

	// backlogSQL walks indexes that hold nothing else.
	backlogSQL = `
SELECT w.pending, w.sending,
       (SELECT count(*) FROM (SELECT FROM deliveries WHERE destination = $1 AND destination > '' AND stuck > 0 AND stuck = 3 ORDER BY due_at LIMIT $2) d),
       (SELECT count(*) FROM (SELECT FROM deliveries WHERE destination = $1 AND destination > '' AND stuck > 0 AND stuck = 5 ORDER BY due_at LIMIT $2) d),
       COALESCE((SELECT EXTRACT(EPOCH FROM clock_timestamp() - due_at) FROM deliveries
                  WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity' AND (leased_until IS NULL OR leased_until <= statement_timestamp())
                  ORDER BY due_at LIMIT 1), 0)::float8
  FROM (SELECT count(*) FILTER (WHERE state = 1) AS pending, count(*) FILTER (WHERE state = 2) AS sending
          FROM (SELECT state FROM deliveries
                 WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity' ORDER BY due_at LIMIT $2) d) w`
)

// Backlog counts what waits at a destination, of all tenants. It is meant for metrics.
func (s *Store) Backlog(ctx context.Context, destination string) (Backlog, error) {
	var b Backlog
	var due float64
	err := s.inTransaction(ctx, func(tx pgx.Tx) error {
		var batch pgx.Batch
		batch.Queue(inOrderSQL)
		batch.Queue(backlogSQL, destination, backlogLimit).QueryRow(func(row pgx.Row) error {
			return row.Scan(&b.Pending, &b.Sending, &b.Unknown, &b.Dead, &due)
		})
		return tx.SendBatch(ctx, &batch).Close()
	})
	if err != nil {
		return Backlog{}, readFailure(err)
	}
	b.OldestDue = max(0, time.Duration(due*float64(time.Second)))
	return b, nil
}

// DeliveriesMade gets a value after this store has made deliveries or made some due again. It has one reader: each value is
// taken once. Other replicas' deliveries are found by asking.
func (s *Store) DeliveriesMade() <-chan struct{} { return s.made }

// wake tells whoever delivers, if they are not told already.
func (s *Store) wake() {
	select {
	case s.made <- struct{}{}:
	default:
	}
}
