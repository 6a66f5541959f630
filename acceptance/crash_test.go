package acceptance_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/google/go-cmp/cmp"

	"github.com/grantd/grantd/client"
	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// grantUntilAnswered is a caller as billing should be: the client's retries, and the same request again for as long as there is no
// answer.
func grantUntilAnswered(ctx context.Context, c *client.Client, r *pb.GrantEntitlementRequest) (*pb.GrantEntitlementResponse, error) {
	for {
		resp, err := c.Grant(ctx, r)
		var again *client.RetryableError
		if !errors.As(err, &again) || ctx.Err() != nil {
			return resp, err
		}
	}
}

func newClient(t testing.TB, addr string) *client.Client {
	t.Helper()
	c, err := client.New("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The server is killed at random moments under load, over and over. Every key is sent by two callers at once, and both go on until
// they have an answer. In the end each key has exactly one effect, and what was acknowledged is what is there.
func TestKilledServer_EveryKeyEndsWithOneEffect(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serveProcess(t, url, "127.0.0.1:0")
	addr := p.addr
	kills := 5
	if soak {
		kills = 100
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := newClient(t, addr)

	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(kills)*20*time.Second)
	defer cancel()
	var over atomic.Bool
	var acknowledged atomic.Int64
	type told struct {
		mu  sync.Mutex
		all map[string]*pb.Entitlement
	}
	answers := told{all: map[string]*pb.Entitlement{}}
	request := func(pair, n int) *pb.GrantEntitlementRequest {
		return grant("t1", fmt.Sprintf("K%d-%d", pair, n), fmt.Sprintf("INV-%d-%d", pair, n))
	}
	var callers sync.WaitGroup
	var newlyTold atomic.Int64
	for i := range 16 {
		callers.Go(func() {
			for n := 0; !over.Load(); n++ {
				r := request(i/2, n)
				resp, err := grantUntilAnswered(ctx, c, r)
				if err != nil {
					t.Errorf("%s: %v", r.GetIdempotencyKey(), err)
					return
				}
				if resp.GetOutcome() == newly {
					newlyTold.Add(1)
				}
				answers.mu.Lock()
				if before := answers.all[r.GetIdempotencyKey()]; before == nil {
					answers.all[r.GetIdempotencyKey()] = resp.GetEntitlement()
				} else if diff := cmp.Diff(before, resp.GetEntitlement(), protocmp.Transform()); diff != "" {
					t.Errorf("%s: two callers were told different results: %s", r.GetIdempotencyKey(), diff)
				}
				answers.mu.Unlock()
				acknowledged.Add(1)
			}
		})
	}
	for range kills {
		mark := acknowledged.Load()
		eventually(t, "the callers get answers", func() bool { return acknowledged.Load() > mark+20 || t.Failed() })
		time.Sleep(time.Duration(random.IntN(40_000)) * time.Microsecond)
		p.kill()
		<-p.exited
		p = serveProcess(t, url, addr)
	}
	over.Store(true)
	callers.Wait()

	b := &bundle{EntitlementServiceClient: c.Service(), url: url, sql: connect(t, url)}
	for key, e := range answers.all {
		var pair, n int
		if _, err := fmt.Sscanf(key, "K%d-%d", &pair, &n); err != nil {
			t.Fatal(err)
		}
		resp := b.want(t, already, byKey, request(pair, n))
		wantSame(t, key, resp.GetEntitlement(), e)
	}
	if n := value[int](t, b, `SELECT count(*) FROM entitlements`); n != len(answers.all) {
		t.Errorf("%d entitlements for %d keys", n, len(answers.all))
	}
	if n := newlyTold.Load(); n > int64(len(answers.all)) {
		t.Errorf("%d calls were told NEWLY for %d keys", n, len(answers.all))
	}
	t.Logf("%d keys, %d kills, %d were told NEWLY by the call that did it", len(answers.all), kills, newlyTold.Load())
	b.wantWhole(t)
}

// A process is killed between its first statement and COMMIT, with the invoice's row locked. Another replica grants the same key at
// once: no claim is left behind that would have to time out.
func TestKilledServer_BetweenStatementAndCommit(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	proxy := serveProxyTo(t, direct)
	p := serveProcess(t, proxy.url, "127.0.0.1:0")
	b := serveOn(t, direct, direct)
	b.want(t, newly, byNothing, grant("warm", "K", "INV"))
	inserted := proxy.on("INSERT 0 1", holdBack)
	lost := make(chan error, 1)
	go func() {
		_, err := pb.NewEntitlementServiceClient(dial(t, p.addr)).GrantEntitlement(t.Context(), grant("t1", "K", "INV-1"))
		lost <- err
	}()
	<-inserted
	if n := value[int](t, b, `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND state = 'idle in transaction'`); n != 1 {
		t.Fatalf("%d transactions are open", n)
	}
	p.kill()
	began := time.Now()
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("the next grant took %v", took)
	}
	wantCode(t, "the call to the killed process", <-lost, codes.Unavailable)
	wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0"})
	b.wantWhole(t)
}

// streams are what load balancers and developers leave open: health's Watch and reflection.
type streams struct {
	watch      grpc.ServerStreamingClient[healthpb.HealthCheckResponse]
	reflection grpc.BidiStreamingClient[reflectionpb.ServerReflectionRequest, reflectionpb.ServerReflectionResponse]
}

func openStreams(t testing.TB, conn *grpc.ClientConn) streams {
	t.Helper()
	watch, err := healthpb.NewHealthClient(conn).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		status, err := watch.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if status.GetStatus() == healthpb.HealthCheckResponse_SERVING {
			break
		}
	}
	reflection, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
	if err := reflection.Send(list); err != nil {
		t.Fatal(err)
	}
	if _, err := reflection.Recv(); err != nil {
		t.Fatal(err)
	}
	return streams{watch, reflection}
}

