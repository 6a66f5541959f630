package bench_test

import (
	"strings"
	"testing"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
)

func rounds(callers int, p99 float64, rates ...float64) []*bench.Result {
	var results []*bench.Result
	for _, rate := range rates {
		results = append(results, &bench.Result{Callers: callers, PerSecond: rate, P50Millis: p99 / 2, P99Millis: p99})
	}
	return results
}

func TestComparison_Table(t *testing.T) {
	refused := rounds(512, 90, 18_000, 20_000, 19_000)
	refused[1].Errors = map[string]uint64{"ResourceExhausted QUEUE_FULL": 3}
	comparison := &bench.Comparison{
		Seconds: 5, Rounds: 3, Preload: 5_000_000,
		Results: map[string][]*bench.Result{
			"pgbench, 1 client":         rounds(1, 1, 900, 1000, 1100),
			"pgbench, 8 clients":        rounds(8, 9, 4000),
			"pgbench, 32 clients":       rounds(32, 12, 4000, 5000, 4500),
			"unary grants, 1 caller":    rounds(1, 3, 500, 600, 700),
			"unary grants, 32 callers":  rounds(32, 11, 9000, 8000, 10_000),
			"unary grants, 128 callers": rounds(128, 30, 12_000, 10_000, 11_000),
			"unary grants, 512 callers": refused,
			"unary grants, 128 callers, 5,000,000 entitlements present": rounds(128, 30, 11_000, 9000, 10_000),
		},
	}
	var text strings.Builder
	if err := comparison.Write(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"medians of 3 rounds of 5 s\n",
		"| unary grants, 32 callers | 9,000/s, p50 5.50, p99 11.0 ms | pgbench, 32 clients: 4,500/s, p50 6.00, p99 12.0 ms | 2.00 (1.60 to 2.25) | 1.5, p99 no worse | yes |\n",
		"| 2.44 (2.00 to 3.00) | 2.5 | no |\n",
		"| 4.22 (4.00 to 4.50) | 3.5, p99 under 150 ms, nothing refused | no |\n",
		"| 3.00 (3.00 to 3.00) | p50 at most 2 | no |\n",
		"| 0.91 (0.90 to 0.92) | 0.85 | yes |\n",
		"\npgbench, 8 clients: 4,000/s, p50 4.50, p99 9.00 ms",
		"\nunary grants, 512 callers: neither NEWLY_APPLIED nor ALREADY_APPLIED: map[ResourceExhausted QUEUE_FULL:3]\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if t.Failed() {
		t.Log(text.String())
	}
}
