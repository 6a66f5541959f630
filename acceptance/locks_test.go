package acceptance_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// elsewhere writes a grant as another replica's transaction would, and does not commit.
func (b *bundle) elsewhere(t testing.TB, r *pb.GrantEntitlementRequest) pgx.Tx {
	t.Helper()
	g := store.Grant{
		TenantID: r.GetGrant().GetTenantId(), InvoiceID: r.GetGrant().GetInvoiceId(),
		EntitlementType: r.GetGrant().GetEntitlementType(), Scope: r.GetGrant().GetScope(),
	}
	sum := g.Fingerprint()
	scope, err := json.Marshal(g.Scope)
	if err != nil {
		t.Fatal(err)
	}
	tx := b.begin(t)
	_, err = tx.Exec(t.Context(), `
		WITH row AS (
		    SELECT $1::text AS tenant, $2::text AS key, $3::text AS invoice, $4::text AS type, $5::jsonb AS scope, $6::bytea AS sum,
		           gen_random_uuid() AS id, gen_random_uuid() AS attempt, clock_timestamp() AS now),
		i AS (INSERT INTO invoices SELECT tenant, invoice, 2, 1, key, now FROM row),
		o AS (INSERT INTO operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
		                              attempt_id, event_id, source, caller, applied_at)
		      SELECT tenant, key, 1, sum, 1, invoice, id, 1, attempt, '', '', '', now FROM row),
		e AS (INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint,
		                                recipe, operation_key, granted_at, state, version, changed_at)
		      SELECT tenant, id, invoice, type, 0, scope, sum, 1, key, now, 1, 1, now FROM row),
		n AS (INSERT INTO entries SELECT tenant, id, 1, 1, key, 1, '', '', now FROM row)
		INSERT INTO attempts (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, invoice_id, entitlement_type,
		                      operation_version, event_id, source, caller)
		SELECT tenant, now, attempt, key, 1, 1, 0, 0, invoice, type, 0, '', '', '' FROM row`,
		g.TenantID, r.GetIdempotencyKey(), g.InvoiceID, g.EntitlementType, string(scope), sum[:])
	if err != nil {
		t.Fatalf("writing a grant elsewhere: %v", err)
	}
	return tx
}

// refundSQL reverses what is granted to a tenant, as the recording of a refund would.
const refundSQL = `
WITH i AS (UPDATE invoices SET state = 4, version = 2, recorded_by = 'refund', recorded_at = clock_timestamp() WHERE tenant_id = $1
           RETURNING invoice_id),
     a AS (INSERT INTO attempts (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, invoice_id, entitlement_type,
                                 operation_version, event_id, source, caller)
           SELECT $1::text, clock_timestamp(), gen_random_uuid(), 'refund', 2, 1, 0, 0, invoice_id, '', 0, '', '', '' FROM i
           RETURNING invoice_id, attempt_id, at),
     o AS (INSERT INTO operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, invoice_state, invoice_version,
                                   attempt_id, event_id, source, caller, applied_at)
           SELECT $1, 'refund', 2, '', 1, invoice_id, 4, 2, attempt_id, '', '', '', at FROM a),
     e AS (UPDATE entitlements SET state = 2, version = 2, changed_at = a.at FROM a WHERE tenant_id = $1
           RETURNING entitlement_id, changed_at)
INSERT INTO entries SELECT $1, entitlement_id, 2, 2, 'refund', 2, '', 'refunded', changed_at FROM e`

