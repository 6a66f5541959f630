package store

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"go.opentelemetry.io/otel/trace"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Renderer makes the body of a delivery that has none yet. It runs inside a transaction, and does no I/O. Where it fails in a claim, the
// delivery is DEAD with the error.
type Renderer func(*Delivery) (body []byte, contentType string, err error)

// heldDelay is when a delivery that an earlier one holds back is looked at again. It is made due at once when that one is settled, so
// the delay only bounds how often all that is held is looked at.
const heldDelay = time.Hour

// dueSQL locks what is due at a destination, and what any other worker has not locked, oldest first. statement_timestamp is a constant
// to the planner, so that it bounds the walk of the index. The conditions on stuck and on infinity are those of the index. What is
// leased keeps its place there, and is passed over. A row's place, its ctid, is good for as long as it is locked: later statements
// find it there without a walk of the key's index. What has its body needs no look at what the event is about.
const dueSQL = `
SELECT d.ctid, d.tenant_id, d.entitlement_id, d.entry_number, d.state, CASE WHEN d.entry_number > 1 THEN` + heldBySQL + ` ELSE 0 END,
       d.delivery_id, d.attempts, d.poison, d.last_error, d.created_at, d.delivery_key, COALESCE(d.kind, 0), COALESCE(d.operation_key, ''),
       COALESCE(d.event_id, ''), d.trace_id, d.span_id, COALESCE(d.trace_sampled, false), d.content_type, d.body
  FROM deliveries d
 WHERE d.destination = $1 AND d.stuck = 0 AND d.due_at > '-infinity' AND d.due_at <= statement_timestamp()
   AND (d.leased_until IS NULL OR d.leased_until <= statement_timestamp())
   AND ` + notPausedSQL + `
 ORDER BY d.due_at LIMIT $2
   FOR NO KEY UPDATE OF d SKIP LOCKED`

// claimedMailsSQL and claimedEventsSQL read what is claimed. What a claim may send is held back by none, so that it need not look; and one of
// a destination that sends no mails need not look who is to be told.
const (
	claimedMailsSQL = `
SELECT d.ctid,` + ownColumnsSQL + bodyColumnsSQL + notifyColumnsSQL + ` 0::bigint,` + eventColumnsSQL + placedSQL + deliveryJoins + byPositionSQL
	claimedEventsSQL = `
SELECT d.ctid,` + ownColumnsSQL + bodyColumnsSQL + ` '', '', '', NULL::timestamptz, 0::bigint,` + eventColumnsSQL + placedSQL + eventJoins + byPositionSQL

	placedSQL = `
  FROM unnest($1::tid[]) WITH ORDINALITY AS c (place, position)
  JOIN deliveries d ON d.ctid = c.place`
	byPositionSQL = `
 ORDER BY c.position`
)

// keepAttemptsSQL makes room for the next attempt of each: the one before goes where the earlier ones are.
const keepAttemptsSQL = `
INSERT INTO delivery_attempts (tenant_id, delivery_id, attempt_number, worker, started_at, ended_at, outcome, status_code, error, note)
SELECT tenant_id, delivery_id, attempts, worker, started_at, ended_at, outcome, status_code, error, note
  FROM deliveries WHERE ctid = ANY ($1) AND worker IS NOT NULL
    ON CONFLICT DO NOTHING`

// leaseSQL begins calls, recording the attempt before it is made, or ends those for which there is no body. A body that is there stays.
// Of what the indexes go by only stuck changes, and that where there is no body.
const leaseSQL = `
UPDATE deliveries d
   SET state = c.state, attempts = d.attempts + 1, lease = c.token,
       leased_until = CASE c.state WHEN 2 THEN clock_timestamp() + make_interval(secs => $5) END,
       body = COALESCE(d.body, CASE c.state WHEN 2 THEN c.body END),
       content_type = CASE WHEN d.body IS NULL THEN c.content_type ELSE d.content_type END,
       last_error = COALESCE(NULLIF(c.error, ''), d.last_error),
       worker = $6, started_at = clock_timestamp(), ended_at = CASE WHEN c.outcome <> 0 THEN clock_timestamp() END,
       outcome = c.outcome, status_code = 0, error = c.error, note = ''
  FROM unnest($1::tid[], $2::uuid[], $3::bytea[], $4::text[], $7::smallint[], $8::text[], $9::smallint[])
       AS c (place, token, body, content_type, state, error, outcome)
 WHERE d.ctid = c.place
RETURNING d.ctid, d.delivery_id, d.leased_until`

