package bench_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
)

// What is measured rests on the receiver: it must read what a real client sends, and count each delivery once.
func TestReceiver_CountsKeysOnce(t *testing.T) {
	r, err := bench.StartReceiver()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Stop()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for _, key := range []string{strings.Repeat("0a", 32), strings.Repeat("0b", 32), strings.Repeat("0a", 32)} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL(), strings.NewReader(`{"specversion": "1.0"}`))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Idempotency-Key", key)
		answer, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusNoContent {
			t.Errorf("status %d", answer.StatusCode)
		}
	}
	if n := r.Distinct(); n != 2 {
		t.Errorf("%d different deliveries, want 2", n)
	}
}

func TestDeliveriesReport_RatiosAreToGrantsForTheSameDestination(t *testing.T) {
	report := &bench.DeliveriesReport{
		Machine: bench.Machine{Cores: 2}, Rounds: 3, Names: []string{"webhook paused, unary grants, 32 callers", "webhook paused, unary grants, 128 callers", "webhook paused, unary grants, 512 callers", "webhook, a backlog"},
		Results: map[string][]*bench.Measure{
			"webhook paused, unary grants, 32 callers":  {{PerSecond: 4000, ServerMicros: 200}, {PerSecond: 5000, ServerMicros: 200}, {PerSecond: 9000, ServerMicros: 300}},
			"webhook paused, unary grants, 128 callers": {{PerSecond: 8000, ServerMicros: 50, LoadMicros: 50}},
			"webhook paused, unary grants, 512 callers": {{PerSecond: 10000, PostgresMicros: 50}},
			"webhook, a backlog": {
				{Name: "webhook, a backlog", PerSecond: 6000, ServerMicros: 90, PostgresMicros: 80, LoadMicros: 20, GrantsPerSecond: 3000, Waiting: 7, CatchUpSeconds: .1},
				{Name: "webhook, a backlog", PerSecond: 1000, ServerMicros: 95, PostgresMicros: 85, LoadMicros: 20, GrantsPerSecond: 2000, Waiting: 9, CatchUpSeconds: .3},
				{Name: "webhook, a backlog", PerSecond: 4000, ServerMicros: 99, PostgresMicros: 99, LoadMicros: 20, GrantsPerSecond: 4000, Waiting: 8, CatchUpSeconds: .2},
			},
		},
	}
	var text strings.Builder
	if err := report.Write(&text); err != nil {
		t.Fatal(err)
	}
	if want := "| webhook, a backlog | 4,000/s | 0.80, 0.50, 0.40 | 95, 85, 20 µs | 10,000/s | 1.00, 0.50, 0.25 | 3,000 grants/s; 8 waited at their end, for 0.2 s |\n"; !strings.Contains(text.String(), want) {
		t.Errorf("the table lacks %s:\n%s", want, text.String())
	}
}
