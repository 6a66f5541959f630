package acceptance_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// entitlement is nil where there is none.
func (b *bundle) entitlement(ctx context.Context, tenant string, e effect) (*pb.Entitlement, error) {
	r, err := b.GetEntitlement(ctx, &pb.GetEntitlementRequest{TenantId: tenant, Name: &pb.GetEntitlementRequest_BusinessKey{
		BusinessKey: &pb.BusinessKey{InvoiceId: e.invoice, EntitlementType: e.typeName},
	}})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	return r.GetEntitlement(), err
}

// The pairs' calls are about one invoice and one entitlement of it, with a second one that only the refund touches.
var (
	pairEffect = effect{"INV-1", "team_access"}
	pairOther  = effect{"INV-1", "sso"}

	pairGrant     = ledgerCall{method: callGrant, key: "grant", effect: pairEffect, seats: "10", state: paid, version: 1}
	pairRefund    = ledgerCall{method: callRecord, key: "refund", effect: pairEffect, state: refunded, version: 2}
	pairReverse   = ledgerCall{method: callReverse, key: "reverse", effect: pairEffect, reason: "disputed"}
	pairReinstate = ledgerCall{method: callReinstate, key: "reinstate", effect: pairEffect, reason: "dispute won"}
	pairPaidAgain = ledgerCall{method: callRecord, key: "paid-again", effect: pairEffect, state: paid, version: 3}
)

// again is the same request under another key.
func again(c ledgerCall) ledgerCall {
	c.key += "-again"
	return c
}

// pairBefore are what may have happened before a pair; the pair's replays are then replays of that.
func pairBefore() map[string][]ledgerCall {
	other := pairGrant
	other.key, other.effect = "other", pairOther
	return map[string][]ledgerCall{
		"nothing":             {},
		"granted":             {other, pairGrant},
		"refunded":            {other, pairGrant, pairRefund},
		"reversed":            {pairGrant, pairReverse},
		"reversed, refunded":  {other, pairGrant, pairReverse, pairRefund},
		"refunded, paid":      {pairGrant, pairRefund, pairPaidAgain},
		"reinstated":          {other, pairGrant, pairReverse, pairReinstate},
		"reinstated, refund2": {pairGrant, pairRefund, pairPaidAgain, pairReinstate},
		"refunded first":      {pairRefund},
	}
}

// pairCalls are each effect, the same effect under another key, and the same key with another payload.
func pairCalls() []ledgerCall {
	calls := []ledgerCall{pairGrant, pairRefund, pairReverse, pairReinstate}
	for _, c := range calls[:4] {
		calls = append(calls, again(c))
	}
	grant, refund, reverse := pairGrant, pairRefund, pairReverse
	grant.seats, refund.state, reverse.reason = "11", voided, "fraud"
	return append(calls, grant, refund, reverse, pairPaidAgain)
}

// Every pair of calls, in both orders, one after the other, and then both once more: each answer is that of the model.
func TestPairs_OneAfterTheOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := make(chan struct{}, 8)
	var running sync.WaitGroup
	for name, before := range pairBefore() {
		for i, first := range pairCalls() {
			for j, second := range pairCalls() {
				limit <- struct{}{}
				running.Go(func() {
					defer func() { <-limit }()
					tenant := fmt.Sprintf("%s:%d:%d", strings.ReplaceAll(name, " ", "_"), i, j)
					m := newLedgerModel()
					calls := append(append([]ledgerCall{}, before...), first, second, first, second,
						ledgerCall{method: callLook, key: first.key}, ledgerCall{method: callLookEffect, effect: pairEffect})
					for n, c := range calls {
						want := m.apply(c)
						if got, err := b.send(t.Context(), tenant, c); err != nil || got != want {
							t.Errorf("%s: call %d of %v:\ngot  %s, %v\nwant %s", name, n+1, calls, got, err, want)
							return
						}
					}
				})
			}
		}
	}
	running.Wait()
	b.wantWhole(t)
	b.wantOrdered(t)
}

