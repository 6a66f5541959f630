package store

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// DeliveryResult is what came back from one call.
type DeliveryResult struct {
	// Delivery is what Claim returned.
	Delivery *Delivery
	Outcome  DeliveryOutcome
	// RetryAfter counts from when the result is recorded, in database time. At most 30 days.
	RetryAfter time.Duration
	// Pauses says that the destination asked not to be called any more: it is paused, until Resume.
	Pauses bool
	// CountsAsPoison says that a RetryAt counts against the limit.
	CountsAsPoison bool
	StatusCode     int
	// Error is sanitised text; beyond 1 KiB it is cut off.
	Error string
	// Note is what else is to be known, for example "duplicate"; beyond 1 KiB it is cut off.
	Note string
}

// settleSQL records results. The token is the guard: a later claim, or an operator, has replaced it. An UNKNOWN delivery that nobody
// decided about still has the token of the call that is in doubt. It is kept here, so that a repeat is told from a loss.
//
// As a rule a row is where its claim left it, and is found there without a walk of an index; settleByKeySQL finds those that are
// not. What stands at a place now may be another row, but never with the token.
const (
	settleSQL = settleHead + `
 WHERE d.ctid = c.place AND d.state IN (2, 3) AND d.lease_token = c.token`
	settleByKeySQL = settleHead + `
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state IN (2, 3) AND d.lease_token = c.token`

	settleHead = `
UPDATE deliveries d
   SET state = c.state, poison = d.poison + c.poison, last_error = c.error,
       due_at = CASE c.state WHEN 1 THEN clock_timestamp() + c.retry_seconds * interval '1 second' ELSE clock_timestamp() END,
       settled_at = CASE c.state WHEN 4 THEN clock_timestamp() END
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::tid[], $6::uuid[], $7::smallint[], $8::bigint[], $9::float8[], $10::text[])
       AS c (tenant_id, entitlement_id, entry_number, destination, place, token, state, poison, retry_seconds, error)`
)

// endAttemptsSQL records results with their attempts, also those that came too late to count: an attempt belongs to one lease.
const (
	endAttemptsSQL = endAttemptsHead + `
 WHERE a.ctid = c.place AND a.delivery_id = c.delivery_id AND a.attempt_number = c.attempt_number AND a.tenant_id = c.tenant_id`
	endAttemptsByKeySQL = endAttemptsHead + `
 WHERE a.tenant_id = c.tenant_id AND a.delivery_id = c.delivery_id AND a.attempt_number = c.attempt_number`

	endAttemptsHead = `
UPDATE delivery_attempts a
   SET ended_at = clock_timestamp(), outcome = c.outcome, status_code = c.status_code, error = c.error, note = c.note
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::tid[], $5::smallint[], $6::int[], $7::text[], $8::text[])
       AS c (tenant_id, delivery_id, attempt_number, place, outcome, status_code, error, note)`
)

// releaseSQL makes due what settled deliveries have held back: of each, the next one that is not settled. A later statement than the
// settling, so that it sees what a claim has put off meanwhile.
const releaseSQL = `
UPDATE deliveries d
   SET due_at = clock_timestamp()
  FROM (SELECT c.*, (SELECT s.entry_number FROM deliveries s
                      WHERE s.tenant_id = c.tenant_id AND s.entitlement_id = c.entitlement_id AND s.entry_number > c.entry_number
                        AND s.destination = c.destination AND s.state IN (1, 2, 3, 5)
                      ORDER BY s.entry_number LIMIT 1) AS next_number
          FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[]) AS c (tenant_id, entitlement_id, entry_number, destination)
        OFFSET 0) AS c
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.next_number
   AND d.destination = c.destination AND d.state = 1 AND d.due_at > clock_timestamp()`

// keptTokensSQL tells which results are on record by their tokens.
const keptTokensSQL = `
SELECT c.position::int
  FROM unnest($1::text[], $2::uuid[], $3::uuid[]) WITH ORDINALITY AS c (tenant_id, delivery_id, token, position)
  JOIN deliveries d ON d.tenant_id = c.tenant_id AND d.delivery_id = c.delivery_id AND d.lease_token = c.token`

