package outbox

import (
	"sync"
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// The states of a destination in one replica. Paused is the database's to say, for all of them.
const (
	closed   = entitlementv1.BreakerState_BREAKER_STATE_CLOSED
	open     = entitlementv1.BreakerState_BREAKER_STATE_OPEN
	halfOpen = entitlementv1.BreakerState_BREAKER_STATE_HALF_OPEN
	paused   = entitlementv1.BreakerState_BREAKER_STATE_PAUSED
)

const (
	// openAfterDeliveries is how many different deliveries must fail, with no success in between, and openAfterUnreachable how many
	// attempts must find nobody there. One poisonous event alone opens nothing.
	openAfterDeliveries  = 5
	openAfterUnreachable = 3
	// maxProbeDelay bounds the wait between two probes, and so the time that passes before an end of the outage is noticed.
	maxProbeDelay = 30 * time.Second
	// maxSuspects bounds what is remembered of failing deliveries.
	maxSuspects = 4096
)

// breaker judges whether a failure is the destination's or the event's.
//
// A failure counts against a delivery only where the destination was seen to take another one between this failure and the one
// before, in this process. So an outage uses up nothing, however it begins and ends, and an event that makes its receiver fail while
// others pass is found out.
type breaker struct {
	retry Retry

	mu    sync.Mutex
	state entitlementv1.BreakerState
	// probeAt is when an open breaker lets one attempt through; probes counts those that failed.
	probeAt time.Time
	probes  int64
	// failing are the deliveries that failed since the last success, unreachable the attempts that found nobody.
	failing     map[uuid.UUID]struct{}
	unreachable int
	// successes counts, and suspects holds, for each delivery that failed last time, the count it failed at.
	successes uint64
	suspects  map[uuid.UUID]uint64
	// unrecorded says that a pause is known here alone so far; pauses counts what was learnt here of pauses.
	unrecorded bool
	pauses     uint64
	// resumedAt is when the end of a pause was learnt.
	resumedAt time.Time
}

func newBreaker(r Retry) *breaker {
	return &breaker{retry: r, state: closed, failing: make(map[uuid.UUID]struct{}), suspects: make(map[uuid.UUID]uint64)}
}

// allow returns how many of the attempts that there is room for may be made now and, where that is none, how long to wait (0: until
// something else happens). An open breaker whose time has come turns half-open and allows one, which refund takes back.
func (b *breaker) allow(room int, now time.Time) (attempts int, wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.state == closed:
		return room, 0
	case b.state == open && room > 0:
		if wait := b.probeAt.Sub(now); wait > 0 {
			return 0, wait
		}
		b.state = halfOpen
		return 1, 0
	default:
		return 0, 0
	}
}

// refund opens the breaker again after a probe for which nothing was due. The next claim may probe at once.
func (b *breaker) refund() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == halfOpen {
		b.state = open
	}
}

// succeeded notes that the destination took a delivery.
func (b *breaker) succeeded(id uuid.UUID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.successes++
	delete(b.suspects, id)
	if b.state == paused {
		return
	}
	b.state, b.probes, b.unreachable = closed, 0, 0
	clear(b.failing)
}

// failed notes a transient failure. It says whether it counts against the delivery, and how long the delivery waits for the
// breaker's next probe where the destination is down (0 where it is not). asked is how long the destination asked to be left alone, and 0 where
// it did not, or spoke of this delivery only: no probe comes sooner, MaxDelay at most.
func (b *breaker) failed(id uuid.UUID, unreachable bool, asked time.Duration, now time.Time, random float64) (counts bool, probe time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before, known := b.suspects[id]
	counts = known && before < b.successes && b.state == closed && !unreachable
	if !known && len(b.suspects) >= maxSuspects {
		// Others have delivered most of them by now. Those that still fail are soon here again.
		clear(b.suspects)
	}
	b.suspects[id] = b.successes
	b.count(id, unreachable, asked, now, random)
	if b.state != open {
		return counts, 0
	}
	return false, max(b.probeAt.Sub(now), time.Millisecond)
}

// refused notes a permanent failure. It says nothing good of the destination: one that refuses everything was set up wrongly, and
// is not given its whole backlog to refuse.
func (b *breaker) refused(id uuid.UUID, now time.Time, random float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.suspects, id)
	b.count(id, false, 0, now, random)
}

func (b *breaker) count(id uuid.UUID, unreachable bool, asked time.Duration, now time.Time, random float64) {
	if unreachable {
		b.unreachable++
	}
	if len(b.failing) < openAfterDeliveries {
		b.failing[id] = struct{}{}
	}
	switch {
	case b.state == halfOpen:
		b.probes++
	case b.state == closed && (b.unreachable >= openAfterUnreachable || len(b.failing) >= openAfterDeliveries):
		b.probes = 1
	default:
		return
	}
	b.state = open
	// At least half of the ceiling: a probe that follows at once finds out nothing.
	ceiling := min(b.retry.ceiling(b.probes), maxProbeDelay)
	wait := ceiling/2 + time.Duration(random*float64(ceiling)/2)
	b.probeAt = now.Add(max(wait, min(asked, b.retry.MaxDelay)))
}

// pause stops the destination for what came of a call that began then, and returns true. While a pause is known, no call begins; so one
// that began before the last resumption had its answer from the time before the pause, which the operator has dealt with.
func (b *breaker) pause(began time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if began.Before(b.resumedAt) {
		return false
	}
	b.state, b.unrecorded = paused, true
	b.pauses++
	return true
}

// recorded says that the pause stands in the database.
func (b *breaker) recorded() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unrecorded = false
	b.pauses++
}

// pausesKnown is to be taken before the database is asked, and handed to follow with its answer.
func (b *breaker) pausesKnown() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pauses
}

// follow does as the database says, unless more was learnt here since it was asked. A destination that is resumed gets one delivery
// first.
func (b *breaker) follow(pause bool, known uint64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.unrecorded || b.pauses != known:
	case pause:
		b.state = paused
	case b.state == paused:
		b.state, b.probes, b.probeAt, b.unreachable = open, 0, time.Time{}, 0
		b.resumedAt = now
		clear(b.failing)
	}
}

func (b *breaker) current() entitlementv1.BreakerState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}
