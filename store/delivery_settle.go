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
	// CountsAsPoison says that a failure counts against the limit, also the last one, which makes it DEAD.
	CountsAsPoison bool
	StatusCode     int
	// Error is sanitised text; beyond 1 KiB it is cut off.
	Error string
	// Note is what else is to be known, for example "duplicate"; beyond 1 KiB it is cut off.
	Note string
}

// settleSQL records results after which a delivery still waits, finishSQL those that settle it. The token is the guard: a later claim, or an
// operator, has replaced it. An UNKNOWN delivery that nobody decided about still has the token of the call that is in doubt. It is
// kept here, so that a repeat is told from a loss.
//
// As a rule a row is where its claim left it, and is found there without a walk of an index; the statements by key find those that are
// not. What stands at a place now may be another row, but never with the token.
const (
	settleSQL      = settleHead + resultsSQL + atPlaceSQL
	settleByKeySQL = settleHead + resultsSQL + byKeySQL
	finishSQL      = finishHead + resultsSQL + atPlaceSQL + finishTail
	finishByKeySQL = finishHead + resultsSQL + byKeySQL + finishTail

	resultsSQL = `unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::tid[], $6::uuid[], $7::smallint[], $8::bigint[],
               $9::float8[], $10::smallint[], $11::int[], $12::text[], $13::text[])
       AS c (tenant_id, entitlement_id, entry_number, destination, place, token, state, poison, retry_seconds, outcome, status_code, error, note)`
	atPlaceSQL = `
 WHERE d.ctid = c.place AND d.state IN (2, 3) AND d.lease = c.token`
	byKeySQL = `
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state IN (2, 3) AND d.lease = c.token`

	settleHead = `
UPDATE deliveries d
   SET state = c.state, poison = d.poison + c.poison, last_error = c.error, leased_until = NULL,
       due_at = CASE c.state WHEN 1 THEN clock_timestamp() + c.retry_seconds * interval '1 second' ELSE clock_timestamp() END,
       ended_at = clock_timestamp(), outcome = c.outcome, status_code = c.status_code, error = c.error, note = c.note
  FROM `
	finishHead = `
WITH moved AS (
DELETE FROM deliveries d
 USING `
	finishTail = `
RETURNING d.*, c.outcome AS result, c.status_code AS result_code, c.error AS result_error, c.note AS result_note)` + insertSettledSQL + `
SELECT ` + settledKeySQL + `, 4, poison, lease, result_error, ` + settledBodySQL + `, clock_timestamp(), result, result_code, result_error, result_note
  FROM moved`
)

// insertSettledSQL takes what is settled out of the way of what is not. Its statement has deleted the delivery.
const (
	insertSettledSQL = `
INSERT INTO settled_deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, attempts, state, poison, lease, last_error,
       created_at, settled_at, body_bytes, content_type, worker, started_at, ended_at, outcome, status_code, error, note)`
	settledKeySQL  = `tenant_id, entitlement_id, entry_number, destination, delivery_id, attempts`
	settledBodySQL = `created_at, clock_timestamp(), octet_length(body), content_type, worker, started_at`
)

// Results that came too late to count are recorded with their attempts, wherever those stand: an attempt belongs to one lease. It is looked
// for first where attempts move away from: whoever is moving it is waited for there, and has then brought it where it is looked for next.
const (
	lateLatestSQL = `
UPDATE deliveries a` + lateTail + ` AND a.attempts = c.attempt_number`
	lateEarlierSQL = `
UPDATE delivery_attempts a` + lateTail + ` AND a.attempt_number = c.attempt_number`
	lateSettledSQL = `
UPDATE settled_deliveries a` + lateTail + ` AND a.attempts = c.attempt_number`

	lateTail = `
   SET ended_at = clock_timestamp(), outcome = c.outcome, status_code = c.status_code, error = c.error, note = c.note
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::smallint[], $5::int[], $6::text[], $7::text[])
       AS c (tenant_id, delivery_id, attempt_number, outcome, status_code, error, note)
 WHERE a.tenant_id = c.tenant_id AND a.delivery_id = c.delivery_id`
)

// releaseSQL makes due what settled deliveries have held back: of each, the next one that is not settled. A later statement than the
// settling, so that it sees what a claim has put off meanwhile.
const releaseSQL = `
UPDATE deliveries d
   SET due_at = clock_timestamp()
  FROM (SELECT c.*, (SELECT s.entry_number FROM deliveries s
                      WHERE s.tenant_id = c.tenant_id AND s.entitlement_id = c.entitlement_id AND s.entry_number > c.entry_number
                        AND s.destination = c.destination
                      ORDER BY s.entry_number LIMIT 1) AS next_number
          FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[]) AS c (tenant_id, entitlement_id, entry_number, destination)
        OFFSET 0) AS c
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.next_number
   AND d.destination = c.destination AND d.state = 1 AND d.due_at > clock_timestamp()`

// keptTokensSQL tells which results are on record by their tokens.
const keptTokensSQL = `
SELECT c.position::int
  FROM unnest($1::text[], $2::uuid[], $3::uuid[]) WITH ORDINALITY AS c (tenant_id, delivery_id, token, position)
 WHERE COALESCE((SELECT d.lease = c.token FROM deliveries d WHERE d.tenant_id = c.tenant_id AND d.delivery_id = c.delivery_id),
                (SELECT d.lease = c.token FROM settled_deliveries d WHERE d.tenant_id = c.tenant_id AND d.delivery_id = c.delivery_id))`

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
	r := sorted(results)
	var released int64
	err = s.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		lost, err = r.record(ctx, tx)
		if err != nil || len(r.final.keys.tenant) == 0 {
			return err
		}
		tag, err := tx.Exec(ctx, releaseSQL, r.final.keys.tenant, r.final.keys.entitlement, r.final.keys.number, r.final.destination)
		released = tag.RowsAffected()
		return err
	})
	if err != nil {
		return nil, readFailure(err)
	}
	if released > 0 {
		s.wake()
	}
	return lost, nil
}