// Settle records what came back, for many deliveries at once. A result whose lease token is not the delivery's any more is recorded with
// its attempt alone, and its delivery is returned as lost: a worker whose lease ran out cannot overwrite what a newer claim or an operator
// has done. That somebody was told by mail is recorded in any case, and keeps them from being told again. Settling the same results
// once more, after an error, changes nothing.
func (s *Store) Settle(ctx context.Context, results []DeliveryResult) (lost []*Delivery, err error) {
	if len(results) == 0 {
		return nil, nil
	}
	for i := range results {
		if _, ok := resultStates[results[i].Outcome]; !ok {
			return nil, fmt.Errorf("settle: there is no outcome %d", results[i].Outcome)
		}
	}
	results = slices.Clone(results)
	slices.SortFunc(results, func(x, y DeliveryResult) int {
		a, b := x.Delivery, y.Delivery
		return cmp.Or(strings.Compare(a.TenantID, b.TenantID),
			bytes.Compare(a.Event.Entry.EntitlementID[:], b.Event.Entry.EntitlementID[:]),
			cmp.Compare(a.Event.Entry.Number, b.Event.Entry.Number), strings.Compare(a.Destination, b.Destination))
	})
	c := resultColumnsOf(results)
	var kept []bool
	var released int64
	err = s.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		kept, err = c.record(ctx, tx)
		if err != nil || len(c.final.tenant) == 0 {
			return err
		}
		tag, err := tx.Exec(ctx, releaseSQL, c.final.tenant, c.final.entitlement, c.final.number, c.finalAt)
		released = tag.RowsAffected()
		return err
	})
	if err != nil {
		return nil, readFailure(err)
	}
	for i := range results {
		if kept != nil && !kept[i] {
			lost = append(lost, results[i].Delivery)
		}
	}
	if released > 0 {
		s.wake()
	}
	return lost, nil
}

// resultColumns are results as the columns of the statements that record them.
type resultColumns struct {
	keys                deliveryKeys
	destination         []string
	place, attemptPlace []pgtype.TID
	token, id           [][16]byte
	state, outcome      []int16
	poison, number      []int64
	retrySeconds        []float64
	statusCode          []int32
	err, note           []string

	// final are the deliveries that hold their successors back no more, told those by which somebody was told.
	final   deliveryKeys
	finalAt []string
	told    []*Delivery
	// pausing are the deliveries that pause their destinations.
	pausing []*Delivery
}

func resultColumnsOf(results []DeliveryResult) *resultColumns {
	c := &resultColumns{}
	for i := range results {
		r := &results[i]
		d := r.Delivery
		after := resultStates[r.Outcome]
		counts := int64(0)
		if r.Outcome == RetryAt && r.CountsAsPoison {
			counts = 1
		}
		c.keys.addDelivery(d)
		c.destination = append(c.destination, d.Destination)
		c.place, c.attemptPlace = append(c.place, d.place), append(c.attemptPlace, d.attemptPlace)
		c.token, c.id = append(c.token, d.LeaseToken), append(c.id, d.ID)
		c.state, c.outcome = append(c.state, int16(after.state)), append(c.outcome, int16(after.recorded))
		c.poison, c.number = append(c.poison, counts), append(c.number, d.Attempts)
		c.retrySeconds = append(c.retrySeconds, boundedRetry(r.RetryAfter).Seconds())
		c.statusCode = append(c.statusCode, int32(r.StatusCode))
		c.err, c.note = append(c.err, clipped(r.Error)), append(c.note, clipped(r.Note))
		if r.Pauses {
			c.pausing = append(c.pausing, d)
		}
		if r.Outcome == Delivered {
			c.final.addDelivery(d)
			c.finalAt = append(c.finalAt, d.Destination)
			if d.Notify != nil {
				c.told = append(c.told, d)
			}
		}
	}
	return c
}

// record writes the results, and says which of them count: nil where all do.
func (c *resultColumns) record(ctx context.Context, tx pgx.Tx) (kept []bool, err error) {
	var settled, ended int64
	counted := func(n *int64) func(pgconn.CommandTag) error {
		return func(tag pgconn.CommandTag) error {
			*n = tag.RowsAffected()
			return nil
		}
	}
	write := func(settle, end string) error {
		var b pgx.Batch
		b.Queue(settle, c.keys.tenant, c.keys.entitlement, c.keys.number, c.destination, c.place, c.token, c.state, c.poison, c.retrySeconds, c.err).
			Exec(counted(&settled))
		b.Queue(end, c.keys.tenant, c.id, c.number, c.attemptPlace, c.outcome, c.statusCode, c.err, c.note).Exec(counted(&ended))
		return tx.SendBatch(ctx, &b).Close()
	}
	if err := write(settleSQL, endAttemptsSQL); err != nil {
		return nil, err
	}
	all := int64(len(c.id))
	found := settled == all
	if !found || ended < all {
		if err := write(settleByKeySQL, endAttemptsByKeySQL); err != nil {
			return nil, err
		}
	}
	if len(c.told) > 0 || len(c.pausing) > 0 {
		var b pgx.Batch
		if len(c.told) > 0 {
			queueSent(&b, c.told)
		}
		for _, d := range c.pausing {
			b.Queue(pauseSQL, d.Destination, d.TenantID, [16]byte(d.ID), d.Attempts)
		}
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return nil, err
		}
	}
	if found {
		return nil, nil
	}
	// How many were found by their keys says nothing: one that has become UNKNOWN is found once more.
	kept = make([]bool, all)
	rows, err := tx.Query(ctx, keptTokensSQL, c.keys.tenant, c.id, c.token)
	if err != nil {
		return nil, err
	}
	var position int
	_, err = pgx.ForEachRow(rows, []any{&position}, func() error {
		kept[position-1] = true
		return nil
	})
	return kept, err
}

// destinationsOf is a column of one name.
func destinationsOf(name string, n int) []string {
	return slices.Repeat([]string{name}, n)
}
