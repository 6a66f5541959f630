// Package latency is the authority for how grantd's own load tools count and summarise durations.
package latency

import (
	"math/bits"
	"time"
)

const (
	subBits = 7 // buckets in each power of two: 128, so a value is off by less than 1 %
	maxBits = 40
	buckets = (maxBits - subBits + 1) << subBits
)

// Histogram counts durations in buckets whose width grows with the value. Recording allocates nothing, so each caller owns
// one and they are merged at the end. The zero value is ready. It is not safe for concurrent use.
type Histogram struct {
	counts [buckets]uint32
	count  uint64
	sum    time.Duration
	max    time.Duration
}

// Record counts one duration. A negative one counts as 0; beyond 18 minutes only the maximum stays exact.
func (h *Histogram) Record(d time.Duration) {
	d = max(d, 0)
	h.counts[bucket(uint64(d))]++
	h.count++
	h.sum += d
	h.max = max(h.max, d)
}

// bucket is the value itself for small values; above, the place of the leading bit and the subBits bits behind it.
func bucket(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return min((shift+1)<<subBits+int(v>>shift)-1<<subBits, buckets-1)
}

// upper is the largest value that falls into the bucket.
func upper(index int) time.Duration {
	if index < 1<<subBits {
		return time.Duration(index)
	}
	shift := index>>subBits - 1
	return time.Duration((index&(1<<subBits-1)+1<<subBits+1)<<shift - 1)
}

// Merge adds what the other has counted.
func (h *Histogram) Merge(other *Histogram) {
	for i, n := range other.counts {
		h.counts[i] += n
	}
	h.count += other.count
	h.sum += other.sum
	h.max = max(h.max, other.max)
}

// Percentile returns a duration that at least p percent of those recorded do not exceed: the nearest rank, less than 1 %
// too high and never too low. It is 0 where nothing was recorded.
func (h *Histogram) Percentile(p float64) time.Duration {
	rank := uint64(p / 100 * float64(h.count))
	if float64(rank) < p/100*float64(h.count) {
		rank++
	}
	rank = min(max(rank, 1), h.count)
	var seen uint64
	for i, n := range h.counts {
		if seen += uint64(n); seen >= rank {
			if i == buckets-1 {
				return h.max
			}
			return min(upper(i), h.max)
		}
	}
	return 0
}

// Count is how many durations were recorded.
func (h *Histogram) Count() uint64 { return h.count }

// Max is the longest one, exactly.
func (h *Histogram) Max() time.Duration { return h.max }

// Mean is their average, 0 where nothing was recorded.
func (h *Histogram) Mean() time.Duration {
	if h.count == 0 {
		return 0
	}
	return h.sum / time.Duration(h.count)
}
