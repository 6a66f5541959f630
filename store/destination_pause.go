package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Pause is a time in which nothing is sent to a destination, since it asked not to be called any more.
type Pause struct {
	Destination string
	// Number counts a destination's pauses, from 1.
	Number   int64
	PausedAt time.Time
	// ResumedAt is nil while the pause holds. Actor, Reason and Caller are those of who ended it.
	ResumedAt             *time.Time
	Actor, Reason, Caller string
}

func (p *Pause) destinations() []any {
	return []any{&p.Destination, &p.Number, &p.PausedAt, &p.ResumedAt, &p.Actor, &p.Reason, &p.Caller}
}

const pauseColumnsSQL = ` destination, pause_number, paused_at, resumed_at, actor, reason, caller`

// notPausedSQL is true where no pause holds at the destination $1.
const notPausedSQL = `NOT EXISTS (SELECT FROM destination_pauses WHERE destination = $1 AND resumed_at IS NULL)`

// pauseSQL pauses a destination that is not paused. Of two at once, the second finds the number taken. An attempt pauses once, and only where
// it began after the last pause was ended: an operator who resumes a destination knows better than a call from before.
const pauseSQL = `
INSERT INTO destination_pauses (destination, pause_number, paused_at, tenant_id, delivery_id, attempt_number)
SELECT $1, COALESCE(max(pause_number), 0) + 1, clock_timestamp(), $2, $3, $4
  FROM destination_pauses WHERE destination = $1
HAVING COALESCE(bool_and(resumed_at IS NOT NULL AND (tenant_id, delivery_id, attempt_number) <> ($2, $3, $4)), true)
   AND COALESCE(max(resumed_at) < (SELECT max(started_at) FROM all_delivery_attempts
                                    WHERE tenant_id = $2 AND delivery_id = $3 AND attempt_number = $4), true)
ON CONFLICT DO NOTHING`

// pausesSQL reads a table that has a row for each time that a destination was ever given up: few.
const pausesSQL = `SELECT` + pauseColumnsSQL + ` FROM destination_pauses WHERE resumed_at IS NULL ORDER BY destination`

// Pauses returns those that hold, by the names of their destinations, also of destinations that are configured no more.
func (s *Store) Pauses(ctx context.Context) ([]Pause, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	rows, _ := s.reads.Query(ctx, pausesSQL)
	return collectPauses(rows)
}

// pausesSinceSQL reads the latest pauses of some destinations that held at a time or after it.
const pausesSinceSQL = `
SELECT` + pauseColumnsSQL + `
  FROM destination_pauses WHERE destination = ANY ($1) AND COALESCE(resumed_at > $2, true)
 ORDER BY paused_at DESC, destination LIMIT $3`

// pausesOf returns the latest pauses, oldest first and at most one more than an answer holds, that held while one of the deliveries was not settled.
func (s *Store) pausesOf(ctx context.Context, deliveries []DeliveryStory) ([]Pause, error) {
	if len(deliveries) == 0 {
		return nil, nil
	}
	var names []string
	since := deliveries[0].Delivery.CreatedAt
	for i := range deliveries {
		d := deliveries[i].Delivery
		names = append(names, d.Destination)
		if d.CreatedAt.Before(since) {
			since = d.CreatedAt
		}
	}
	rows, _ := s.reads.Query(ctx, pausesSinceSQL, names, since, storyLimit+1)
	all, err := collectPauses(rows)
	all = slices.DeleteFunc(all, func(p Pause) bool {
		return !slices.ContainsFunc(deliveries, func(d DeliveryStory) bool { return p.held(d.Delivery) })
	})
	slices.Reverse(all)
	return all, err
}

// held says whether the pause held a delivery up, or would have.
func (p *Pause) held(d *Delivery) bool {
	return p.Destination == d.Destination && (p.ResumedAt == nil || p.ResumedAt.After(d.CreatedAt)) &&
		(d.SettledAt == nil || p.PausedAt.Before(*d.SettledAt))
}

func collectPauses(rows pgx.Rows) ([]Pause, error) {
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Pause])
	if err != nil {
		return nil, readFailure(err)
	}
	return all, nil
}

// ResumeOrder is an operator's request to call a destination again, already validated.
type ResumeOrder struct {
	Destination string
	// PauseNumber is that of the pause to end; 0 is the one that holds.
	PauseNumber           int64
	Actor, Reason, Caller string
}

// resumeSQL ends a pause that holds. The row lock decides between two at once.
const resumeSQL = `
UPDATE destination_pauses
   SET resumed_at = clock_timestamp(), actor = $3, reason = $4, caller = $5
 WHERE destination = $1 AND resumed_at IS NULL AND $2::bigint IN (0, pause_number)
RETURNING` + pauseColumnsSQL

// lastPauseSQL reads the pause of a number, or the last one.
const lastPauseSQL = `
SELECT` + pauseColumnsSQL + `
  FROM destination_pauses WHERE destination = $1 AND $2::bigint IN (0, pause_number) ORDER BY pause_number DESC LIMIT 1`

// ErrUnknownDestination says that nothing of a destination is known here. Another replica may have it in its file: the database has no list
// of destinations, only what came to wait for them and their pauses.
var ErrUnknownDestination = errors.New("unknown destination")

// destinationKnownSQL says whether there was ever a pause of a destination, or anything waits for it. What was settled is under no index by
// destination; the order keeps the planner to one that is.
const destinationKnownSQL = `
SELECT EXISTS (SELECT FROM destination_pauses WHERE destination = $1)
    OR (SELECT due_at FROM deliveries WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity' ORDER BY due_at LIMIT 1) IS NOT NULL
    OR EXISTS (SELECT FROM deliveries WHERE destination = $1 AND destination > '' AND stuck > 0)`

// Resume ends a pause: what waits for the destination is sent again, by every replica. The outcome is NEWLY_APPLIED, or ALREADY_APPLIED
// where that pause was ended before, and the pause then tells by whom. ErrNotFound says that there never was such a pause,
// ErrUnknownDestination that there is no trace of such a destination either.
func (s *Store) Resume(ctx context.Context, o ResumeOrder) (entitlementv1.Outcome, *Pause, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var outcome entitlementv1.Outcome
	var p Pause
	err := s.inTransaction(ctx, func(tx pgx.Tx) error {
		outcome = entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED
		err := tx.QueryRow(ctx, resumeSQL, o.Destination, o.PauseNumber, o.Actor, o.Reason, o.Caller).Scan(p.destinations()...)
		if errors.Is(err, pgx.ErrNoRows) {
			outcome = entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED
			err = tx.QueryRow(ctx, lastPauseSQL, o.Destination, o.PauseNumber).Scan(p.destinations()...)
		}
		if errors.Is(err, pgx.ErrNoRows) {
			err = s.noPause(ctx, tx, o.Destination)
		}
		return err
	})
	if errors.Is(err, ErrNotFound) || errors.Is(err, ErrUnknownDestination) {
		return 0, nil, err
	}
	if err != nil {
		return 0, nil, readFailure(err)
	}
	if outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		s.wake()
	}
	return outcome, &p, nil
}

// noPause is the error of a resumption that found no pause.
func (s *Store) noPause(ctx context.Context, tx pgx.Tx, destination string) error {
	known := s.destination(destination) != nil
	if !known {
		if err := tx.QueryRow(ctx, destinationKnownSQL, destination).Scan(&known); err != nil {
			return err
		}
	}
	if !known {
		return ErrUnknownDestination
	}
	return ErrNotFound
}
