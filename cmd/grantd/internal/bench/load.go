// Package bench drives a server with grants and is the authority for how grantd's speed is measured.
package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/grantd/grantd/cmd/grantd/internal/latency"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	// MaxBatch is how many grants the contract allows in one call.
	MaxBatch = 1000
	// fillBatch is the size of the calls that make what is replayed.
	fillBatch = 500
	// callTimeout bounds a call, so that a server that hangs ends the run.
	callTimeout = 30 * time.Second
	// refusedPause keeps a caller that is refused at once from doing nothing but that.
	refusedPause = 5 * time.Millisecond
)

// Point is one measurement.
type Point struct {
	// Callers is how many calls are under way at once.
	Callers int
	// Batch is how many grants a call carries; 0 calls GrantEntitlement.
	Batch int
	// Replay sends requests that were applied before.
	Replay bool
	// Duration ends the point, and so does Count requests; one of them may be 0.
	Duration time.Duration
	Count    int
}

// Name says what the point measures, for example "unary grants, 32 callers".
func (p Point) Name() string {
	kind, callers := "grants", "callers"
	if p.Replay {
		kind = "replays"
	}
	if p.Callers == 1 {
		callers = "caller"
	}
	if p.Batch > 0 {
		return fmt.Sprintf("batches of %d %s, %d %s", p.Batch, kind, p.Callers, callers)
	}
	return fmt.Sprintf("unary %s, %d %s", kind, p.Callers, callers)
}

// Result is what a point measured. Latencies are those of calls that were answered.
type Result struct {
	Name      string  `json:"name"`
	Callers   int     `json:"callers"`
	Batch     int     `json:"batch,omitempty"`
	Replay    bool    `json:"replay"`
	Seconds   float64 `json:"seconds"`
	Requests  uint64  `json:"requests"` // answered
	PerSecond float64 `json:"per_second"`
	P50Millis float64 `json:"p50_ms"`
	P99Millis float64 `json:"p99_ms"`
	// P999Millis is the 99.9th percentile.
	P999Millis float64           `json:"p99_9_ms"`
	MaxMillis  float64           `json:"max_ms"`
	Outcomes   map[string]uint64 `json:"outcomes"`
	// Errors counts calls without an answer, by status and reason.
	Errors map[string]uint64 `json:"errors,omitempty"`
}

// Unexpected returns what is neither NEWLY_APPLIED nor ALREADY_APPLIED: refusals, by outcome or status.
func (r *Result) Unexpected() map[string]uint64 {
	found := make(map[string]uint64)
	for name, n := range r.Outcomes {
		if name != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED.String() && name != entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED.String() {
			found[name] += n
		}
	}
	for name, n := range r.Errors {
		found[name] += n
	}
	return found
}

// Load sends generated grants over some connections. Its keys are its own: another Load makes others.
type Load struct {
	conns     []*grpc.ClientConn
	generator *generator
	next      atomic.Uint64 // number of the next new grant

	filledFrom, filled uint64 // numbers that can be replayed
}

// DialOptions are those that every connection of a Load must have. There are no retries: what is refused is counted.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec())),
	}
}

// NewLoad does not close the connections.
func NewLoad(conns []*grpc.ClientConn) *Load {
	return &Load{conns: conns, generator: newGenerator(rand.Uint64())}
}

// Fill makes count grants, for points that replay. It fails unless each was applied.
func (l *Load) Fill(ctx context.Context, count int) error {
	from := l.next.Load()
	result, err := l.Run(ctx, Point{Callers: 2, Batch: min(fillBatch, count), Count: count})
	if err != nil {
		return err
	}
	applied := result.Outcomes[entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED.String()]
	if applied < uint64(count) || len(result.Unexpected()) > 0 {
		return fmt.Errorf("%d of %d new grants applied: %v %v", applied, count, result.Outcomes, result.Errors)
	}
	l.filledFrom, l.filled = from, l.next.Load()-from
	return nil
}

// caller is one goroutine's own: nothing in its loop is shared but the number of the next request.
type caller struct {
	conn     *grpc.ClientConn
	maker    maker
	requests []*entitlementv1.GrantEntitlementRequest
	message  proto.Message
	method   string

	latency  latency.Histogram
	outcomes outcomes
	errors   map[string]uint64
}

