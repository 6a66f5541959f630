package outbox

import (
	"math/rand/v2"
	"time"

	"github.com/google/uuid"

	"github.com/grantd/grantd/store"
)

// ceiling is the longest that the wait after the given number of failures may be: MinDelay after the first, doubled by each further
// one, MaxDelay at most.
func (r Retry) ceiling(failures int64) time.Duration {
	d := r.MinDelay
	for range failures - 1 {
		if d >= r.MaxDelay/2 {
			return r.MaxDelay
		}
		d *= 2
	}
	return min(d, r.MaxDelay)
}

// delay is the wait before the next attempt, with full jitter: anything up to the ceiling, so that what failed together does not
// come back together. A wait that the destination asked for is the least, and is spread by up to a tenth; MaxDelay bounds it.
// random is at least 0 and less than 1.
func (r Retry) delay(failures int64, asked time.Duration, random float64) time.Duration {
	wait := time.Duration(random * float64(r.ceiling(failures)))
	if asked > 0 {
		asked = min(asked, r.MaxDelay)
		wait = max(wait, asked+time.Duration(random*float64(asked)/10))
	}
	return wait
}

func random() float64 { return rand.Float64() }

// uncalled counts, for each delivery, the attempts known here whose calls were not made. They are among the delivery's attempts, and
// must not lengthen its wait. What other replicas have claimed in between is not known; then it waits somewhat longer.
type uncalled map[uuid.UUID]int64

// maxUncalled bounds what is remembered. Others have delivered most of it by then.
const maxUncalled = 4096

// note takes a delivery as it was claimed, with the error of the attempt before.
func (u uncalled) note(d *store.Delivery) {
	if d.LastError != reasonUnsent {
		return
	}
	if len(u) >= maxUncalled {
		clear(u)
	}
	u[d.ID]++
}

// calls is how many of the delivery's attempts called the destination, the latest one included.
func (u uncalled) calls(d *store.Delivery) int64 { return d.Attempts - u[d.ID] }