// holdSQL puts deliveries off that earlier ones hold back. It locks those: whoever settles one of them waits for this transaction, and
// then makes due what it put off. One that is locked is about to be settled, and its successor stays due.
const holdSQL = `
WITH holding AS (
    SELECT c.tenant_id, c.entitlement_id, c.entry_number
      FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::bigint[]) AS c (tenant_id, entitlement_id, entry_number, held_by)
      JOIN deliveries p ON p.tenant_id = c.tenant_id AND p.entitlement_id = c.entitlement_id AND p.entry_number = c.held_by
            AND p.destination = $5
       FOR NO KEY UPDATE OF p SKIP LOCKED)
UPDATE deliveries d
   SET due_at = statement_timestamp() + make_interval(secs => $6)
  FROM holding c
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number AND d.destination = $5
   AND d.state = 1`

// doubtSQL gives up calls whose lease ran out. The token stays: a late result of that very call still counts.
const doubtSQL = `
UPDATE deliveries d
   SET state = 3, due_at = clock_timestamp(), leased_until = NULL, last_error = $5, ended_at = clock_timestamp(), outcome = 4, error = $5
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[]) AS c (tenant_id, entitlement_id, entry_number, destination)
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state = 2`

const leaseRanOut = "the lease ran out before a result was recorded"

// spareSQL settles deliveries whose recipient was told already. A result of an earlier call counts no more.
const spareSQL = `
WITH moved AS (
    DELETE FROM deliveries d
     USING unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[]) AS c (tenant_id, entitlement_id, entry_number, destination)
     WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
       AND d.destination = c.destination AND d.state IN (1, 2)
    RETURNING d.*)` + insertSettledSQL + `
SELECT ` + settledKeySQL + `, 4, poison, NULL, last_error, ` + settledBodySQL + `, ended_at, outcome, status_code, error, note
  FROM moved`

// Claim leases up to limit due deliveries of a configured destination, each with a lease of its own in database time, and records an
// attempt for each. It has render make the body of those that have none, and stores it in the same transaction: identical bytes
// for ever.
//
// In order per entitlement: only the lowest entry that is not settled is ever returned; PENDING, SENDING, UNKNOWN and DEAD hold
// their successors, DELIVERED and DISCARDED do not. A SENDING delivery whose lease ran out is returned again, with the same key, where
// the destination deduplicates, and otherwise becomes UNKNOWN. Fewer than limit may be returned while more are due, and none while
// the destination is paused. With an error come the deliveries whose claim may hold all the same, since only the answer to COMMIT is
// missing: nobody may be called about them, and Settle gives them back.
func (s *Store) Claim(ctx context.Context, destination, worker string, lease time.Duration, limit int, render Renderer) ([]*Delivery, error) {
	to := s.destination(destination)
	if to == nil {
		return nil, fmt.Errorf("claim: destination %q is not configured", destination)
	}
	var leased []*Delivery
	var c claimed
	err := s.inTransaction(ctx, func(tx pgx.Tx) error {
		leased, c = nil, claimed{destination: to}
		rows, err := tx.Query(ctx, dueSQL, destination, limit)
		if err != nil {
			return err
		}
		if err := c.scanDue(rows); err != nil {
			return err
		}
		if err := c.read(ctx, tx, render); err != nil {
			return err
		}
		if err := c.write(ctx, tx, worker, lease); err != nil {
			return err
		}
		leased = c.leased
		return nil
	})
	if err != nil {
		return leased, readFailure(err)
	}
	if spared := len(c.spared.tenant); spared > 0 {
		s.writer.meters.notifiedBefore(spared)
	}
	for _, d := range c.doubted {
		s.logDoubt(d)
	}
	return leased, nil
}