// sortedResults are results by what is done with them.
type sortedResults struct {
	all []DeliveryResult
	// final are those that hold their successors back no more, and open the others.
	final, open resultColumns
	// told are the deliveries by which somebody was told, pausing those that pause their destinations.
	told, pausing []*Delivery
}

func sorted(results []DeliveryResult) *sortedResults {
	s := &sortedResults{all: results}
	for i := range results {
		r := &results[i]
		if r.Pauses {
			s.pausing = append(s.pausing, r.Delivery)
		}
		if r.Outcome != Delivered {
			s.open.add(r)
			continue
		}
		s.final.add(r)
		if r.Delivery.Notify != nil {
			s.told = append(s.told, r.Delivery)
		}
	}
	return s
}

// resultColumns are results as the columns of the statements that record them.
type resultColumns struct {
	keys           deliveryKeys
	destination    []string
	place          []pgtype.TID
	token, id      [][16]byte
	state, outcome []int16
	poison, number []int64
	retrySeconds   []float64
	statusCode     []int32
	err, note      []string
}

func (c *resultColumns) add(r *DeliveryResult) {
	d := r.Delivery
	after := resultStates[r.Outcome]
	counts := int64(0)
	if r.CountsAsPoison {
		counts = 1
	}
	c.keys.addDelivery(d)
	c.destination, c.place = append(c.destination, d.Destination), append(c.place, d.place)
	c.token, c.id = append(c.token, d.LeaseToken), append(c.id, d.ID)
	c.state, c.outcome = append(c.state, int16(after.state)), append(c.outcome, int16(after.recorded))
	c.poison, c.number = append(c.poison, counts), append(c.number, d.Attempts)
	c.retrySeconds = append(c.retrySeconds, boundedRetry(r.RetryAfter).Seconds())
	c.statusCode = append(c.statusCode, int32(r.StatusCode))
	c.err, c.note = append(c.err, clipped(r.Error)), append(c.note, clipped(r.Note))
}

// queue appends a statement that records the results, if there are any, and counts those that it found.
func (c *resultColumns) queue(b *pgx.Batch, sql string, found *int64) {
	if len(c.id) == 0 {
		return
	}
	b.Queue(sql, c.keys.tenant, c.keys.entitlement, c.keys.number, c.destination, c.place, c.token, c.state, c.poison, c.retrySeconds,
		c.outcome, c.statusCode, c.err, c.note).Exec(func(tag pgconn.CommandTag) error {
		*found += tag.RowsAffected()
		return nil
	})
}

// record writes the results, and says which of them do not count.
func (s *sortedResults) record(ctx context.Context, tx pgx.Tx) (lost []*Delivery, err error) {
	var b pgx.Batch
	var found int64
	s.final.queue(&b, finishSQL, &found)
	s.open.queue(&b, settleSQL, &found)
	if len(s.told) > 0 {
		queueSent(&b, s.told)
	}
	for _, d := range s.pausing {
		b.Queue(pauseSQL, d.Destination, d.TenantID, [16]byte(d.ID), d.Attempts)
	}
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return nil, err
	}
	if found == int64(len(s.all)) {
		return nil, nil
	}
	return s.recordMoved(ctx, tx)
}

// recordMoved records what is not where its claim left it, and with their attempts those results that do not count, which it returns.
func (s *sortedResults) recordMoved(ctx context.Context, tx pgx.Tx) (lost []*Delivery, err error) {
	var b pgx.Batch
	var found int64
	s.final.queue(&b, finishByKeySQL, &found)
	s.open.queue(&b, settleByKeySQL, &found)
	if err := tx.SendBatch(ctx, &b).Close(); err != nil {
		return nil, err
	}
	// How many were found by their keys says nothing: one that has become UNKNOWN is found once more.
	var c resultColumns
	for i := range s.all {
		c.add(&s.all[i])
	}
	rows, err := tx.Query(ctx, keptTokensSQL, c.keys.tenant, c.id, c.token)
	if err != nil {
		return nil, err
	}
	kept := make([]bool, len(s.all))
	var position int
	if _, err := pgx.ForEachRow(rows, []any{&position}, func() error {
		kept[position-1] = true
		return nil
	}); err != nil {
		return nil, err
	}
	var late resultColumns
	for i := range s.all {
		if !kept[i] {
			lost = append(lost, s.all[i].Delivery)
			late.add(&s.all[i])
		}
	}
	if len(lost) == 0 {
		return nil, nil
	}
	b = pgx.Batch{}
	for _, sql := range []string{lateLatestSQL, lateEarlierSQL, lateSettledSQL} {
		b.Queue(sql, late.keys.tenant, late.id, late.number, late.outcome, late.statusCode, late.err, late.note)
	}
	return lost, tx.SendBatch(ctx, &b).Close()
}

// destinationsOf is a column of one name.
func destinationsOf(name string, n int) []string {
	return slices.Repeat([]string{name}, n)
}
