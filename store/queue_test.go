package store

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func queued(c *Command) *pending {
	p := &pending{command: *c, ticket: newTicket(1)}
	p.claims = claimsOf(&p.command)
	return p
}

func queuedGrant(key, invoice, typ string) *pending {
	return queued(&Command{
		Kind: kindGrant, TenantID: "t", IdempotencyKey: key,
		Grant: Grant{TenantID: "t", InvoiceID: invoice, EntitlementType: typ},
	})
}

func queuedRecord(key, invoice string) *pending {
	return queued(&Command{Kind: kindRecord, TenantID: "t", IdempotencyKey: key, InvoiceID: invoice})
}

func queuedReversal(key, invoice, typ string) *pending {
	c := Command{Kind: kindReverse, TenantID: "t", IdempotencyKey: key}
	c.Target.BusinessKey = BusinessKey{InvoiceID: invoice, EntitlementType: typ}
	return queued(&c)
}

// takeNow is take where nothing is waited for.
func (q *queue) takeNow(limit int) []*pending {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pick(nil, limit)
}

func keysOf(batch []*pending) string {
	keys := make([]string, len(batch))
	for i, p := range batch {
		keys[i] = p.command.IdempotencyKey
	}
	return strings.Join(keys, " ")
}

// Its time is that of the first that came since the queue was looked at last, whether or not that one was still wanted: one whose caller
// had left made the next one, an hour later, seem to have waited for an hour.
func TestQueue_ArrivedWithItsBurst(t *testing.T) {
	q := newQueue(10)
	left, first, second := queuedGrant("a", "i", "x"), queuedGrant("b", "i", "y"), queuedGrant("c", "i", "z")
	q.put([]*pending{left})
	left.state.Store(abandoned)
	if batch := q.takeNow(10); len(batch) != 0 {
		t.Fatalf("took %s", keysOf(batch))
	}
	before := time.Now()
	q.put([]*pending{first})
	q.put([]*pending{second})
	if first.arrived.Before(before) || !second.arrived.Equal(first.arrived) {
		t.Errorf("they arrived %v and %v after the time before", first.arrived.Sub(before), second.arrived.Sub(before))
	}
}