// Another session has written the winner's rows and takes a second and a half to commit, or gives up, or takes longer than the
// caller has. Whoever waits gets the answer that the end makes true, never an internal error; also when a refund came behind the
// winner, so that the row that was waited for says REFUNDED.
func TestHeldLock_EndsInTheTrueAnswer(t *testing.T) {
	t.Parallel()
	const held = 1500 * time.Millisecond
	commit := func(ctx context.Context, tx pgx.Tx, _ string) error { return tx.Commit(ctx) }
	rollBack := func(ctx context.Context, tx pgx.Tx, _ string) error { return tx.Rollback(ctx) }
	refundAndCommit := func(ctx context.Context, tx pgx.Tx, tenant string) error {
		_, err := tx.Exec(ctx, refundSQL, tenant)
		return errors.Join(err, tx.Commit(ctx))
	}
	cases := []struct {
		name         string
		key, invoice string // of the winner; the caller's are K and INV-1
		seats        string
		end          func(context.Context, pgx.Tx, string) error
		outcome      pb.Outcome
		by           pb.MatchedBy
	}{
		{"the same request commits", "K", "INV-1", "10", commit, already, byKey},
		{"the same request rolls back", "K", "INV-1", "10", rollBack, newly, byNothing},
		{"the same request commits, and a refund", "K", "INV-1", "10", refundAndCommit, already, byKey},
		{"the effect under another key commits", "K0", "INV-1", "10", commit, already, byBusinessKey},
		{"the effect under another key rolls back", "K0", "INV-1", "10", rollBack, newly, byNothing},
		{"the effect under another key commits, and a refund", "K0", "INV-1", "10", refundAndCommit, already, byBusinessKey},
		{"another payload under the key commits", "K", "INV-1", "11", commit, conflict, byKey},
		{"another payload under the key rolls back", "K", "INV-1", "11", rollBack, newly, byNothing},
		{"another payload under the key commits, and a refund", "K", "INV-1", "11", refundAndCommit, conflict, byKey},
		{"another payload of the effect commits", "K0", "INV-1", "11", commit, conflict, byBusinessKey},
		{"another payload of the effect commits, and a refund", "K0", "INV-1", "11", refundAndCommit, conflict, byBusinessKey},
		{"the key for another invoice commits", "K", "INV-2", "10", commit, conflict, byKey},
		{"the key for another invoice rolls back", "K", "INV-2", "10", rollBack, newly, byNothing},
	}
	b := setup(t, func(s *settings) { s.store.SlowLanes = len(cases) })
	b.want(t, newly, byNothing, grant("warm", "K", "INV"))
	tenant := func(i int) string { return fmt.Sprintf("t%d", i) }
	var holders []pgx.Tx
	var waiting []<-chan result
	since := time.Now()
	for i, test := range cases {
		holders = append(holders, b.elsewhere(t, grant(tenant(i), test.key, test.invoice, seats(test.seats))))
		waiting = append(waiting, b.start(t, grant(tenant(i), "K", "INV-1")))
	}
	b.waitBlocked(t, len(cases))

	short, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var hurried sync.WaitGroup
	for i, test := range cases {
		hurried.Go(func() {
			_, err := b.GrantEntitlement(short, grant(tenant(i), "K", "INV-1"))
			if code := status.Code(err); code != codes.DeadlineExceeded && code != codes.Unavailable {
				t.Errorf("%s: the caller with 500 ms: %v", test.name, err)
			}
		})
	}
	hurried.Wait()
	time.Sleep(held - time.Since(since))
	for i, test := range cases {
		if err := test.end(t.Context(), holders[i], tenant(i)); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
	}
	for i, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			got := <-waiting[i]
			if got.err != nil || got.resp.GetOutcome() != test.outcome || got.resp.GetMatchedBy() != test.by {
				t.Fatalf("after the wait: %v %v, want %v %v", got.resp, got.err, test.outcome, test.by)
			}
			wantShape(t, got.resp)
			if test.outcome == conflict {
				b.want(t, conflict, test.by, grant(tenant(i), "K", "INV-1"))
				return
			}
			again := b.want(t, already, byKey, grant(tenant(i), "K", "INV-1"))
			wantSame(t, "the result", again.GetEntitlement(), got.resp.GetEntitlement())
		})
	}
	b.wantWhole(t)
}