// porcupineModel takes the sequential model for one tenant's histories.
//
// One call is not a single point in time: a grant that meets its effect under another key is answered from a read that takes no lock,
// and its key is bound to the winner a moment later. What reads the entitlement may come between the two, and so may another use of
// the key. So it stands in a history as two calls, a grant and a bind; nothing else is let off.
var porcupineModel = porcupine.Model{
	Init: func() any { return newLedgerModel() },
	Step: func(state, input, output any) (bool, any) {
		next, c := state.(ledgerModel).clone(), input.(ledgerCall)
		if c.method == callBind {
			_, known := next.operations[c.key]
			c.method = callGrant
			return !known && meetsEffect(next.apply(c)), next
		}
		answer := next.apply(c)
		if c.method == callGrant && meetsEffect(answer) {
			delete(next.operations, c.key)
		}
		return answer == output.(string), next
	},
	Equal:             func(a, b any) bool { return a.(ledgerModel).equal(b.(ledgerModel)) },
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%v -> %v", input, output) },
}

const callBind ledgerMethod = "bind"

func meetsEffect(answer string) bool {
	return strings.HasPrefix(answer, "ALREADY_APPLIED by BUSINESS_KEY")
}

// history records the calls of one tenant, of whoever makes them.
type history struct {
	tenant string
	begin  time.Time

	mu    sync.Mutex
	calls []porcupine.Operation
	ids   map[effect]string
}

func newHistory(tenant string) *history {
	return &history{tenant: tenant, begin: time.Now(), ids: map[effect]string{}}
}

func (h *history) send(t testing.TB, b *bundle, client int, c ledgerCall) {
	called := time.Since(h.begin)
	got, err := b.send(t.Context(), h.tenant, c)
	returned := time.Since(h.begin)
	if err != nil {
		t.Errorf("%s: %v: %v", h.tenant, c, err)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	made := porcupine.Operation{ClientId: client, Input: c, Call: called.Nanoseconds(), Output: got, Return: returned.Nanoseconds()}
	h.calls = append(h.calls, made)
	if c.method == callGrant && meetsEffect(got) {
		c.method = callBind
		made.Input, made.Output = c, ""
		h.calls = append(h.calls, made)
	}
}

// id is that of an entitlement that some caller has seen.
func (h *history) id(e effect) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ids[e]
}

func (h *history) saw(e effect, id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ids[e] = id
}

// check looks for an order of the calls, within the time that each took, in which the model gives every answer.
func (h *history) check(t testing.TB) {
	t.Helper()
	switch porcupine.CheckOperationsTimeout(porcupineModel, h.calls, time.Minute) {
	case porcupine.Illegal:
		var text strings.Builder
		for _, c := range h.calls {
			fmt.Fprintf(&text, "\n%9d-%9d µs, caller %d: %v -> %v", c.Call/1000, c.Return/1000, c.ClientId, c.Input, c.Output)
		}
		t.Errorf("%s: no order of these calls gives these answers:%s", h.tenant, text.String())
	case porcupine.Unknown:
		t.Errorf("%s: the history of %d calls is too long to be judged", h.tenant, len(h.calls))
	}
}

