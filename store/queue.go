package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// pending is a command on its way through the writer.
type pending struct {
	command Command
	answer  Answer
	err     error
	// state is moved once from waiting: to taken by the writer, or to abandoned by a caller that left.
	state  atomic.Int32
	ticket *ticket
	// arrived is when it was put, or the first of its burst.
	arrived time.Time
	// blockedSince is when the slow lanes got it.
	blockedSince time.Time
	// ctx carries the caller's span, and is nil where none is recorded.
	ctx context.Context
	claims
}

const (
	waiting int32 = iota
	taken
	abandoned
)

// ticket is what the caller of one or many commands waits on.
type ticket struct {
	left atomic.Int32
	done chan struct{}
}

func newTicket(n int) *ticket {
	t := &ticket{done: make(chan struct{})}
	t.left.Store(int32(n))
	return t
}

// settle ends the waiting for one command. Its answer or error must be set.
func (p *pending) settle() {
	if p.ticket.left.Add(-1) == 0 {
		close(p.ticket.done)
	}
}

// claims are what two commands in flight may not share: the operation's key, the business key and, unless both are grants
// of one transaction, the invoice.
type claims struct {
	operation claim
	effect    claim // zero for other kinds than grants, which hold the whole invoice
	invoice   claim
	exclusive bool
}

// claim is a key in the space of all claims.
type claim struct {
	space    byte
	tenant   string
	name     string
	typeName string
	version  int64
}

func claimsOf(c *Command) claims {
	b := c.businessKey()
	k := claims{
		operation: claim{space: 'o', tenant: c.TenantID, name: c.IdempotencyKey},
		invoice:   claim{space: 'i', tenant: c.TenantID, name: b.InvoiceID},
	}
	if c.Kind == entitlementv1.OperationKind_OPERATION_KIND_GRANT {
		k.effect = claim{space: 'e', tenant: c.TenantID, name: b.InvoiceID, typeName: b.EntitlementType, version: b.OperationVersion}
	} else {
		k.exclusive = true
	}
	return k
}

// queue holds the commands that wait for a transaction, in the order of their arrival, and what those in flight have
// claimed.
type queue struct {
	limit int

	mu      sync.Mutex
	arrived sync.Cond
	waiting []*pending
	// inFlight counts the commands of the batches that were taken and not given back.
	inFlight int
	// held has the claims of every command in flight. A claim held here makes later commands wait their turn.
	held   map[claim]int
	closed bool
	// burst is when the first command was put since pick looked last, zero where none was: the clock is read once for all of them.
	burst time.Time
	// claimed is scratch for take: what the batch being taken, and the commands it passes over, claim. For an invoice it counts the
	// grants of the batch; exclusive marks it closed to further commands.
	claimed map[claim]int
}

const exclusive = -1

func newQueue(limit int) *queue {
	q := &queue{limit: limit, held: make(map[claim]int), claimed: make(map[claim]int)}
	q.arrived.L = &q.mu
	return q
}

// put appends the commands that there is room for, and returns how many those are.
func (q *queue) put(commands []*pending) (n int, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, true
	}
	if q.burst.IsZero() {
		q.burst = time.Now()
	}
	n = min(len(commands), q.limit-len(q.waiting))
	for _, p := range commands[:n] {
		p.arrived = q.burst
	}
	q.waiting = append(q.waiting, commands[:n]...)
	if q.worthwhile() {
		q.arrived.Signal()
	}
	return n, false
}

// muchWaits is how many commands must wait for a transaction beside others: for fewer it costs more than it brings.
const muchWaits = 16

// take waits until some command can be run, and moves up to limit of those that may share a transaction into batch: at most one per
// idempotency key, one per business key and, per invoice, either grants only or one other command. The rest stay, in order.
// Whoever took the batch before gives it back with the next call, and nobody else. take returns an empty batch once the queue is closed
// and empty.
//
// While nothing is in flight, whatever waits is taken at once. Beside other transactions one begins when as much waits as they hold:
// so two of a kind take turns, one at its commands while the other one is at its commit, and neither is torn into small ones.
func (q *queue) take(batch []*pending, limit int) []*pending {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight -= len(batch)
	for {
		batch = batch[:0]
		if q.worthwhile() {
			batch = q.pick(batch, limit)
		}
		if len(batch) > 0 || q.closed && len(q.waiting) == 0 {
			q.inFlight += len(batch)
			if len(q.waiting) > 0 && q.worthwhile() {
				q.arrived.Signal()
			}
			return batch
		}
		q.arrived.Wait()
	}
}

// worthwhile says whether what waits is worth another transaction.
func (q *queue) worthwhile() bool {
	return q.inFlight == 0 || q.closed || len(q.waiting) >= max(muchWaits, q.inFlight)
}

func (q *queue) pick(batch []*pending, limit int) []*pending {
	clear(q.claimed)
	kept := q.waiting[:0]
	for i, p := range q.waiting {
		if len(batch) == limit {
			kept = append(kept, q.waiting[i:]...)
			break
		}
		if p.state.Load() == abandoned {
			continue
		}
		if !q.mayJoin(p) {
			// What is passed over closes its keys to those behind it, so that order is kept.
			q.close(p)
			kept = append(kept, p)
			continue
		}
		if !p.state.CompareAndSwap(waiting, taken) {
			continue
		}
		q.claim(p)
		batch = append(batch, p)
	}
	clear(q.waiting[len(kept):])
	q.waiting = kept
	for _, p := range batch {
		q.hold(p)
	}
	q.burst = time.Time{}
	return batch
}

func (q *queue) mayJoin(p *pending) bool {
	if q.held[p.operation] > 0 || q.held[p.invoice] > 0 || q.claimed[p.operation] != 0 {
		return false
	}
	onInvoice := q.claimed[p.invoice]
	if p.exclusive {
		return onInvoice == 0
	}
	return onInvoice != exclusive && q.claimed[p.effect] == 0
}

func (q *queue) claim(p *pending) {
	q.claimed[p.operation] = exclusive
	if p.exclusive {
		q.claimed[p.invoice] = exclusive
		return
	}
	q.claimed[p.invoice]++
	q.claimed[p.effect] = exclusive
}

func (q *queue) close(p *pending) {
	q.claimed[p.operation] = exclusive
	switch {
	case p.exclusive:
		q.claimed[p.invoice] = exclusive
	default:
		q.claimed[p.effect] = exclusive
		if q.claimed[p.invoice] != exclusive {
			q.claimed[p.invoice]++
		}
	}
}

func (q *queue) hold(p *pending) {
	q.held[p.operation]++
	q.held[p.invoice]++
}

// release gives back what the commands held in flight.
func (q *queue) release(batch []*pending) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range batch {
		drop(q.held, p.operation)
		drop(q.held, p.invoice)
	}
	if len(q.waiting) > 0 || q.closed {
		q.arrived.Broadcast()
	}
}

func drop(held map[claim]int, c claim) {
	if held[c] > 1 {
		held[c]--
	} else {
		delete(held, c)
	}
}

// depth is how many commands wait.
func (q *queue) depth() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return int64(len(q.waiting))
}

// shut lets take run dry: what waits is still taken, nothing more is put.
func (q *queue) shut() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.arrived.Broadcast()
}
