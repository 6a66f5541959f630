package latency_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/grantd/grantd/cmd/grantd/internal/latency"
)

// oracle is the nearest-rank percentile of the values themselves.
func oracle(sorted []time.Duration, p float64) time.Duration {
	return sorted[max(int(math.Ceil(p/100*float64(len(sorted)))), 1)-1]
}

func TestPercentile_AgainstSortedValues(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() time.Duration{
		"nanoseconds": func() time.Duration { return time.Duration(random.IntN(300)) },
		"uniform":     func() time.Duration { return time.Duration(random.Int64N(int64(time.Second))) },
		"long tail": func() time.Duration {
			return time.Duration(float64(time.Millisecond) * math.Exp(2*random.NormFloat64()))
		},
		"powers of two": func() time.Duration { return time.Duration(1)<<random.IntN(39) - time.Duration(random.IntN(2)) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, n := range []int{1, 2, 10, 999, 20_000} {
				// Recorded apart and merged, as the callers of a load point do.
				var parts [3]latency.Histogram
				var values []time.Duration
				for i := range n {
					v := draw()
					values = append(values, v)
					parts[i%3].Record(v)
				}
				var h latency.Histogram
				for i := range parts {
					h.Merge(&parts[i])
				}
				slices.Sort(values)
				for _, p := range []float64{0, 1, 50, 90, 99, 99.9, 100} {
					want, got := oracle(values, p), h.Percentile(p)
					if got < want || float64(got) > float64(want)*1.01 {
						t.Errorf("of %d values, percentile %v = %d, want %d to 1 %% more", n, p, got, want)
					}
				}
				if h.Count() != uint64(n) || h.Max() != values[n-1] {
					t.Errorf("count %d, max %d; want %d, %d", h.Count(), h.Max(), n, values[n-1])
				}
			}
		})
	}
}

func TestHistogram_Edges(t *testing.T) {
	var empty latency.Histogram
	if empty.Percentile(99) != 0 || empty.Mean() != 0 || empty.Max() != 0 {
		t.Errorf("empty: p99 %v, mean %v, max %v", empty.Percentile(99), empty.Mean(), empty.Max())
	}
	var h latency.Histogram
	h.Record(-time.Second)
	h.Record(3 * time.Hour)
	if got := h.Percentile(50); got != 0 {
		t.Errorf("a negative duration counts as %v, want 0", got)
	}
	if got := h.Percentile(100); got != 3*time.Hour {
		t.Errorf("the longest of all is %v, want 3h", got)
	}
	if got := h.Mean(); got != 90*time.Minute {
		t.Errorf("mean %v, want 90m", got)
	}
}

func TestRecord_AllocatesNothing(t *testing.T) {
	h := new(latency.Histogram)
	if n := testing.AllocsPerRun(100, func() { h.Record(12345) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
