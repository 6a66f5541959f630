package store

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// isolateTimeout is how long the parts of a batch wait for a lock that the whole has waited for.
	isolateTimeout = 2 * time.Millisecond
	// laneTimeout is how long a slow lane waits before it turns to the next blocked command, so that one that is held for long does
	// not keep those that would be free by now.
	laneTimeout = 250 * time.Millisecond
)

// handOver takes a batch that cannot be committed whole from its committer, which goes on with what waits. Its claims stay held.
func (c *committer) handOver(batch []*pending, why error) {
	if len(batch) == 1 {
		c.setAside(batch[0], why)
		return
	}
	select {
	case c.split <- slices.Clone(batch):
	default:
		before := c.run.lockTimeout
		c.run.lockTimeout = isolateTimeout
		c.divide(slices.Clone(batch))
		c.run.lockTimeout = before
	}
}

// divideBatches is the splitter's work.
func (c *committer) divideBatches() {
	for batch := range c.split {
		c.divide(batch)
	}
}

// divide commits what it can of a batch, by halves, those of the upper level first: most commands are in a half without trouble soon. What
// is blocked together mostly belongs together, so the order is that of tenants and invoices.
func (c *committer) divide(batch []*pending) {
	slices.SortStableFunc(batch, func(a, b *pending) int {
		return cmp.Or(strings.Compare(a.claims.invoice.tenant, b.claims.invoice.tenant), strings.Compare(a.claims.invoice.name, b.claims.invoice.name))
	})
	parts := [][]*pending{batch[:len(batch)/2], batch[len(batch)/2:]}
	for len(parts) > 0 {
		part := parts[0]
		parts = parts[1:]
		why := c.commit(part)
		switch {
		case why == nil:
		case len(part) == 1:
			c.setAside(part[0], why)
		default:
			parts = append(parts, part[:len(part)/2], part[len(part)/2:])
		}
	}
}

// setAside hands a blocked command to the slow lanes. They are bounded: a flood of blocked commands must not hold every other.
func (c *committer) setAside(p *pending, why error) {
	p.blockedSince = time.Now()
	if !c.slow.put(p) {
		c.giveUpOn(p, why)
		return
	}
	c.meters.diverted()
}

func (c *committer) giveUpOn(p *pending, why error) {
	c.fail([]*pending{p}, &Failure{Reason: ReasonLockTimeout, RetryDelay: jitter(time.Second), cause: why})
}

// waitForLocks is a slow lane's work: it turns from one blocked command to the next until each is committed, or has waited long
// enough, or the service stops.
func (c *committer) waitForLocks() {
	for {
		p, ok := c.slow.take()
		if !ok {
			return
		}
		if c.stopping.Load() {
			c.fail([]*pending{p}, &Failure{Reason: ReasonShuttingDown, RetryDelay: jitter(200 * time.Millisecond)})
			continue
		}
		why := c.commit([]*pending{p})
		if why != nil && (time.Since(p.blockedSince) >= c.config.SlowLockTimeout || !c.slow.put(p)) {
			c.giveUpOn(p, why)
		}
	}
}

// blocked holds the commands that the slow lanes take turns with.
type blocked struct {
	limit int

	mu       sync.Mutex
	arrived  sync.Cond
	commands []*pending
	closed   bool
}

func newBlocked(limit int) *blocked {
	b := &blocked{limit: limit}
	b.arrived.L = &b.mu
	return b
}

// put reports whether there was room.
func (b *blocked) put(p *pending) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.commands) >= b.limit || b.closed {
		return false
	}
	b.commands = append(b.commands, p)
	b.arrived.Signal()
	return true
}

// take waits for a command; it reports false once the lanes are shut and none is left.
func (b *blocked) take() (*pending, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.commands) == 0 {
		if b.closed {
			return nil, false
		}
		b.arrived.Wait()
	}
	p := b.commands[0]
	b.commands = b.commands[1:]
	return p, true
}

func (b *blocked) shut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.arrived.Broadcast()
}
