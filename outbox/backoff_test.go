package outbox

import (
	"testing"
	"time"
)

func TestRetry_Ceiling(t *testing.T) {
	r := Retry{MinDelay: time.Second, MaxDelay: time.Minute}
	for failures, want := range map[int64]time.Duration{
		0: time.Second, 1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second, 6: 32 * time.Second, 7: time.Minute, 1 << 40: time.Minute,
	} {
		if got := r.ceiling(failures); got != want {
			t.Errorf("after %d: %v, want %v", failures, got, want)
		}
	}
}

func TestRetry_Delay(t *testing.T) {
	r := Retry{MinDelay: time.Second, MaxDelay: time.Minute}
	for name, c := range map[string]struct {
		failures int64
		asked    time.Duration
		random   float64
		want     time.Duration
	}{
		"full jitter reaches 0":   {5, 0, 0, 0},
		"full jitter, the middle": {3, 0, .5, 2 * time.Second},
		"asked for more":          {1, 20 * time.Second, 0, 20 * time.Second},
		"asked for, spread":       {1, 20 * time.Second, .5, 21 * time.Second},
		"asked for less":          {6, time.Second, .5, 16 * time.Second},
		"asked for too much":      {1, 24 * time.Hour, 0, time.Minute},
	} {
		if got := r.delay(c.failures, c.asked, c.random); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func FuzzRetry_Delay(f *testing.F) {
	f.Add(int64(3), int64(time.Second), .5)
	f.Fuzz(func(t *testing.T, failures, asked int64, random float64) {
		if !(random >= 0 && random < 1) {
			return
		}
		r := Retry{MinDelay: time.Second, MaxDelay: time.Minute}
		if got := r.delay(failures, time.Duration(asked), random); got < 0 || got > r.MaxDelay*11/10 {
			t.Errorf("%v", got)
		}
	})
}