// logDoubt names a call that nobody will repeat by itself. There are no more such lines than calls were under way.
func (s *Store) logDoubt(d *Delivery) {
	op := &d.Event.Operation
	s.config.Log.WarnContext(trace.ContextWithRemoteSpanContext(context.Background(), op.Origin.SpanContext()), "a delivery waits for an operator",
		"destination", d.Destination, "state", "unknown", "tenant_id", d.TenantID, "delivery_key", d.Key, string(keyAttribute), op.IdempotencyKey,
		"error", leaseRanOut, "advice", "ask the receiver whether it has the delivery key, then grantd deliveries resolve "+d.ID.String())
}

// claimed sorts what is due at a destination by what is done with it.
type claimed struct {
	destination *Destination
	// look are those that nothing is known to hold back, and that must be read with what they are about.
	look []pgtype.TID
	held deliveryKeys
	by   []int64

	spared  deliveryKeys
	doubted []*Delivery
	leased  []*Delivery
	failed  []*Delivery
}

// dueRow receives one row of dueSQL.
type dueRow struct {
	Delivery
	entitlement, id  pgtype.UUID
	number           int64
	state, kind      int16
	key, trace, span []byte
	operation, event string
	sampled          bool
}

func (r *dueRow) destinations() []any {
	return []any{&r.place, &r.TenantID, &r.entitlement, &r.number, &r.state, &r.HeldBy, &r.id, &r.Attempts, &r.Poison, &r.LastError, &r.CreatedAt,
		&r.key, &r.kind, &r.operation, &r.event, &r.trace, &r.span, &r.sampled, &r.ContentType, &r.Body}
}

func (r *dueRow) delivery(destination string) *Delivery {
	d := r.Delivery
	d.ID, d.Key, d.Destination = r.id.Bytes, hex.EncodeToString(r.key), destination
	d.State, d.HeldBy, d.BodyBytes = entitlementv1.DeliveryState(r.state), 0, int64(len(r.Body))
	origin := Origin{EventID: r.event, Sampled: r.sampled}
	copy(origin.TraceID[:], r.trace)
	copy(origin.SpanID[:], r.span)
	kind := entitlementv1.EntryKind(r.kind)
	d.Event = &Event{
		Entry:     Entry{TenantID: d.TenantID, EntitlementID: r.entitlement.Bytes, Number: r.number, Kind: kind, OperationKey: r.operation},
		Operation: Operation{TenantID: d.TenantID, IdempotencyKey: r.operation, Origin: origin},
	}
	return &d
}

func (c *claimed) scanDue(rows pgx.Rows) error {
	defer rows.Close()
	for rows.Next() {
		var r dueRow
		if err := rows.Scan(r.destinations()...); err != nil {
			return err
		}
		step := stepFor(entitlementv1.DeliveryState(r.state), r.HeldBy, c.destination.Deduplicates, false)
		switch {
		case step == hold:
			c.held.add(r.TenantID, r.entitlement.Bytes, r.number)
			c.by = append(c.by, r.HeldBy)
		case r.Body == nil || r.key == nil || c.destination.Template != "":
			c.look = append(c.look, r.place)
		case step == doubt:
			c.doubted = append(c.doubted, r.delivery(c.destination.Name))
		default:
			c.prepare(r.delivery(c.destination.Name), nil)
		}
	}
	return rows.Err()
}

