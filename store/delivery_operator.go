package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// DeliveryOrder is an operator's request about one delivery, already validated.
type DeliveryOrder struct {
	TenantID string
	Delivery DeliveryName
	// ObservedAttempts is how many attempts the operator saw, 0 when that is not said. Discard does not look at it.
	ObservedAttempts int64
	Actor            string
	Reason           string
	// Caller is who called, from the client's certificate.
	Caller string
}

// OrderAnswer is what an operator is told.
type OrderAnswer struct {
	// Outcome is NEWLY_APPLIED, ALREADY_APPLIED or REJECTED.
	Outcome   entitlementv1.Outcome
	Rejection *Rejection
	// Delivery is as it is now, nil where it was removed.
	Delivery *Delivery
}

// Redeliver makes a DEAD delivery due at once, with its key, its body and no poison. What was delivered or discarded is refused, also
// after it was removed, when it is named by its entry and destination; ErrNotFound says that no such delivery is known.
func (s *Store) Redeliver(ctx context.Context, o DeliveryOrder) (OrderAnswer, error) {
	return s.order(ctx, entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_REDELIVER, &o)
}

// Discard gives a delivery up that is neither final nor being sent. Its successors go on.
func (s *Store) Discard(ctx context.Context, o DeliveryOrder) (OrderAnswer, error) {
	o.ObservedAttempts = 0
	return s.order(ctx, entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_DISCARD, &o)
}

// Resolve settles an UNKNOWN delivery: it was delivered, or is due again at once.
func (s *Store) Resolve(ctx context.Context, o DeliveryOrder, resolution entitlementv1.DeliveryResolution) (OrderAnswer, error) {
	kind := entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_SEND_AGAIN
	if resolution == entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED {
		kind = entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_DELIVERED
	}
	return s.order(ctx, kind, &o)
}

// lockOrderSQL locks a delivery that is not settled for an order, and says whether its lease is over; settledOrderSQL finds one that is. Both
// say whether the order was carried out before.
const (
	lockOrderSQL = `
SELECT d.state, d.attempts, COALESCE(d.leased_until, d.due_at) <= clock_timestamp(), d.delivery_id,` + orderDoneSQL + `
  FROM deliveries d` + namedSQL + `
   FOR NO KEY UPDATE OF d`
	settledOrderSQL = `
SELECT d.state, d.attempts, true, d.delivery_id,` + orderDoneSQL + `
  FROM settled_deliveries d` + namedSQL

	orderDoneSQL = `
       EXISTS (SELECT FROM operator_actions a
                WHERE a.tenant_id = d.tenant_id AND a.delivery_id = d.delivery_id AND a.attempts = $6 AND a.kind = $7)`
	namedSQL = `
 WHERE d.tenant_id = $1
   AND ($2::uuid IS NOT NULL AND d.delivery_id = $2
     OR $2::uuid IS NULL AND d.entitlement_id = $3 AND d.entry_number = $4 AND d.destination = $5)`
)

// orderSQL makes a delivery due again, settleOrderSQL settles one. The state that it was judged by is the guard. A result of an earlier call
// counts no more.
const (
	orderSQL = `
UPDATE deliveries
   SET state = $4, due_at = clock_timestamp(), leased_until = NULL, lease = NULL, poison = 0` + orderGuardSQL
	settleOrderSQL = `
WITH moved AS (DELETE FROM deliveries` + orderGuardSQL + ` RETURNING *)` + insertSettledSQL + `
SELECT ` + settledKeySQL + `, $4, poison, NULL, last_error, ` + settledBodySQL + `, ended_at, outcome, status_code, error, note
  FROM moved`

	orderGuardSQL = `
 WHERE tenant_id = $1 AND delivery_id = $2 AND state = $3 AND attempts = $5
   AND (state <> 2 OR leased_until <= clock_timestamp())`
)

const keepActionSQL = `
INSERT INTO operator_actions (tenant_id, delivery_id, attempts, kind, from_state, to_state, actor, reason, caller, at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp())`

// entryThereSQL says whether the tenant has the entry.
const entryThereSQL = `
SELECT EXISTS (SELECT FROM entries WHERE tenant_id = $1 AND entitlement_id = $2 AND entry_number = $3)`

func (s *Store) order(ctx context.Context, kind entitlementv1.OperatorActionKind, o *DeliveryOrder) (OrderAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var answer OrderAnswer
	err := s.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		answer, err = s.orderIn(ctx, tx, kind, o)
		return err
	})
	if errors.Is(err, ErrNotFound) {
		return OrderAnswer{}, err
	}
	if err != nil {
		return OrderAnswer{}, readFailure(err)
	}
	if answer.Outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		s.writer.meters.ordered(kind, answer.Delivery.Destination, 1)
		s.wake()
	}
	return answer, nil
}

