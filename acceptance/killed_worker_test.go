package acceptance_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// receiver is a webhook receiver that remembers all that arrives.
type receiver struct {
	*httptest.Server
	mu sync.Mutex
	// arrived has the bodies by their keys, in the order in which they came.
	arrived map[string][]string
	// entered and answer, where they are set, tell of the next request and hold its answer back.
	entered, answer chan struct{}
}

func receive(t testing.TB) *receiver {
	t.Helper()
	r := &receiver{arrived: map[string][]string{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		r.mu.Lock()
		key := req.Header.Get("Idempotency-Key")
		r.arrived[key] = append(r.arrived[key], string(body))
		entered, answer := r.entered, r.answer
		r.entered, r.answer = nil, nil
		r.mu.Unlock()
		if entered != nil {
			close(entered)
			<-answer
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(r.Close)
	return r
}

// hold keeps the next request without an answer. It returns what is closed when the request is there, and what lets it go.
func (r *receiver) hold(t testing.TB) (entered <-chan struct{}, release func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in, out := make(chan struct{}), make(chan struct{})
	r.entered, r.answer = in, out
	release = sync.OnceFunc(func() { close(out) })
	t.Cleanup(release)
	return in, release
}

// times is how often a key arrived. What came of one key must be the same bytes each time.
func (r *receiver) times(t testing.TB, key string) int {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	bodies := r.arrived[key]
	for _, b := range bodies {
		if b != bodies[0] {
			t.Errorf("%s arrived as %q and as %q", key, bodies[0], b)
		}
	}
	return len(bodies)
}

func (r *receiver) keys() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.arrived)
}

// destinationsFile has one webhook for each receiver.
func destinationsFile(t testing.TB, deduplicates bool, receivers map[string]*receiver) string {
	t.Helper()
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"), 0o600); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	text.WriteString("destinations:\n")
	for name, r := range receivers {
		fmt.Fprintf(&text, `  - name: %s
    kind: webhook
    deduplicates: %t
    retry: {min_delay: 1ms, max_delay: 100ms}
    webhook: {url: %q, secrets: [{file: %q}]}
`, name, deduplicates, r.URL, secret)
	}
	file := filepath.Join(dir, "destinations.yaml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// killed is a worker in a process of its own, behind a proxy to PostgreSQL, and a server beside it that grants.
type killed struct {
	*operated
	*receiver
	proxy *postgresProxy
	p     *process
	file  string
}

func setupKilled(t testing.TB, deduplicates bool) *killed {
	t.Helper()
	direct := pgtest.New(t)
	k := &killed{receiver: receive(t), proxy: serveProxyTo(t, direct)}
	b := serveOn(t, direct, direct, to(store.Destination{Name: crm, Deduplicates: deduplicates}))
	k.operated = &operated{b, pb.NewOperatorServiceClient(b.conn)}
	k.file = destinationsFile(t, deduplicates, map[string]*receiver{crm: k.receiver})
	k.p = serveProcess(t, k.proxy.url, "127.0.0.1:0", "--destinations", k.file)
	b.want(t, newly, byNothing, grant("warm", "K", "INV"))
	// The worker has settled it, found nothing more, and looks whether anything is due: the next transaction is the next claim.
	eventually(t, "the worker is idle", func() bool {
		return value[bool](t, b, `SELECT EXISTS (
			SELECT FROM pg_stat_activity a, settled_deliveries d
			 WHERE a.datname = current_database() AND a.query LIKE '%at - clock_timestamp()%' AND a.pid <> pg_backend_pid()
			   AND a.state = 'idle' AND a.query_start > d.settled_at)`)
	})
	return k
}

// leased is the command tag of the statement that leases one delivery. Claims that find nothing have none.
const leased = "UPDATE 1"

// killStep is a moment in the life of one delivery. kill grants the entitlement and kills the worker just then.
type killStep struct {
	name string
	kill func(t *testing.T, k *killed)
	// arrivals is how often the event arrived by then; claimed says that its attempt is on record.
	arrivals int
	claimed  bool
}

var killSteps = []killStep{
	{"before the claim is committed", func(t *testing.T, k *killed) {
		reached := k.proxy.on(leased, holdBack)
		k.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
		<-reached
		k.p.kill()
	}, 0, false},
	{"between the claim and the call", func(t *testing.T, k *killed) {
		reached := k.proxy.onAfter(leased, "COMMIT", holdBack)
		k.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
		<-reached
		k.p.kill()
	}, 0, true},
	{"during the call", func(t *testing.T, k *killed) {
		entered, release := k.hold(t)
		k.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
		<-entered
		k.p.kill()
		<-k.p.exited
		release()
	}, 1, true},
	{"between the answer and its record", func(t *testing.T, k *killed) {
		entered, release := k.hold(t)
		k.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
		<-entered
		reached := k.proxy.on("INSERT 0 1", holdBack)
		release()
		<-reached
		k.p.kill()
	}, 1, true},
}

// succeed starts another worker, at a time when the lease of the killed one has run out.
func (k *killed) succeed(t *testing.T) {
	t.Helper()
	<-k.p.exited
	eventually(t, "the sessions of the killed process are gone", func() bool {
		return value[int](t, k.bundle, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND state LIKE 'idle in transaction%'`) == 0
	})
	k.runOut(t)
	k.p = serveProcess(t, k.url, "127.0.0.1:0", "--destinations", k.file)
	k.operator = pb.NewOperatorServiceClient(dial(t, k.p.addr))
}

// runOut lets every lease run out.
func (k *killed) runOut(t testing.TB) {
	t.Helper()
	k.exec(t, `UPDATE deliveries SET leased_until = clock_timestamp() - interval '1 second' WHERE state = 2`)
}

// wantState waits until the one delivery of tenant t1 is in a state, and returns it.
func (k *killed) wantState(t *testing.T, state pb.DeliveryState) *pb.Delivery {
	t.Helper()
	var d *pb.Delivery
	eventually(t, "the delivery is "+state.String(), func() bool {
		all := k.list(t, "t1", 0)
		if len(all) != 1 {
			t.Fatalf("%d deliveries of one entry", len(all))
		}
		d = all[0]
		return d.GetState() == state
	})
	return d
}

// The worker is killed at each step of a delivery to a receiver that deduplicates. The next one sends it again where it may have
// arrived, with the same key and the same bytes: the effect happens once.
func TestKilledWorker_DeduplicatingReceiverHasOneEffect(t *testing.T) {
	t.Parallel()
	for _, step := range killSteps {
		t.Run(step.name, func(t *testing.T) {
			t.Parallel()
			k := setupKilled(t, true)
			step.kill(t, k)
			k.succeed(t)
			d := k.wantState(t, delivered)
			if got, want := k.times(t, d.GetDeliveryKey()), step.arrivals+1; got != want {
				t.Errorf("it arrived %d times, want %d", got, want)
			}
			wantAttempts := int64(1)
			if step.claimed {
				wantAttempts = 2
			}
			if d.GetAttempts() != wantAttempts {
				t.Errorf("%d attempts are on record, want %d", d.GetAttempts(), wantAttempts)
			}
			if entries := value[int](t, k.bundle, `SELECT count(*) FROM entries`); k.keys() != entries {
				t.Errorf("%d distinct keys arrived of %d entries", k.keys(), entries)
			}
		})
	}
}

// The worker lives, and the answer to its claim's COMMIT is lost. It has called nobody, so that what it may have claimed is not in doubt, also
// where a second call would be one too many.
func TestKilledWorker_ClaimWithoutAnAnswerIsGivenBack(t *testing.T) {
	t.Parallel()
	for _, deduplicates := range []bool{true, false} {
		k := setupKilled(t, deduplicates)
		reached := k.proxy.onAfter(leased, "COMMIT", breakOff)
		k.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
		<-reached
		d := k.wantState(t, delivered)
		if got := k.times(t, d.GetDeliveryKey()); got != 1 || d.GetAttempts() != 2 {
			t.Errorf("it arrived %d times, in %d attempts", got, d.GetAttempts())
		}
	}
}

// The same with a receiver that cannot deduplicate: whatever may have arrived is never sent again blindly. An operator finds out, and
// what they say is done.
func TestKilledWorker_OtherReceiversGetNothingTwice(t *testing.T) {
	t.Parallel()
	for _, step := range killSteps {
		t.Run(step.name, func(t *testing.T) {
			t.Parallel()
			k := setupKilled(t, false)
			step.kill(t, k)
			k.succeed(t)
			if !step.claimed {
				d := k.wantState(t, delivered)
				if got := k.times(t, d.GetDeliveryKey()); got != 1 {
					t.Errorf("it arrived %d times", got)
				}
				return
			}
			d := k.wantState(t, unknown)
			// The worker has gone on to others, and has left this one alone.
			k.want(t, newly, byNothing, grant("t2", "K", "INV-1"))
			eventually(t, "another event is delivered", func() bool { return len(k.list(t, "t2", delivered)) == 1 })
			if got := k.times(t, d.GetDeliveryKey()); got != step.arrivals {
				t.Errorf("it arrived %d times, want %d", got, step.arrivals)
			}
			resolution := sendAgain
			if step.arrivals > 0 {
				resolution = wasSent
			}
			if resp := k.resolve(t, d.GetDeliveryId(), resolution, d.GetAttempts()); resp.GetOutcome() != newly {
				t.Errorf("the resolution: %v", resp)
			}
			k.wantState(t, delivered)
			if got := k.times(t, d.GetDeliveryKey()); got != 1 {
				t.Errorf("in the end it arrived %d times", got)
			}
		})
	}
}

// Workers are killed at random moments while events are made. In the end every entry has arrived, under one key each.
func TestKilledWorker_AtRandomMoments(t *testing.T) {
	t.Parallel()
	kills := 3
	if soak {
		kills = 50
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	k := setupKilled(t, true)
	n := 0
	for range kills {
		for range 40 {
			k.want(t, newly, byNothing, grant("t1", fmt.Sprint("K", n), fmt.Sprint("INV-", n)))
			if n%4 == 0 {
				k.reverse(t, "t1", fmt.Sprint("R", n), fmt.Sprint("INV-", n))
			}
			n++
		}
		time.Sleep(time.Duration(random.IntN(30_000)) * time.Microsecond)
		k.p.kill()
		k.succeed(t)
	}
	eventually(t, "everything is delivered", func() bool {
		return value[bool](t, k.bundle, `SELECT NOT EXISTS (SELECT FROM all_deliveries WHERE settled_at IS NULL)`)
	})
	entries, made := value[int](t, k.bundle, `SELECT count(*) FROM entries`), value[int](t, k.bundle, `SELECT count(*) FROM all_deliveries`)
	if k.keys() != entries || made != entries {
		t.Errorf("%d distinct keys arrived, %d deliveries are there, of %d entries", k.keys(), made, entries)
	}
	for _, d := range k.list(t, "t1", delivered) {
		if k.times(t, d.GetDeliveryKey()) == 0 {
			t.Errorf("%s never arrived", d.GetDeliveryId())
		}
	}
	if late := k.lines(t, `SELECT b.delivery_id::text FROM all_deliveries a JOIN all_deliveries b USING (tenant_id, entitlement_id, destination)
		WHERE a.entry_number < b.entry_number AND a.settled_at > b.settled_at`); len(late) > 0 {
		t.Errorf("%d overtook their grant", len(late))
	}
}

// The reply to a grant's COMMIT is lost, and the caller sends it again. There is one entitlement, and each destination hears of it
// once.
func TestCommit_ReplyLostMakesOneEventForEachDestination(t *testing.T) {
	t.Parallel()
	b, proxy := setupProxied(t, to(store.Destination{Name: "one", Deduplicates: true}, store.Destination{Name: "two", Deduplicates: true}))
	reached := proxy.on("COMMIT", breakOff)
	_, err := b.GrantEntitlement(t.Context(), grant("t1", "K", "INV-1"))
	<-reached
	if err == nil {
		t.Fatal("the caller was told, though the reply was lost")
	}
	b.want(t, already, byKey, grant("t1", "K", "INV-1"))

	receivers := map[string]*receiver{"one": receive(t), "two": receive(t)}
	p := serveProcess(t, b.url, "127.0.0.1:0", "--destinations", destinationsFile(t, true, receivers))
	operator := pb.NewOperatorServiceClient(dial(t, p.addr))
	var list *pb.ListDeliveriesResponse
	eventually(t, "all is delivered", func() bool {
		if list, err = operator.ListDeliveries(t.Context(), &pb.ListDeliveriesRequest{TenantId: "t1"}); err != nil {
			t.Fatal(err)
		}
		for _, d := range list.GetDeliveries() {
			if d.GetState() != delivered {
				return false
			}
		}
		return true
	})
	if len(list.GetDeliveries()) != 2 {
		t.Errorf("%d deliveries to two destinations", len(list.GetDeliveries()))
	}
	for _, d := range list.GetDeliveries() {
		if got := receivers[d.GetDestination()].times(t, d.GetDeliveryKey()); got != 1 {
			t.Errorf("%s heard of it %d times", d.GetDestination(), got)
		}
	}
	for _, s := range list.GetDestinations() {
		if s.GetBreaker() != pb.BreakerState_BREAKER_STATE_CLOSED {
			t.Errorf("%v after success alone", s)
		}
	}
	if len(list.GetDestinations()) != 2 {
		t.Errorf("the destinations: %v", list.GetDestinations())
	}
}