// read completes what is to be looked at, and has its body made.
func (c *claimed) read(ctx context.Context, tx pgx.Tx, render Renderer) error {
	if len(c.look) == 0 {
		return nil
	}
	sql := claimedEventsSQL
	if c.destination.Template != "" {
		sql = claimedMailsSQL
	}
	rows, err := tx.Query(ctx, sql, c.look)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var r deliveryRow
		if err := rows.Scan(append([]any{&r.place}, r.destinations()...)...); err != nil {
			return err
		}
		d := r.delivery()
		switch stepFor(d.State, 0, c.destination.Deduplicates, r.sentAt != nil) {
		case spare:
			c.spared.addDelivery(d)
		case doubt:
			c.doubted = append(c.doubted, d)
		default:
			c.prepare(d, render)
		}
	}
	return rows.Err()
}

func (c *claimed) prepare(d *Delivery, render Renderer) {
	d.Attempts++
	d.Repeated = d.State == sendingState
	d.LeaseToken, d.State = uuid.New(), sendingState
	if d.Body == nil {
		body, contentType, err := render(d)
		if err != nil {
			d.State, d.LastError = deadState, clipped("render: "+err.Error())
			c.failed = append(c.failed, d)
			return
		}
		d.Body, d.ContentType, d.BodyBytes = append(make([]byte, 0, len(body)), body...), contentType, int64(len(body))
		d.rendered = true
	}
	c.leased = append(c.leased, d)
}

// write sends everything that the claim changes in one flight.
func (c *claimed) write(ctx context.Context, tx pgx.Tx, worker string, lease time.Duration) error {
	var b pgx.Batch
	began := append(c.leased[:len(c.leased):len(c.leased)], c.failed...)
	if len(began) > 0 {
		c.queueLease(&b, began, worker, lease)
	}
	if len(c.doubted) > 0 {
		var k deliveryKeys
		for _, d := range c.doubted {
			k.addDelivery(d)
		}
		b.Queue(doubtSQL, k.tenant, k.entitlement, k.number, destinationsOf(c.destination.Name, len(c.doubted)), leaseRanOut)
	}
	if len(c.spared.tenant) > 0 {
		to := destinationsOf(c.destination.Name, len(c.spared.tenant))
		b.Queue(spareSQL, c.spared.tenant, c.spared.entitlement, c.spared.number, to)
		b.Queue(releaseSQL, c.spared.tenant, c.spared.entitlement, c.spared.number, to)
	}
	if len(c.held.tenant) > 0 {
		b.Queue(holdSQL, c.held.tenant, c.held.entitlement, c.held.number, c.by, c.destination.Name, heldDelay.Seconds())
	}
	if b.Len() == 0 {
		return nil
	}
	return tx.SendBatch(ctx, &b).Close()
}

func (c *claimed) queueLease(b *pgx.Batch, began []*Delivery, worker string, lease time.Duration) {
	var places, repeated []pgtype.TID
	var tokens [][16]byte
	var bodies [][]byte
	var types, errs []string
	var states, outcomes []int16
	byID := make(map[uuid.UUID]*Delivery, len(began))
	for _, d := range began {
		places, tokens = append(places, d.place), append(tokens, d.LeaseToken)
		var body []byte
		if d.rendered {
			body = d.Body
		}
		bodies, types = append(bodies, body), append(types, d.ContentType)
		states = append(states, int16(d.State))
		outcome, text := entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_UNSPECIFIED, ""
		if d.State == deadState {
			outcome, text = resultStates[Dead].recorded, d.LastError
		}
		outcomes, errs = append(outcomes, int16(outcome)), append(errs, text)
		if d.Attempts > 1 {
			repeated = append(repeated, d.place)
		}
		byID[d.ID] = d
	}
	if len(repeated) > 0 {
		b.Queue(keepAttemptsSQL, repeated)
	}
	b.Queue(leaseSQL, places, tokens, bodies, types, lease.Seconds(), worker, states, errs, outcomes).Query(func(rows pgx.Rows) error {
		var place pgtype.TID
		var id pgtype.UUID
		var until *time.Time
		_, err := pgx.ForEachRow(rows, []any{&place, &id, &until}, func() error {
			d := byID[id.Bytes]
			d.place, d.LeaseUntil = place, until
			until = nil
			return nil
		})
		return err
	})
}