func (s *Store) orderIn(ctx context.Context, tx pgx.Tx, kind entitlementv1.OperatorActionKind, o *DeliveryOrder) (OrderAnswer, error) {
	f := orderFacts{observed: o.ObservedAttempts}
	var state int16
	var id [16]byte
	name := &o.Delivery
	find := func(sql string) error {
		return tx.QueryRow(ctx, sql, o.TenantID, nullUUID(name.ID), nullUUID(name.EntitlementID), name.EntryNumber, name.Destination,
			o.ObservedAttempts, int16(kind)).Scan(&state, &f.attempts, &f.leaseOver, &id, &f.done)
	}
	err := find(lockOrderSQL)
	if errors.Is(err, pgx.ErrNoRows) {
		// Also one that was settled while the lock was waited for.
		err = find(settledOrderSQL)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return removed(ctx, tx, o)
	}
	if err != nil {
		return OrderAnswer{}, err
	}
	f.state = entitlementv1.DeliveryState(state)
	to, outcome, why := judgeOrder(kind, f)
	if outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		if err := carryOut(ctx, tx, kind, o, id, f, to); err != nil {
			return OrderAnswer{}, err
		}
	}
	d, err := deliveryIn(ctx, tx, o.TenantID, DeliveryName{ID: id})
	if err != nil {
		return OrderAnswer{}, err
	}
	if to == deliveredState && outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED && d.Notify != nil {
		var b pgx.Batch
		queueSent(&b, []*Delivery{d})
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return OrderAnswer{}, err
		}
	}
	if to != pendingState && outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		n := &d.Event.Entry
		if _, err := tx.Exec(ctx, releaseSQL, []string{d.TenantID}, [][16]byte{n.EntitlementID}, []int64{n.Number}, []string{d.Destination}); err != nil {
			return OrderAnswer{}, err
		}
	}
	a := OrderAnswer{Outcome: outcome, Delivery: d}
	if outcome == entitlementv1.Outcome_OUTCOME_REJECTED {
		a.Rejection = orderRejection(why, f)
	}
	return a, nil
}

func carryOut(ctx context.Context, tx pgx.Tx, kind entitlementv1.OperatorActionKind, o *DeliveryOrder, id [16]byte, f orderFacts, to entitlementv1.DeliveryState) error {
	sql := orderSQL
	if to != pendingState {
		sql = settleOrderSQL
	}
	tag, err := tx.Exec(ctx, sql, o.TenantID, id, int16(f.state), int16(to), f.attempts)
	if err != nil {
		return err
	}
	if tag.RowsAffected() != 1 {
		return errRaced
	}
	_, err = tx.Exec(ctx, keepActionSQL, o.TenantID, id, f.attempts, int16(kind), int16(f.state), int16(to), o.Actor, o.Reason, o.Caller)
	return err
}

// removed answers an order about a delivery that is not there. Nothing ever makes one anew.
func removed(ctx context.Context, tx pgx.Tx, o *DeliveryOrder) (OrderAnswer, error) {
	var there bool
	name := &o.Delivery
	if err := tx.QueryRow(ctx, entryThereSQL, o.TenantID, nullUUID(name.EntitlementID), name.EntryNumber).Scan(&there); err != nil {
		return OrderAnswer{}, err
	}
	if !there {
		return OrderAnswer{}, ErrNotFound
	}
	return OrderAnswer{
		Outcome:   entitlementv1.Outcome_OUTCOME_REJECTED,
		Rejection: orderRejection(entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_REMOVED, orderFacts{}),
	}, nil
}

// orderInstead is what goes on from the states that an order may meet where it does not apply.
var orderInstead = map[entitlementv1.DeliveryState]string{
	pendingState: ", and goes out by itself",
	sendingState: ", and its attempt is under way",
	unknownState: ": resolve or discard it",
	deadState:    ": redeliver or discard it",
}

func orderRejection(why entitlementv1.RejectionReason, f orderFacts) *Rejection {
	r := &Rejection{Reason: why, Retry: entitlementv1.RetryAdvice_RETRY_ADVICE_NEVER}
	switch why {
	case entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED:
		r.Message = "it was delivered, and is never sent again"
	case entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED:
		r.Message = "an operator discarded it, which is final"
	case entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_REMOVED:
		r.Message = "it was settled and removed after its retention, or the entry was never bound for this destination"
	case entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_MOVED_ON:
		r.Message = fmt.Sprintf("attempts until now: %d, not %d; look at it again", f.attempts, f.observed)
	default:
		r.Message = "it is " + strings.TrimPrefix(f.state.String(), "DELIVERY_STATE_") + orderInstead[f.state]
		r.Retry = entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE
	}
	return r
}

const actionsOfSQL = `
SELECT delivery_id, kind, attempts, from_state, to_state, actor, reason, caller, at
  FROM operator_actions WHERE tenant_id = $1 AND delivery_id = ANY ($2)
 ORDER BY at DESC, kind DESC LIMIT $3`

type actionRow struct {
	ID                 [16]byte
	Kind               int16
	Attempts           int64
	From, To           int16
	Actor, Reason, Who string
	At                 time.Time
}

func (r *actionRow) action() OperatorAction {
	return OperatorAction{
		Kind: entitlementv1.OperatorActionKind(r.Kind), Attempts: r.Attempts,
		From: entitlementv1.DeliveryState(r.From), To: entitlementv1.DeliveryState(r.To),
		Actor: r.Actor, Reason: r.Reason, Caller: r.Who, At: r.At,
	}
}
