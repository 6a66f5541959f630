package outbox

import (
	"testing"
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const noJitter = 0.999999

func testBreaker() (*breaker, time.Time) {
	return newBreaker(Retry{Limit: 3, MinDelay: time.Second, MaxDelay: time.Hour}), time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
}

// An outage must not use up what is there for poison, however it begins: the very first failures come while the breaker is closed.
func TestBreaker_OutageCountsAgainstNobody(t *testing.T) {
	b, now := testBreaker()
	b.succeeded(uuid.New())
	waiting := make([]uuid.UUID, 20)
	for i := range waiting {
		waiting[i] = uuid.New()
	}
	for round := range 50 {
		for _, id := range waiting {
			if counts, _ := b.failed(id, false, 0, now, 0); counts {
				t.Fatalf("round %d: a failure counts", round)
			}
		}
		now = now.Add(time.Minute)
	}
	if b.current() != open {
		t.Errorf("the breaker is %v", b.current())
	}
	for _, id := range waiting {
		b.succeeded(id)
	}
	if b.current() != closed || len(b.suspects) != 0 {
		t.Errorf("afterwards: %v, %d suspects", b.current(), len(b.suspects))
	}
}

// One event that its receiver chokes on is found out by others that pass, and opens nothing.
func TestBreaker_PoisonCounts(t *testing.T) {
	b, now := testBreaker()
	poison := uuid.New()
	counted := 0
	for range 5 {
		counts, probe := b.failed(poison, false, 0, now, 0)
		if counts {
			counted++
		}
		if probe != 0 {
			t.Error("it waits for a probe")
		}
		b.succeeded(uuid.New())
	}
	if counted != 4 || b.current() != closed {
		t.Errorf("%d of 5 counted, the breaker is %v", counted, b.current())
	}
	// With nobody beside it, nothing says whose fault it is.
	b.failed(poison, false, 0, now, 0)
	for range 100 {
		if counts, _ := b.failed(poison, false, 0, now, 0); counts {
			t.Fatal("a failure counts with nobody beside it")
		}
	}
	if b.current() != closed {
		t.Errorf("one event alone made it %v", b.current())
	}
}

func TestBreaker_Unreachable(t *testing.T) {
	b, now := testBreaker()
	id := uuid.New()
	for range openAfterUnreachable - 1 {
		b.failed(id, true, 0, now, 0)
	}
	if b.current() != closed {
		t.Fatalf("too early: %v", b.current())
	}
	counts, probe := b.failed(id, true, 0, now, noJitter)
	if b.current() != open || counts || probe < 999*time.Millisecond || probe > time.Second {
		t.Errorf("%v, counts %t, probe in %v", b.current(), counts, probe)
	}
}

func TestBreaker_Probes(t *testing.T) {
	b, now := testBreaker()
	for range openAfterDeliveries {
		b.failed(uuid.New(), false, 0, now, noJitter)
	}
	if n, wait := b.allow(16, now); n != 0 || wait <= 0 || wait > time.Second {
		t.Fatalf("open: %d attempts, wait %v", n, wait)
	}
	var waits []time.Duration
	for range 8 {
		n, wait := b.allow(16, now)
		for n == 0 {
			waits = append(waits, wait.Round(time.Second))
			now = now.Add(wait)
			n, wait = b.allow(16, now)
		}
		if n != 1 || b.current() != halfOpen {
			t.Fatalf("a probe of %d, %v", n, b.current())
		}
		if n, _ := b.allow(15, now); n != 0 {
			t.Fatalf("%d beside the probe", n)
		}
		b.failed(uuid.New(), false, 0, now, noJitter)
	}
	want := []time.Duration{1, 2, 4, 8, 16, 30, 30, 30}
	for i := range want {
		if waits[i] != want[i]*time.Second {
			t.Fatalf("waits %v", waits)
		}
	}
	now = now.Add(maxProbeDelay)
	if n, _ := b.allow(16, now); n != 1 {
		t.Fatalf("a probe of %d", n)
	}
	b.refund()
	if n, _ := b.allow(16, now); n != 1 {
		t.Fatalf("after one that found nothing due: %d", n)
	}
	b.succeeded(uuid.New())
	if n, _ := b.allow(16, now); n != 16 || b.current() != closed {
		t.Errorf("after a success: %d, %v", n, b.current())
	}
}

// A receiver that was set up wrongly refuses everything; it is not given its whole backlog to refuse.
func TestBreaker_RefusalsOpenIt(t *testing.T) {
	b, now := testBreaker()
	for range openAfterDeliveries {
		b.refused(uuid.New(), now, 0)
	}
	if b.current() != open {
		t.Errorf("%v", b.current())
	}
}

// Deliveries that failed here are delivered by other replicas, which this one does not hear of. They must not fill its memory for good:
// a poisonous event that comes after them would be sent again for ever.
func TestBreaker_PoisonCountsAfterManyOthers(t *testing.T) {
	b, now := testBreaker()
	for range maxSuspects {
		b.failed(uuid.New(), true, 0, now, 0)
		b.succeeded(uuid.New())
	}
	poison := uuid.New()
	b.failed(poison, false, 0, now, 0)
	b.succeeded(uuid.New())
	if counts, _ := b.failed(poison, false, 0, now, 0); !counts {
		t.Error("the second failure does not count")
	}
}

func TestBreaker_PauseLasts(t *testing.T) {
	b, now := testBreaker()
	b.pause(now)
	b.succeeded(uuid.New())
	b.failed(uuid.New(), true, 0, now, 0)
	if n, _ := b.allow(16, now.Add(1000*time.Hour)); n != 0 || b.current() != paused {
		t.Errorf("%d attempts, %v", n, b.current())
	}
}

func TestBreaker_MemoryIsBounded(t *testing.T) {
	b, now := testBreaker()
	for range 2 * maxSuspects {
		b.failed(uuid.New(), false, 0, now, 0)
	}
	if len(b.suspects) > maxSuspects || len(b.failing) > openAfterDeliveries {
		t.Errorf("%d suspects, %d failing", len(b.suspects), len(b.failing))
	}
}

// The database was asked before a pause was recorded, and answers after it: what it said is old.
func TestBreaker_FollowsWhatIsNewer(t *testing.T) {
	b, now := testBreaker()
	wantState := func(want entitlementv1.BreakerState) {
		t.Helper()
		if got := b.current(); got != want {
			t.Fatalf("the breaker is %v, want %v", got, want)
		}
	}
	b.follow(true, b.pausesKnown(), now)
	wantState(paused)
	b.follow(false, b.pausesKnown(), now)
	wantState(open)
	if n, _ := b.allow(5, now); n != 1 {
		t.Errorf("%d may be sent to a destination that was resumed, want 1", n)
	}
	known := b.pausesKnown()
	b.pause(now)
	b.follow(false, known, now)
	wantState(paused)
	b.follow(false, b.pausesKnown(), now)
	wantState(paused)
	known = b.pausesKnown()
	b.recorded()
	b.follow(false, known, now)
	wantState(paused)
	b.follow(false, b.pausesKnown(), now)
	wantState(open)
}

// A receiver answers 429 to all, and asks for two minutes of rest. It was probed after a second, and again and again.
func TestBreaker_LeavesAloneAsAsked(t *testing.T) {
	for asked, want := range map[time.Duration]time.Duration{2 * time.Minute: 2 * time.Minute, 24 * time.Hour: time.Hour} {
		b, now := testBreaker()
		var probe time.Duration
		for range openAfterUnreachable {
			_, probe = b.failed(uuid.New(), true, asked, now, 0)
		}
		if n, wait := b.allow(16, now); n != 0 || wait != want || probe != want {
			t.Errorf("asked for %v: %d attempts, wait %v, probe in %v", asked, n, wait, probe)
		}
	}
}