// blockedGrant is one of many on an invoice that is held.
func blockedGrant(i int) *pb.GrantEntitlementRequest {
	return grant("t1", fmt.Sprintf("K%d", i), "INV-1", ofType(fmt.Sprintf("type%d", i)))
}

// startBlocked sends that many grants and returns when all have arrived: one waits for the row, and the others behind it.
func (b *bundle) startBlocked(t testing.TB, p *process, grants int) []<-chan result {
	t.Helper()
	calls := []<-chan result{b.start(t, blockedGrant(0))}
	b.waitBlocked(t, 1)
	for i := 1; i < grants; i++ {
		calls = append(calls, b.start(t, blockedGrant(i)))
	}
	p.waitQueued(t, grants-1)
	return calls
}

// SIGTERM with 100 grants in flight and streams open that would never end by themselves. Balancers hear NOT_SERVING, every
// grant in flight gets its answer, the process is gone within its ten seconds, and its exit is a success.
func TestSIGTERM_GrantsInFlightFinish(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serveProcess(t, url, "127.0.0.1:0", "--shutdown-grace", "60s")
	conn := dial(t, p.addr)
	b := &bundle{EntitlementServiceClient: pb.NewEntitlementServiceClient(conn), url: url, sql: connect(t, url)}
	open := openStreams(t, dial(t, p.addr))
	holder := b.begin(t)
	if _, err := holder.Exec(t.Context(), holdInvoiceSQL, "t1", "INV-1"); err != nil {
		t.Fatal(err)
	}
	calls := b.startBlocked(t, p, 100)

	began := time.Now()
	p.terminate(t)
	told, err := open.watch.Recv()
	if err != nil || told.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("the watcher was told %v, %v", told, err)
	}
	if _, err := open.watch.Recv(); err == nil {
		t.Error("the watcher was told more")
	}
	if _, err := open.reflection.Recv(); err == nil {
		t.Error("the reflection stream went on")
	}
	for i, call := range calls {
		select {
		case r := <-call:
			t.Fatalf("call %d was answered while its row was held: %v %v", i, r.resp, r.err)
		default:
		}
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, call := range calls {
		if r := <-call; r.err != nil || r.resp.GetOutcome() != newly {
			t.Errorf("grant %d in flight: %v %v", i, r.resp, r.err)
		}
	}
	<-p.exited
	if took := time.Since(began); p.err != nil || took > 45*time.Second {
		t.Errorf("the process ended after %v with %v", took, p.err)
	}
	b.wantWhole(t)
}

