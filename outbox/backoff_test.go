package outbox

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/store"
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

// What was claimed ahead is given back uncalled, again and again, before the first call fails. The wait is that after one failure.
func TestBackoff_CountsCallsAlone(t *testing.T) {
	m, err := newMeters(noop.NewMeterProvider())
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{}.withDefaults()
	destination := &Destination{Name: "crm", Concurrency: 1, Retry: Retry{Limit: 3, MinDelay: time.Millisecond, MaxDelay: 24 * time.Hour}}
	w := newWorker(&cfg, destination, nil, m)
	d := &store.Delivery{ID: uuid.New()}
	claim := func() { d.Attempts++; w.uncalled.note(d) }
	for range 25 {
		claim()
		d.LastError = w.judge(finished{delivery: d, unsent: true}).Error
	}
	for calls := range 3 {
		claim()
		s := w.judge(finished{delivery: d, result: result{verdict: transient, reason: "503"}, span: trace.SpanFromContext(t.Context())})
		if most := destination.Retry.ceiling(int64(calls + 1)); s.RetryAfter > most {
			t.Errorf("after %d calls it waits %v, want %v at most", calls+1, s.RetryAfter, most)
		}
		d.LastError = s.Error
	}
	claim()
	w.judge(finished{delivery: d, span: trace.SpanFromContext(t.Context())})
	if len(w.uncalled) != 0 {
		t.Errorf("%d are remembered", len(w.uncalled))
	}
}
