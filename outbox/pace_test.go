package outbox

import (
	"testing"
	"time"
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