// SIGTERM under load, and a successor on the same address. Callers with the client's retry policy see no error; whatever was cut
// off is retried to one effect.
func TestSIGTERM_RollingRestartUnderLoad(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serveProcess(t, url, "127.0.0.1:0", "--shutdown-grace", "60s")
	b := &bundle{url: url, sql: connect(t, url)}
	open := openStreams(t, dial(t, p.addr))
	c := newClient(t, p.addr)
	b.EntitlementServiceClient = c.Service()
	var over atomic.Bool
	var granted atomic.Int64
	var callers sync.WaitGroup
	for i := range 100 {
		callers.Go(func() {
			for n := 0; !over.Load(); n++ {
				resp, err := c.Grant(t.Context(), grant(fmt.Sprintf("t%d", i), fmt.Sprintf("K%d", n), fmt.Sprintf("INV-%d", n)))
				if err != nil || resp.GetOutcome() != newly && resp.GetOutcome() != already {
					t.Errorf("caller %d, grant %d: %v %v", i, n, resp, err)
					return
				}
				granted.Add(1)
			}
		})
	}
	eventually(t, "grants are made", func() bool { return granted.Load() > 300 })
	began := time.Now()
	p.terminate(t)
	if told, err := open.watch.Recv(); err != nil || told.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("the watcher was told %v, %v", told, err)
	}
	<-p.exited
	if took := time.Since(began); p.err != nil || took > 45*time.Second {
		t.Errorf("the process ended after %v with %v", took, p.err)
	}
	serveProcess(t, url, p.addr)
	mark := granted.Load()
	eventually(t, "grants are made by the successor", func() bool { return granted.Load() > mark+300 || t.Failed() })
	over.Store(true)
	callers.Wait()
	if n := value[int64](t, b, `SELECT count(*) FROM entitlements`); n != granted.Load() {
		t.Errorf("%d entitlements, %d calls were told that theirs is there", n, granted.Load())
	}
	b.wantWhole(t)
}

// The row stays locked for longer than the process has. It must not wait for it: it ends in time, the calls are cut off, and sending
// them again ends in one effect for each.
func TestSIGTERM_CallsPastTheGraceAreCutOff(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Second
	url := pgtest.New(t)
	p := serveProcess(t, url, "127.0.0.1:0", "--shutdown-grace", grace.String())
	conn := dial(t, p.addr)
	b := &bundle{EntitlementServiceClient: pb.NewEntitlementServiceClient(conn), url: url, sql: connect(t, url)}
	holder := b.begin(t)
	if _, err := holder.Exec(t.Context(), holdInvoiceSQL, "t1", "INV-1"); err != nil {
		t.Fatal(err)
	}
	calls := b.startBlocked(t, p, 20)
	began := time.Now()
	p.terminate(t)
	for i, call := range calls {
		if r := <-call; status.Code(r.err) != codes.Unavailable {
			t.Errorf("call %d: %v %v", i, r.resp, r.err)
		}
	}
	<-p.exited
	if took := time.Since(began); took > grace+30*time.Second {
		t.Errorf("the process had %v and took %v", grace, took)
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	c := newClient(t, serveProcess(t, url, p.addr).addr)
	for i := range calls {
		if _, err := c.Grant(t.Context(), blockedGrant(i)); err != nil {
			t.Errorf("call %d again: %v", i, err)
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM entitlements`); n != len(calls) {
		t.Errorf("%d entitlements, want %d", n, len(calls))
	}
	b.wantWhole(t)
}
