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
)

// DeliveryResult is what came back from one call.
type DeliveryResult struct {
	// Delivery is what Claim returned.
	Delivery *Delivery
	Outcome  DeliveryOutcome
	// RetryAfter counts from when the result is recorded, in database time. At most 30 days.
	RetryAfter time.Duration
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
const settleSQL = `
UPDATE deliveries d
   SET state = c.state, poison = d.poison + c.poison, last_error = c.error,
       due_at = CASE c.state WHEN 1 THEN clock_timestamp() + c.retry_seconds * interval '1 second' ELSE clock_timestamp() END,
       settled_at = CASE c.state WHEN 4 THEN clock_timestamp() END
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::uuid[], $6::smallint[], $7::bigint[], $8::float8[], $9::text[])
       AS c (tenant_id, entitlement_id, entry_number, destination, token, state, poison, retry_seconds, error)
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state IN (2, 3) AND d.lease_token = c.token`

// endAttemptsSQL records results with their attempts, also those that came too late to count: an attempt belongs to one lease.
const endAttemptsSQL = `
UPDATE delivery_attempts a
   SET ended_at = clock_timestamp(), outcome = c.outcome, status_code = c.status_code, error = c.error, note = c.note
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::smallint[], $5::int[], $6::text[], $7::text[])
       AS c (tenant_id, delivery_id, attempt_number, outcome, status_code, error, note)
 WHERE a.tenant_id = c.tenant_id AND a.delivery_id = c.delivery_id AND a.attempt_number = c.attempt_number`

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
	kept := make([]bool, len(results))
	var all bool
	var released int64
	err = s.inTransaction(ctx, func(tx pgx.Tx) error {
		clear(kept)
		released = 0
		var batch pgx.Batch
		var settled int64
		queueResults(&batch, results, &settled, &released)
		if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
			return err
		}
		if all = settled == int64(len(results)); all {
			return nil
		}
		rows, err := tx.Query(ctx, keptTokensSQL, tenantsOf(results), idsOf(results), tokensOf(results))
		if err != nil {
			return err
		}
		var position int
		_, err = pgx.ForEachRow(rows, []any{&position}, func() error {
			kept[position-1] = true
			return nil
		})
		return err
	})
	if err != nil {
		return nil, readFailure(err)
	}
	for i := range results {
		if !all && !kept[i] {
			lost = append(lost, results[i].Delivery)
		}
	}
	if released > 0 {
		s.wake()
	}
	return lost, nil
}

// queueResults appends the statements that record results. settled counts those that are, and released the deliveries that they make due.
func queueResults(b *pgx.Batch, results []DeliveryResult, settled, released *int64) {
	var k, final deliveryKeys
	var to, finalAt []string
	var states, outcomes []int16
	var poison, numbers []int64
	var retry []float64
	var codes []int32
	var errs, notes []string
	var told []*Delivery
	for i := range results {
		r := &results[i]
		d := r.Delivery
		k.addDelivery(d)
		to = append(to, d.Destination)
		after := resultStates[r.Outcome]
		states, outcomes = append(states, int16(after.state)), append(outcomes, int16(after.recorded))
		counts := int64(0)
		if r.Outcome == RetryAt && r.CountsAsPoison {
			counts = 1
		}
		poison, numbers = append(poison, counts), append(numbers, d.Attempts)
		retry = append(retry, boundedRetry(r.RetryAfter).Seconds())
		codes = append(codes, int32(r.StatusCode))
		errs, notes = append(errs, clipped(r.Error)), append(notes, clipped(r.Note))
		if r.Outcome == Delivered {
			final.addDelivery(d)
			finalAt = append(finalAt, d.Destination)
			if d.Notify != nil {
				told = append(told, d)
			}
		}
	}
	b.Queue(settleSQL, k.tenant, k.entitlement, k.number, to, tokensOf(results), states, poison, retry, errs).Exec(func(tag pgconn.CommandTag) error {
		*settled = tag.RowsAffected()
		return nil
	})
	b.Queue(endAttemptsSQL, k.tenant, idsOf(results), numbers, outcomes, codes, errs, notes)
	if len(told) > 0 {
		queueSent(b, told)
	}
	if len(final.tenant) > 0 {
		b.Queue(releaseSQL, final.tenant, final.entitlement, final.number, finalAt).Exec(func(tag pgconn.CommandTag) error {
			*released = tag.RowsAffected()
			return nil
		})
	}
}

func tenantsOf(results []DeliveryResult) (all []string) {
	for i := range results {
		all = append(all, results[i].Delivery.TenantID)
	}
	return all
}

func idsOf(results []DeliveryResult) (all [][16]byte) {
	for i := range results {
		all = append(all, results[i].Delivery.ID)
	}
	return all
}

func tokensOf(results []DeliveryResult) (all [][16]byte) {
	for i := range results {
		all = append(all, results[i].Delivery.LeaseToken)
	}
	return all
}

// destinationsOf is a column of one name.
func destinationsOf(name string, n int) []string {
	return slices.Repeat([]string{name}, n)
}
