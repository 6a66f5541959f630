package acceptance_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// atOnce makes the calls at the same instant, as far as that goes, and waits for all.
func atOnce(calls ...func()) {
	start := make(chan struct{})
	var running sync.WaitGroup
	for _, call := range calls {
		running.Go(func() {
			<-start
			call()
		})
	}
	close(start)
	running.Wait()
}

// A refund and its payment's grants arrive at the same instant, through two servers. Without a lock on the invoice both sides would
// look, find nothing of the other, and commit: a customer who was refunded and keeps what was paid for.
func TestRefund_AtTheSameInstantAsTheGrant(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds, tenants := 300, 4
	if soak {
		rounds = 10_000
	}
	var mu sync.Mutex
	granted, refused := 0, 0
	var running sync.WaitGroup
	for tenant := range tenants {
		running.Go(func() {
			tenant := fmt.Sprint("t", tenant)
			for round := range rounds / tenants {
				invoice := fmt.Sprint("INV-", round)
				here, there := servers[round%2], servers[(round+1)%2]
				if round%2 == 0 {
					// Half of the invoices are known before, so that the row to be locked is there.
					here.recordInvoice(t, tenant, invoice, unpaid, 1)
				}
				var grants [2]*pb.GrantEntitlementResponse
				var refund *pb.RecordInvoiceStateResponse
				var errs [3]error
				give := func(i int, b *bundle) func() {
					return func() {
						grants[i], errs[i] = b.GrantEntitlement(t.Context(), grant(tenant, fmt.Sprintf("K%d-%d", round, i), invoice, ofType(fmt.Sprint("type", i)), evidence(paid, 2)))
					}
				}
				take := func() {
					refund, errs[2] = there.RecordInvoiceState(t.Context(), recording(tenant, fmt.Sprint("F", round), invoice, refunded, 3))
				}
				calls := []func(){give(0, here), give(1, there), take}
				rand.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
				atOnce(calls...)

				want := []string{}
				for i, r := range grants {
					switch {
					case errs[i] != nil:
						t.Errorf("%s of %s: %v", invoice, tenant, errs[i])
					case r.GetOutcome() == newly:
						want = append(want, r.GetEntitlement().GetEntitlementId())
					case r.GetRejection().GetReason() != pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED:
						t.Errorf("%s of %s: %s", invoice, tenant, told(r))
					}
				}
				took := []string{}
				for _, e := range refund.GetRecorded().GetReversed() {
					took = append(took, e.GetEntitlementId())
				}
				slices.Sort(want)
				slices.Sort(took)
				if errs[2] != nil || refund.GetOutcome() != newly || !slices.Equal(took, want) {
					t.Errorf("%s of %s: the refund was told %v, %v, and the grants had made %v", invoice, tenant, refund, errs[2], want)
				}
				mu.Lock()
				granted, refused = granted+len(want), refused+2-len(want)
				mu.Unlock()
			}
		})
	}
	running.Wait()
	t.Logf("%d grants came before their refund, %d after it", granted, refused)
	if granted == 0 || refused == 0 {
		t.Error("one side always came first: nothing was raced")
	}
	if n := value[int](t, one, `SELECT count(*) FROM entitlements WHERE state = 1`); n != 0 {
		t.Errorf("%d entitlements of refunded invoices are active", n)
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}

// One customer's support turns an entitlement back and forth while billing refunds and pays its invoice again, all at once. Whatever
// wins, the entitlement never stands while its invoice does not.
func TestReinstate_AtTheSameInstantAsTheRefund(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds := 120
	if soak {
		rounds = 5000
	}
	back, refused := 0, 0
	for round := range rounds {
		invoice := fmt.Sprint("INV-", round)
		here, there := servers[round%2], servers[(round+1)%2]
		here.want(t, newly, byNothing, grant("t1", "K"+invoice, invoice))
		there.turn(t, newly, byNothing, reversal("t1", "gone-"+invoice, invoice, "team_access"))
		var reinstated *pb.ReinstateEntitlementResponse
		var refund *pb.RecordInvoiceStateResponse
		var errs [2]error
		atOnce(
			func() {
				reinstated, errs[0] = here.ReinstateEntitlement(t.Context(), reinstatement("t1", "back-"+invoice, invoice, "team_access"))
			},
			func() {
				refund, errs[1] = there.RecordInvoiceState(t.Context(), recording("t1", "F-"+invoice, invoice, voided, 2))
			},
		)
		switch {
		case errs[0] != nil || errs[1] != nil || refund.GetOutcome() != newly:
			t.Fatalf("%s: %v, refund: %v", invoice, errs, refund)
		case reinstated.GetOutcome() == newly && refund.GetRecorded().GetReversedCount() == 1:
			back++
		case reinstated.GetRejection().GetReason() == pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED && refund.GetRecorded().GetReversedCount() == 0:
			refused++
		default:
			t.Fatalf("%s: %v, refund: %v", invoice, reinstated, refund)
		}
	}
	t.Logf("%d reinstatements came before the refund, %d after it", back, refused)
	one.wantWhole(t)
	one.wantOrdered(t)
}

// Two replicas get the same mixed calls in opposite orders, over and over: grants, states, reversals and reinstatements that share
// keys, effects and invoices. PostgreSQL would answer the locks of another design with a deadlock; none may reach a caller.
func TestReplicas_MixedCallsInOppositeOrdersDoNotDeadlock(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds := 60
	if soak {
		rounds = 5000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for round := range rounds {
		tenant := fmt.Sprint("t", round%3)
		var calls []ledgerCall
		for range 16 {
			c := randomCall(random, 12)
			if c.method == callRecord {
				// So that the records go on moving.
				c.version += int64(round)
			}
			c.key, c.effect.invoice = fmt.Sprintf("%s-%d", c.key, round/2), fmt.Sprintf("INV-%d-%d", round/12, random.IntN(4))
			calls = append(calls, c)
		}
		var sent []func()
		for i, b := range servers {
			order := slices.Clone(calls)
			if i == 1 {
				slices.Reverse(order)
			}
			for _, c := range order {
				sent = append(sent, func() {
					if _, err := b.send(t.Context(), tenant, c); err != nil {
						t.Errorf("round %d: %v: %v: %v", round, c, err, status.Convert(err).Details())
					}
				})
			}
		}
		atOnce(sent...)
		if t.Failed() {
			break
		}
	}
	t.Logf("PostgreSQL resolved %d deadlocks", value[int](t, one, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`))
	if n := value[int](t, one, `SELECT count(DISTINCT kind) FROM entries`); n != 3 {
		t.Errorf("the calls made %d kinds of entries: they are too tame", n)
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}

// Two operations at a time, each of which locks two things: a batch of grants on several invoices against states and reversals of the
// same invoices in the other order.
func TestReplicas_BatchesAgainstRefundsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	one := setup(t)
	two := serveOn(t, one.url, one.url)
	rounds := 60
	if soak {
		rounds = 5000
	}
	const invoices = 6
	for round := range rounds {
		batch := &pb.BatchGrantEntitlementsRequest{}
		name := func(i int) string { return fmt.Sprintf("INV-%d-%d", round, i) }
		for i := range invoices {
			for _, typeName := range []string{"team_access", "sso"} {
				batch.Requests = append(batch.Requests, grant("t1", fmt.Sprintf("K-%s-%s", name(i), typeName), name(i), ofType(typeName), evidence(paid, 1)))
			}
		}
		back := &pb.BatchGrantEntitlementsRequest{Requests: slices.Clone(batch.Requests)}
		slices.Reverse(back.Requests)
		calls := []func(){
			func() { one.wantBatch(t, batch) },
			func() { two.wantBatch(t, back) },
		}
		for i := invoices - 1; i >= 0; i-- {
			for _, b := range []*bundle{one, two} {
				calls = append(calls, func() {
					if _, err := b.RecordInvoiceState(t.Context(), recording("t1", "F-"+name(i), name(i), refunded, 2)); err != nil {
						t.Errorf("refund %s: %v", name(i), err)
					}
				}, func() {
					if _, err := b.ReverseEntitlement(t.Context(), reversal("t1", "CASE-"+name(i), name(i), "sso")); err != nil {
						t.Errorf("reverse %s: %v", name(i), err)
					}
				})
			}
		}
		atOnce(calls...)
		if t.Failed() {
			break
		}
	}
	if n := value[int](t, one, `SELECT count(*) FROM entitlements WHERE state = 1`); n != 0 {
		t.Errorf("%d entitlements of refunded invoices are active", n)
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}

// wantBatch sends grants of which each is granted, was granted, or came after its refund.
func (b *bundle) wantBatch(t testing.TB, r *pb.BatchGrantEntitlementsRequest) {
	resp, err := b.BatchGrantEntitlements(t.Context(), r)
	if err != nil {
		t.Errorf("batch: %v", err)
	}
	for _, item := range resp.GetResponses() {
		if o := item.GetOutcome(); o != newly && o != already && item.GetRejection().GetReason() != pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED {
			t.Errorf("batch: %s", told(item))
		}
	}
}

// A reversal asks for an entitlement that is only just being granted by another replica: when its invoice is to be locked there is no
// row of it, and a moment later, when the ledger is read, the entitlement is there. It must not be turned without the lock: the entry
// would name no version of the invoice, and nothing would keep a refund apart from it.
func TestReverse_AtTheSameInstantAsTheGrant(t *testing.T) {
	t.Parallel()
	one := setup(t)
	servers := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds := 700
	if soak {
		rounds = 20_000
	}
	var gone, missed atomic.Int64
	limit := make(chan struct{}, 4)
	var running sync.WaitGroup
	for round := range rounds {
		limit <- struct{}{}
		running.Go(func() {
			defer func() { <-limit }()
			invoice := fmt.Sprint("INV-", round)
			calls := []func(){func() {
				if r, err := servers[round%2].GrantEntitlement(t.Context(), grant("t1", "K-"+invoice, invoice, evidence(paid, 5))); err != nil || r.GetOutcome() != newly {
					t.Errorf("grant %s: %v %v", invoice, r, err)
				}
			}}
			for i, b := range servers {
				calls = append(calls, func() {
					r, err := b.ReverseEntitlement(t.Context(), reversal("t1", fmt.Sprintf("CASE%d-%s", i, invoice), invoice, "team_access"))
					switch {
					case err != nil:
						t.Errorf("reverse %s: %v", invoice, err)
					case r.GetOutcome() == newly:
						gone.Add(1)
					case r.GetRejection().GetReason() == pb.RejectionReason_REJECTION_REASON_NOT_GRANTED:
						missed.Add(1)
					case r.GetOutcome() != already:
						t.Errorf("reverse %s: %v", invoice, r)
					}
				})
			}
			atOnce(calls...)
			// Whatever was looked up before the grant was there, the same requests are known again.
			for i := range servers {
				r, err := servers[round%2].ReverseEntitlement(t.Context(), reversal("t1", fmt.Sprintf("CASE%d-%s", i, invoice), invoice, "team_access"))
				if err != nil || r.GetOutcome() != newly && r.GetOutcome() != already {
					t.Errorf("reverse %s again: %v %v", invoice, r, err)
				}
			}
		})
	}
	running.Wait()
	t.Logf("%d reversals came after the grant, %d before it", gone.Load(), missed.Load())
	if n := value[int](t, one, `SELECT count(*) FROM entries WHERE invoice_version <> 5`); n != 0 {
		t.Errorf("%d entries name another version of the invoice than the one on record", n)
	}
	one.wantWhole(t)
	one.wantOrdered(t)
}
