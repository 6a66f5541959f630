package outbox

import (
	"testing"
	"time"

	"github.com/grantd/grantd/store"
)

func TestPace_IsWhatTheDestinationTakesInAQuarterOfASecond(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var p pace
	for i, step := range []struct {
		count int
		after time.Duration
		want  int
	}{
		{1, 0, 0},                        // the first says nothing yet
		{50, 50 * time.Millisecond, 0},   // too early to say
		{50, 50 * time.Millisecond, 250}, // 100 in 100 ms
		{10_000, time.Second, maxAhead},  // no more than can be remembered
		{2, time.Second, 0},              // it has become slow
		{400, time.Second, 100},          // and fast again
		{1, time.Hour, 0},                // after a long rest
		{40, 200 * time.Millisecond, 50}, // 40 in 200 ms
	} {
		now = now.Add(step.after)
		if p.note(step.count, now); p.ahead != step.want {
			t.Errorf("step %d: %d ahead, want %d", i, p.ahead, step.want)
		}
	}
}

// A destination has become slow, and what waited for it is given back uncalled. That is not what it takes: the worker claimed as much again,
// gave it back again, and so on.
func TestPace_IsOfCallsAlone(t *testing.T) {
	cfg := Config{}.withDefaults()
	w := newWorker(&cfg, &Destination{Name: "crm", Concurrency: 2, Deduplicates: true}, nil, nil)
	w.pace.since = time.Now().Add(-paceTime)
	for range maxAhead {
		w.finished <- finished{delivery: &store.Delivery{}, unsent: true}
	}
	w.take(<-w.finished)
	if w.pace.ahead != 0 {
		t.Errorf("%d ahead", w.pace.ahead)
	}
}