func (l *Load) newCaller(p Point, conn *grpc.ClientConn) *caller {
	c := &caller{conn: conn, maker: maker{generator: l.generator}, errors: make(map[string]uint64)}
	for range max(p.Batch, 1) {
		c.requests = append(c.requests, newRequest())
	}
	if p.Batch == 0 {
		c.message, c.method = c.requests[0], entitlementv1.EntitlementService_GrantEntitlement_FullMethodName
	} else {
		c.message = &entitlementv1.BatchGrantEntitlementsRequest{Requests: c.requests}
		c.method = entitlementv1.EntitlementService_BatchGrantEntitlements_FullMethodName
	}
	return c
}

// Run measures one point. It fails only if the context ends or the point makes no sense.
func (l *Load) Run(ctx context.Context, p Point) (*Result, error) {
	switch {
	case p.Callers < 1:
		return nil, fmt.Errorf("%d callers: at least one is needed", p.Callers)
	case p.Batch < 0 || p.Batch > MaxBatch:
		return nil, fmt.Errorf("batches of %d: 0 to %d are possible", p.Batch, MaxBatch)
	case p.Duration <= 0 && p.Count <= 0:
		return nil, fmt.Errorf("%s: neither a duration nor a count", p.Name())
	case p.Replay && l.filled == 0:
		return nil, fmt.Errorf("%s: nothing to replay", p.Name())
	}

	callers := make([]*caller, p.Callers)
	for i := range callers {
		callers[i] = l.newCaller(p, l.conns[i%len(l.conns)])
	}
	var (
		taken atomic.Uint64 // requests that a caller has taken on
		stop  atomic.Bool
		start = make(chan struct{})
		group sync.WaitGroup
	)
	for _, c := range callers {
		group.Go(func() {
			<-start
			for !stop.Load() && ctx.Err() == nil {
				size := uint64(len(c.requests))
				before := taken.Add(size) - size
				if p.Count > 0 && before >= uint64(p.Count) {
					return
				}
				if p.Replay {
					for i, request := range c.requests {
						c.maker.fill(request, l.filledFrom+(before+uint64(i))%l.filled)
					}
				} else {
					from := l.next.Add(size) - size
					for i, request := range c.requests {
						c.maker.fill(request, from+uint64(i))
					}
				}
				c.call(ctx)
			}
		})
	}
	runtime.GC()
	begin := time.Now()
	if p.Duration > 0 {
		timer := time.AfterFunc(p.Duration, func() { stop.Store(true) })
		defer timer.Stop()
	}
	close(start)
	group.Wait()
	elapsed := time.Since(begin)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return summarise(p, callers, elapsed), nil
}

func (c *caller) call(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	begin := time.Now()
	err := c.conn.Invoke(ctx, c.method, c.message, &c.outcomes)
	if err == nil {
		c.latency.Record(time.Since(begin))
		return
	}
	c.errors[errorName(err)]++
	time.Sleep(refusedPause)
}

// errorName is the status and, where it says so, the reason.
func errorName(err error) string {
	st := status.Convert(err)
	name := st.Code().String()
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return strings.TrimSpace(name + " " + info.GetReason())
		}
	}
	return name
}

func summarise(p Point, callers []*caller, elapsed time.Duration) *Result {
	var times latency.Histogram
	r := &Result{
		Name: p.Name(), Callers: p.Callers, Batch: p.Batch, Replay: p.Replay,
		Seconds: elapsed.Seconds(), Outcomes: make(map[string]uint64), Errors: make(map[string]uint64),
	}
	for _, c := range callers {
		times.Merge(&c.latency)
		r.Requests += c.outcomes.total()
		c.outcomes.add(r.Outcomes)
		for name, n := range c.errors {
			r.Errors[name] += n
		}
	}
	r.PerSecond = float64(r.Requests) / max(r.Seconds, 1e-9)
	r.P50Millis, r.P99Millis = millis(times.Percentile(50)), millis(times.Percentile(99))
	r.P999Millis, r.MaxMillis = millis(times.Percentile(99.9)), millis(times.Max())
	return r
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
