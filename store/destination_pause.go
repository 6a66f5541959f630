package store

import (
	"context"
	"errors"
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
	rows, err := s.reads.Query(ctx, pausesSQL)
	if err != nil {
		return nil, readFailure(err)
	}
	var all []Pause
	var p Pause
	if _, err := pgx.ForEachRow(rows, p.destinations(), func() error {
		all = append(all, p)
		return nil
	}); err != nil {
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

// Resume ends a pause: what waits for the destination is sent again, by every replica. The outcome is NEWLY_APPLIED, or ALREADY_APPLIED
// where that pause was ended before, and the pause then tells by whom; ErrNotFound says that there never was such a pause.
func (s *Store) Resume(ctx context.Context, o ResumeOrder) (entitlementv1.Outcome, *Pause, error) {
	var outcome entitlementv1.Outcome
	var p Pause
	err := s.inTransaction(ctx, func(tx pgx.Tx) error {
		outcome = entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED
		err := tx.QueryRow(ctx, resumeSQL, o.Destination, o.PauseNumber, o.Actor, o.Reason, o.Caller).Scan(p.destinations()...)
		if errors.Is(err, pgx.ErrNoRows) {
			outcome = entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED
			err = tx.QueryRow(ctx, lastPauseSQL, o.Destination, o.PauseNumber).Scan(p.destinations()...)
		}
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil, ErrNotFound
	}
	if err != nil {
		return 0, nil, readFailure(err)
	}
	if outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		s.wake()
	}
	return outcome, &p, nil
}