func TestQueue_WhatMayShareATransaction(t *testing.T) {
	otherTenant := queuedGrant("a", "i", "x")
	otherTenant.command.TenantID, otherTenant.command.Grant.TenantID = "u", "u"
	otherTenant.claims = claimsOf(&otherTenant.command)
	repeated := queuedGrant("b", "i", "x")
	repeated.command.Grant.OperationVersion = 1
	repeated.claims = claimsOf(&repeated.command)

	for _, c := range []struct {
		name string
		put  []*pending
		want []string // the batches, each released before the next is taken
	}{
		{"nothing in common", []*pending{queuedGrant("a", "i", "x"), queuedGrant("b", "j", "x"), queuedRecord("c", "k")}, []string{"a b c"}},
		{"same key", []*pending{queuedGrant("a", "i", "x"), queuedGrant("a", "j", "x")}, []string{"a", "a"}},
		{"same key, other kind", []*pending{queuedGrant("a", "i", "x"), queuedRecord("a", "j")}, []string{"a", "a"}},
		{"same key, other tenant", []*pending{queuedGrant("a", "i", "x"), otherTenant}, []string{"a a"}},
		{"same business key", []*pending{queuedGrant("a", "i", "x"), queuedGrant("b", "i", "x")}, []string{"a", "b"}},
		{"same invoice, other type", []*pending{queuedGrant("a", "i", "x"), queuedGrant("b", "i", "y")}, []string{"a b"}},
		{"same invoice and type, other version", []*pending{queuedGrant("a", "i", "x"), repeated}, []string{"a b"}},
		{"grants, then a record", []*pending{queuedGrant("a", "i", "x"), queuedGrant("b", "i", "y"), queuedRecord("c", "i")}, []string{"a b", "c"}},
		{"a record, then grants", []*pending{queuedRecord("a", "i"), queuedGrant("b", "i", "x"), queuedGrant("c", "i", "y")}, []string{"a", "b c"}},
		{"two records", []*pending{queuedRecord("a", "i"), queuedRecord("b", "i")}, []string{"a", "b"}},
		{"two reversals on one invoice", []*pending{queuedReversal("a", "i", "x"), queuedReversal("b", "i", "y")}, []string{"a", "b"}},
		{"a reversal and a grant of another type", []*pending{queuedReversal("a", "i", "x"), queuedGrant("b", "i", "y")}, []string{"a", "b"}},
		// What is passed over closes its keys to those behind it.
		{"a grant does not overtake a record", []*pending{queuedGrant("a", "i", "x"), queuedRecord("b", "i"), queuedGrant("c", "i", "y")},
			[]string{"a", "b", "c"}},
		{"a record does not overtake a grant that waits for its key",
			[]*pending{queuedGrant("a", "j", "x"), queuedGrant("a", "i", "x"), queuedRecord("b", "i")}, []string{"a", "a", "b"}},
		{"a grant does not overtake another of its business key",
			[]*pending{queuedGrant("a", "j", "x"), queuedGrant("a", "i", "x"), queuedGrant("b", "i", "x")}, []string{"a", "a", "b"}},
		{"a key that waits is closed", []*pending{queuedRecord("a", "i"), queuedGrant("b", "i", "x"), queuedGrant("b", "j", "x")},
			[]string{"a", "b", "b"}},
		{"others go on", []*pending{queuedRecord("a", "i"), queuedRecord("b", "i"), queuedGrant("c", "j", "x")}, []string{"a c", "b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newQueue(100)
			q.put(c.put)
			var got []string
			for range c.put {
				batch := q.takeNow(100)
				if len(batch) == 0 {
					break
				}
				got = append(got, keysOf(batch))
				q.release(batch)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if len(q.held) != 0 || len(q.waiting) != 0 {
				t.Errorf("left over: %d held, %d waiting", len(q.held), len(q.waiting))
			}
		})
	}
}

func TestQueue_InFlightHoldsItsInvoice(t *testing.T) {
	q := newQueue(100)
	q.put([]*pending{queuedGrant("a", "i", "x")})
	first := q.takeNow(100)
	q.put([]*pending{queuedGrant("b", "i", "y"), queuedRecord("c", "i"), queuedGrant("d", "j", "x"), queuedGrant("a", "k", "x")})
	second := q.takeNow(100)
	if got := keysOf(second); got != "d" {
		t.Errorf("beside a grant in flight goes %q, want d alone", got)
	}
	q.release(second)
	if got := q.takeNow(100); len(got) != 0 {
		t.Errorf("took %q while the first was in flight", keysOf(got))
	}
	q.release(first)
	if got := keysOf(q.takeNow(100)); got != "b a" {
		t.Errorf("after the release goes %q, want b a", got)
	}
}

func TestQueue_IsBounded(t *testing.T) {
	q := newQueue(3)
	n, closed := q.put([]*pending{queuedGrant("a", "1", "x"), queuedGrant("b", "2", "x")})
	if n != 2 || closed {
		t.Fatalf("took %d, closed %v", n, closed)
	}
	if n, _ = q.put([]*pending{queuedGrant("c", "3", "x"), queuedGrant("d", "4", "x")}); n != 1 {
		t.Errorf("took %d of two with room for one", n)
	}
	if n, _ = q.put([]*pending{queuedGrant("e", "5", "x")}); n != 0 {
		t.Errorf("took %d without room", n)
	}
	if batch := q.takeNow(2); keysOf(batch) != "a b" {
		t.Errorf("a batch of two is %q", keysOf(batch))
	}
	if n, _ = q.put([]*pending{queuedGrant("e", "5", "x"), queuedGrant("f", "6", "x")}); n != 2 || q.depth() != 3 {
		t.Errorf("took %d, depth %d; want 2 and 3", n, q.depth())
	}
}

func TestQueue_DropsWhatItsCallerLeft(t *testing.T) {
	q := newQueue(100)
	a, b, c := queuedRecord("a", "i"), queuedRecord("b", "i"), queuedRecord("c", "i")
	q.put([]*pending{a, b, c})
	q.release(q.takeNow(100))
	b.state.Store(abandoned)
	if got := keysOf(q.takeNow(100)); got != "c" {
		t.Errorf("took %q, want c: what was abandoned closes nothing", got)
	}
	if a.state.Load() != taken || c.state.Load() != taken || b.state.Load() != abandoned {
		t.Error("what was taken is not marked so")
	}
}

func TestQueue_ReleaseWakesATaker(t *testing.T) {
	q := newQueue(100)
	q.put([]*pending{queuedRecord("a", "i")})
	first := q.take(nil, 100)
	q.put([]*pending{queuedRecord("b", "i")})
	second := make(chan []*pending)
	go func() { second <- q.take(slices.Clone(first), 100) }()
	q.release(first)
	if got := keysOf(<-second); got != "b" {
		t.Errorf("took %q, want b", got)
	}
}

func TestQueue_AnotherTransactionIsWorthwhile(t *testing.T) {
	for _, c := range []struct {
		inFlight, waiting int
		want              bool
	}{
		{0, 0, true}, {0, 1, true},
		{1, 1, false}, {1, muchWaits - 1, false}, {1, muchWaits, true},
		{200, 199, false}, {200, 200, true},
	} {
		q := newQueue(1000)
		q.inFlight, q.waiting = c.inFlight, make([]*pending, c.waiting)
		if got := q.worthwhile(); got != c.want {
			t.Errorf("%d wait beside %d in flight: %v, want %v", c.waiting, c.inFlight, got, c.want)
		}
	}
}

// Two takers share what comes. Whatever one leaves, since it has its fill, and whatever comes while both are busy, is taken in the end.
func TestQueue_TwoTakersLeaveNothing(t *testing.T) {
	q := newQueue(10_000)
	var taken atomic.Int64
	var takers sync.WaitGroup
	for range 2 {
		takers.Go(func() {
			var batch []*pending
			for {
				if batch = q.take(batch, 20); len(batch) == 0 {
					return
				}
				q.release(batch)
				taken.Add(int64(len(batch)))
			}
		})
	}
	const callers, calls = 50, 40
	var putters sync.WaitGroup
	for c := range callers {
		putters.Go(func() {
			for n := range calls {
				q.put([]*pending{queuedGrant(fmt.Sprint(c, ".", n), fmt.Sprint(c%7), fmt.Sprint(c, ".", n))})
			}
		})
	}
	putters.Wait()
	for taken.Load() < callers*calls {
		// A wake-up that is lost leaves some here for good, and the test to its time limit.
		runtime.Gosched()
	}
	q.shut()
	takers.Wait()
}

func TestQueue_ShutRunsDry(t *testing.T) {
	q := newQueue(100)
	q.put([]*pending{queuedRecord("a", "i"), queuedRecord("b", "i")})
	first := q.take(nil, 100)
	q.shut()
	if n, closed := q.put([]*pending{queuedRecord("c", "j")}); n != 0 || !closed {
		t.Errorf("a closed queue took %d, closed %v", n, closed)
	}
	ended := make(chan string)
	go func() {
		var all []string
		for {
			batch := q.take(nil, 100)
			if len(batch) == 0 {
				ended <- strings.Join(all, ",")
				return
			}
			all = append(all, keysOf(batch))
			q.release(batch)
		}
	}()
	q.release(first)
	if got := <-ended; got != "b" {
		t.Errorf("after shut went %q, want b", got)
	}
}

// Random commands, takes and releases against a plain statement of the rule: no two commands of one transaction or of two in flight
// share what they may not, every command is taken once, and those that exclude each other go in the order of their arrival.
func TestQueue_Random(t *testing.T) {
	excludes := func(a, b *Command, inOneTransaction bool) bool {
		if a.IdempotencyKey == b.IdempotencyKey {
			return true
		}
		x, y := a.businessKey(), b.businessKey()
		if x.InvoiceID != y.InvoiceID {
			return false
		}
		return !inOneTransaction || a.Kind != kindGrant || b.Kind != kindGrant || x == y
	}
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		q := newQueue(1000)
		var arrived []*pending
		at := make(map[*pending]int)
		takenAt := make(map[*pending]int)
		var inFlight [][]*pending

		put := func() {
			var p *pending
			key, invoice := fmt.Sprint("k", random.IntN(12)), fmt.Sprint("i", random.IntN(4))
			switch random.IntN(5) {
			case 0:
				p = queuedRecord(key, invoice)
			case 1:
				p = queuedReversal(key, invoice, "x")
			default:
				p = queuedGrant(key, invoice, fmt.Sprint("x", random.IntN(3)))
			}
			at[p] = len(arrived)
			arrived = append(arrived, p)
			if n, _ := q.put([]*pending{p}); n != 1 {
				t.Fatal("no room")
			}
		}
		take := func() {
			batch := q.takeNow(1 + random.IntN(6))
			if len(batch) == 0 {
				return
			}
			for i, p := range batch {
				if _, twice := takenAt[p]; twice {
					t.Fatalf("seed %d: %s was taken twice", seed, p.command.IdempotencyKey)
				}
				takenAt[p] = len(takenAt)
				for _, other := range batch[:i] {
					if excludes(&p.command, &other.command, true) {
						t.Fatalf("seed %d: one transaction has %+v and %+v", seed, p.command, other.command)
					}
				}
				for _, flight := range inFlight {
					for _, other := range flight {
						if excludes(&p.command, &other.command, false) {
							t.Fatalf("seed %d: in flight beside each other are %+v and %+v", seed, p.command, other.command)
						}
					}
				}
			}
			inFlight = append(inFlight, batch)
		}
		release := func() {
			if len(inFlight) > 0 {
				i := random.IntN(len(inFlight))
				q.release(inFlight[i])
				inFlight = slices.Delete(inFlight, i, i+1)
			}
		}
		for range 150 {
			switch random.IntN(4) {
			case 0, 1:
				put()
			case 2:
				take()
			default:
				release()
			}
		}
		for range 10 * len(arrived) {
			take()
			release()
		}
		if len(takenAt) != len(arrived) || q.depth() != 0 {
			t.Fatalf("seed %d: %d of %d commands were taken, %d wait", seed, len(takenAt), len(arrived), q.depth())
		}
		for i, a := range arrived {
			for _, b := range arrived[i+1:] {
				if excludes(&a.command, &b.command, true) && takenAt[a] > takenAt[b] {
					t.Fatalf("seed %d: %+v overtook %+v", seed, b.command, a.command)
				}
			}
		}
	}
}