// One tenant's rows are held for a second and a half, one or many, and calls for them come in all the time. The others' grants go
// on as ever.
func TestHeldLock_LeavesOtherTenantsAlone(t *testing.T) {
	for _, rows := range []int{1, 20, 200} {
		t.Run(fmt.Sprintf("%d rows", rows), func(t *testing.T) {
			b := setup(t, func(s *settings) { s.store.LockTimeout = 250 * time.Millisecond })
			b.want(t, newly, byNothing, grant("warm", "K", "INV"))
			tx := b.begin(t)
			for i := range rows {
				if _, err := tx.Exec(t.Context(), holdInvoiceSQL, "held", fmt.Sprintf("INV-%d", i)); err != nil {
					t.Fatal(err)
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var blocked, others sync.WaitGroup
			for i := range 2 * rows {
				blocked.Go(func() {
					for n := 0; ctx.Err() == nil; n++ {
						short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
						_, err := b.GrantEntitlement(short, grant("held", fmt.Sprintf("K%d-%d", i, n), fmt.Sprintf("INV-%d", i%rows)))
						if code := status.Code(err); code != codes.DeadlineExceeded && code != codes.Unavailable && ctx.Err() == nil {
							t.Errorf("a call for a held row: %v", err)
						}
						cancel()
					}
				})
			}
			b.waitBlocked(t, 1)

			// They call at their own pace, whatever became of the calls before: who waits for one answer before the next call
			// would meet a stall once.
			var mu sync.Mutex
			var latencies []time.Duration
			pace := time.NewTicker(2 * time.Millisecond)
			defer pace.Stop()
			for n := range 750 {
				<-pace.C
				others.Go(func() {
					began := time.Now()
					resp, err := b.GrantEntitlement(t.Context(), grant(fmt.Sprintf("t%d", n%8), fmt.Sprintf("K%d", n), fmt.Sprintf("INV-%d", n)))
					took := time.Since(began)
					if err != nil || resp.GetOutcome() != newly {
						t.Errorf("another tenant: %v %v", resp, err)
					}
					mu.Lock()
					defer mu.Unlock()
					latencies = append(latencies, took)
				})
			}
			others.Wait()
			stop()
			blocked.Wait()
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			slices.Sort(latencies)
			p50, p99 := latencies[len(latencies)/2], latencies[len(latencies)*99/100]
			t.Logf("%d grants, p50 %v, p99 %v, the slowest %v", len(latencies), p50, p99, latencies[len(latencies)-1])
			// A wait for each blocked call would add up, since the others do not wait for each other; a busy machine's hiccup
			// shows in the p99 alone.
			if p50 >= 100*time.Millisecond {
				t.Errorf("the other tenants' p50 is %v", p50)
			}
			b.wantWhole(t)
		})
	}
}

// Two replicas get batches that hold the same keys, business keys and invoices in opposite orders, over and over. PostgreSQL would
// answer such locks with a deadlock; none may reach a caller. Nor may there be one that a retry inside hides: each costs a second.
func TestReplicas_OppositeOrdersDoNotDeadlock(t *testing.T) {
	t.Parallel()
	// With the usual time for a lock, PostgreSQL would not come to look for a deadlock.
	patient := func(s *settings) { s.store.LockTimeout = time.Minute }
	one := setup(t, patient)
	two := serveOn(t, one.url, one.url, patient)
	rounds := 300
	if soak {
		rounds = 20_000
	}
	const items = 12
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for round := range rounds {
		// Keys, invoices and types are each permuted for themselves, so that the order of one says nothing about the others'.
		keys, invoices := random.Perm(items), random.Perm(items)
		var there []*pb.GrantEntitlementRequest
		for i := range items {
			there = append(there, grant("t1", fmt.Sprintf("K%d-%d", round, keys[i]), fmt.Sprintf("INV-%d-%d", round, invoices[i]/2),
				ofType(fmt.Sprintf("type%d", invoices[i]%2)), evidence(paid, int64(i))))
		}
		back := slices.Clone(there)
		slices.Reverse(back)
		switch round % 4 {
		case 1: // the same effects under other keys
			for i, r := range back {
				back[i] = grant("t1", fmt.Sprintf("K%d-%d", round, items-keys[i]), r.GetGrant().GetInvoiceId(), ofType(r.GetGrant().GetEntitlementType()))
			}
		case 2: // the same keys for other invoices
			for i, r := range back {
				back[i] = grant("t1", r.GetIdempotencyKey(), "OTHER-"+r.GetGrant().GetInvoiceId(), ofType(r.GetGrant().GetEntitlementType()))
			}
		case 3: // effects that are there, so that both bind the same later keys
			for _, r := range there {
				one.want(t, newly, byNothing, grant("t1", "first-"+r.GetIdempotencyKey(), r.GetGrant().GetInvoiceId(), ofType(r.GetGrant().GetEntitlementType())))
			}
		}
		var calls sync.WaitGroup
		for _, call := range []struct {
			replica  *bundle
			requests []*pb.GrantEntitlementRequest
		}{{one, there}, {two, back}} {
			calls.Go(func() {
				resp, err := call.replica.BatchGrantEntitlements(t.Context(), &pb.BatchGrantEntitlementsRequest{Requests: call.requests})
				if err != nil {
					t.Errorf("round %d: %v", round, err)
				}
				for i, r := range resp.GetResponses() {
					if o := r.GetOutcome(); o != newly && o != already && o != conflict {
						t.Errorf("round %d, item %d: %s", round, i, told(r))
					}
				}
			})
		}
		calls.Wait()
		if t.Failed() {
			break
		}
	}
	if n := value[int](t, one, `SELECT count(*) FROM entitlements`); !t.Failed() && n != rounds*items {
		t.Errorf("%d entitlements, want %d", n, rounds*items)
	}
	one.wantWhole(t)
	// Sessions report what they met when they end.
	one.closeStore()
	two.closeStore()
	eventually(t, "the sessions are gone", func() bool {
		return value[int](t, one, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'grantd'`) == 0
	})
	if n := value[int](t, one, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n != 0 {
		t.Errorf("PostgreSQL resolved %d deadlocks", n)
	}
}

// A caller's error is its own: one that is cancelled while it waits for its turn takes nobody with it.
func TestCancelled_BeforeItsTurn(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) { s.store.LockTimeout = 30 * time.Second })
	tx := b.elsewhere(t, grant("held", "K", "INV-1"))
	blocked := b.start(t, grant("held", "K1", "INV-1"))
	b.waitBlocked(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := b.GrantEntitlement(ctx, grant("t1", "K", "INV-1"))
	wantCode(t, "a caller whose time was over before its turn", err, codes.DeadlineExceeded)
	// The server has read this call's frames after those that end the other, and so knows that its caller is gone.
	if found := b.operation(t, byName("t1", "K", full)); found.GetOutcome() != notApplied {
		t.Errorf("the look-up before its turn: %v", found)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := <-blocked; r.err != nil || r.resp.GetOutcome() != newly {
		t.Errorf("the call that was in front: %v %v", r.resp, r.err)
	}
	// It was dropped: nothing was granted for nobody.
	if found := b.operation(t, byName("t1", "K", full)); found.GetOutcome() != notApplied {
		t.Errorf("the look-up: %v", found)
	}
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
}