// Every pair of calls at the same instant, through two servers, and then both once more.
func TestPairs_AtTheSameInstant(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds := 1
	if soak {
		rounds = 30
	}
	calls := pairCalls()
	var histories []*history
	limit := make(chan struct{}, 8)
	var running sync.WaitGroup
	for round := range rounds {
		for name, before := range pairBefore() {
			for i, first := range calls {
				for _, second := range calls[i:] {
					h := newHistory(fmt.Sprintf("%s:%d:%d", strings.ReplaceAll(name, " ", "_"), round, len(histories)))
					histories = append(histories, h)
					limit <- struct{}{}
					running.Go(func() {
						defer func() { <-limit }()
						for _, c := range before {
							h.send(t, servers[round%2], 0, c)
						}
						var pair sync.WaitGroup
						pair.Go(func() { h.send(t, servers[0], 1, first) })
						pair.Go(func() { h.send(t, servers[1], 2, second) })
						pair.Wait()
						h.send(t, servers[1], 0, first)
						h.send(t, servers[0], 0, second)
						h.send(t, servers[0], 0, ledgerCall{method: callCheck, effect: pairEffect})
						h.check(t)
					})
				}
			}
		}
		running.Wait()
		if t.Failed() {
			break
		}
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}

// randomCall draws from few keys, invoices and types, so that the calls meet.
func randomCall(random *rand.Rand, keys int) ledgerCall {
	c := ledgerCall{
		key:     fmt.Sprintf("K%d", random.IntN(keys)),
		effect:  effect{fmt.Sprintf("INV-%d", random.IntN(2)), fmt.Sprintf("type%d", random.IntN(2))},
		seats:   "10",
		version: int64(random.IntN(6)),
		state:   paid,
		reason:  fmt.Sprintf("reason %d", random.IntN(8)/7),
	}
	switch n := random.IntN(20); {
	case n < 5:
		c.method = callGrant
		if random.IntN(8) == 0 {
			c.seats = "11"
		}
		if random.IntN(8) == 0 {
			c.state = []pb.InvoiceState{unpaid, voided, refunded}[random.IntN(3)]
		}
	case n < 9:
		c.method, c.version = callRecord, 1+c.version
		c.state = []pb.InvoiceState{unpaid, paid, paid, voided, refunded, refunded}[random.IntN(6)]
	case n < 12:
		c.method = callReverse
	case n < 15:
		c.method = callReinstate
	case n < 19:
		c.method = []ledgerMethod{callLook, callLookGrant, callLookEffect, callRead}[random.IntN(4)]
	default:
		c.method = callCheck
	}
	return c
}

// TestHistories_AgreeWithOneAfterTheOther makes random calls of every kind at once, by several callers through two servers, and asks
// whether there is an order in which a single caller would have been told the same.
func TestHistories_AgreeWithOneAfterTheOther(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	count := 80
	if soak {
		count = 8000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const atOnce, callers, each = 4, 4, 7
	limit := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	var told sync.Map
	for n := range count {
		limit <- struct{}{}
		if t.Failed() {
			break
		}
		running.Go(func() {
			defer func() { <-limit }()
			h := newHistory(fmt.Sprintf("t%d", n))
			var calling sync.WaitGroup
			for caller := range callers {
				calling.Go(func() {
					random := rand.New(rand.NewPCG(seed, uint64(n*callers+caller)))
					for range each {
						c := randomCall(random, 14)
						b := servers[random.IntN(len(servers))]
						if random.IntN(2) == 0 && (c.method == callReverse || c.method == callReinstate) {
							c.id = h.id(c.effect)
						}
						h.send(t, b, caller, c)
						if h.id(c.effect) == "" && c.method == callRead {
							if e, err := b.entitlement(t.Context(), h.tenant, c.effect); err == nil && e != nil {
								h.saw(c.effect, e.GetEntitlementId())
							}
						}
					}
				})
			}
			calling.Wait()
			h.check(t)
			for _, c := range h.calls {
				answer, _, _ := strings.Cut(c.Output.(string), ",")
				answer, _, _ = strings.Cut(answer, " with ")
				told.Store(string(c.Input.(ledgerCall).method)+" "+answer, true)
			}
		})
	}
	running.Wait()
	for _, want := range []string{
		"grant NEWLY_APPLIED", "grant ALREADY_APPLIED by IDEMPOTENCY_KEY", "grant ALREADY_APPLIED by BUSINESS_KEY",
		"grant CONFLICTING_PAYLOAD by IDEMPOTENCY_KEY", "grant CONFLICTING_PAYLOAD by BUSINESS_KEY", "grant REJECTED: INVOICE_REVERSED",
		"record NEWLY_APPLIED", "record ALREADY_APPLIED by BUSINESS_KEY", "record CONFLICTING_PAYLOAD by BUSINESS_KEY", "record REJECTED: STALE_VERSION",
		"reverse NEWLY_APPLIED", "reverse ALREADY_APPLIED by BUSINESS_KEY", "reinstate NEWLY_APPLIED", "reinstate REJECTED: INVOICE_REVERSED",
	} {
		if _, ok := told.Load(want); !ok {
			t.Errorf("no caller was told %s: the histories are too tame", want)
		}
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}
