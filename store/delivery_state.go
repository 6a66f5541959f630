package store

import (
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// The states, for the rules below.
const (
	pendingState   = entitlementv1.DeliveryState_DELIVERY_STATE_PENDING
	sendingState   = entitlementv1.DeliveryState_DELIVERY_STATE_SENDING
	unknownState   = entitlementv1.DeliveryState_DELIVERY_STATE_UNKNOWN
	deliveredState = entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED
	deadState      = entitlementv1.DeliveryState_DELIVERY_STATE_DEAD
	discardedState = entitlementv1.DeliveryState_DELIVERY_STATE_DISCARDED
)

// DeliveryOutcome is what one call came to.
type DeliveryOutcome int

// The outcomes of a call.
const (
	// Delivered: accepted.
	Delivered DeliveryOutcome = iota + 1
	// RetryAt: failed in a way that may pass; due again after RetryAfter.
	RetryAt
	// Dead: refused for good, or failed once too often.
	Dead
	// Unknown: the call may have happened, and the destination cannot deduplicate.
	Unknown
)

// resultStates is what a delivery becomes by the result of a call, and how the attempt is recorded.
var resultStates = map[DeliveryOutcome]struct {
	state    entitlementv1.DeliveryState
	recorded entitlementv1.DeliveryAttemptOutcome
}{
	Delivered: {deliveredState, entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DELIVERED},
	RetryAt:   {pendingState, entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_RETRY},
	Dead:      {deadState, entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DEAD},
	Unknown:   {unknownState, entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_UNKNOWN},
}

// step is what a claim does with a delivery that is due.
type step int

const (
	// send it, under a new lease.
	send step = iota + 1
	// hold it back: an earlier entry's delivery is not settled.
	hold
	// doubt it: the lease of a call ran out, and the destination could not tell a second one from the first.
	doubt
	// spare it: the recipient was told already.
	spare
)

// stepFor decides about a delivery that is due: PENDING, or SENDING with a lease that ran out.
func stepFor(state entitlementv1.DeliveryState, heldBy int64, deduplicates, notified bool) step {
	switch {
	case notified:
		return spare
	case state == sendingState && !deduplicates:
		return doubt
	case heldBy != 0:
		return hold
	default:
		return send
	}
}

// orderFacts is what an operator's order is judged by.
type orderFacts struct {
	state    entitlementv1.DeliveryState
	attempts int64
	// leaseOver says of a SENDING delivery that nobody is known to be sending it.
	leaseOver bool
	// observed is how many attempts the operator saw, 0 when that is not said; done, that an action of this kind is on record for it.
	observed int64
	done     bool
}

// judgeOrder says what an order comes to and, when it is NEWLY_APPLIED, the state that the delivery takes. DELIVERED and DISCARDED are
// final. What a repeat of an order finds is the state it made, or a later one with its action on record.
func judgeOrder(kind entitlementv1.OperatorActionKind, f orderFacts) (to entitlementv1.DeliveryState, outcome entitlementv1.Outcome, why entitlementv1.RejectionReason) {
	const (
		newly    = entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED
		already  = entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED
		rejected = entitlementv1.Outcome_OUTCOME_REJECTED
	)
	// targets are the state an order makes, and states that show that it was made.
	target, shown := pendingState, sendingState
	switch kind {
	case entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_DISCARD:
		target, shown = discardedState, discardedState
	case entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_DELIVERED:
		target, shown = deliveredState, deliveredState
	}
	inDoubt := f.state == unknownState || f.state == sendingState && f.leaseOver
	switch {
	case f.observed != 0 && f.done, f.state == target && target != pendingState:
		return f.state, already, 0
	case f.state == deliveredState:
		return f.state, rejected, entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED
	case f.state == discardedState:
		return f.state, rejected, entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED
	case f.observed != 0 && f.observed != f.attempts:
		return f.state, rejected, entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_MOVED_ON
	}
	var applies bool
	switch kind {
	case entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_REDELIVER:
		applies = f.state == deadState
	case entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_DISCARD:
		applies = f.state != sendingState || f.leaseOver
	default:
		applies = inDoubt
	}
	switch {
	case applies:
		return target, newly, 0
	case f.state == target, f.state == shown:
		return f.state, already, 0
	default:
		return f.state, rejected, entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_STATE
	}
}

// longestRetry bounds what a destination may ask for.
const longestRetry = 30 * 24 * time.Hour

func boundedRetry(d time.Duration) time.Duration {
	return min(max(d, 0), longestRetry)
}
