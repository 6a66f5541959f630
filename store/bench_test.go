package store_test

import (
	"fmt"
	"sync"
	"testing"
)

// BenchmarkGrant measures new grants by 1 to 512 callers, without gRPC.
func BenchmarkGrant(b *testing.B) {
	for _, callers := range []int{1, 32, 512} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			s := setup(b)
			var wg sync.WaitGroup
			b.ReportAllocs()
			b.ResetTimer()
			for c := range callers {
				wg.Go(func() {
					for i := c; i < b.N; i += callers {
						// Spread over tenants and over the indexes, as keys of many producers are.
						id := fmt.Sprintf("%016x", uint64(i+1)*0x9E3779B97F4A7C15)
						a, err := s.Apply(b.Context(), grant("t"+id[:2], id, id, "team_access"))
						if err != nil || a.Outcome != newly {
							b.Error(a.Outcome, err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "grants/s")
		})
	}
}
