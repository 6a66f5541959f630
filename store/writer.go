package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// writer is the combining writer: a few committers take whatever commands wait and commit them together. There is no timer, so
// an idle service commits a single command at once, and a busy one commits hundreds for the price of one.
//
//	put → queue → committer → one transaction for all → answers
//	                  │ a command whose lock is held elsewhere
//	                  └→ slow lane → a transaction of its own, with time to wait
type writer struct {
	config *Config
	queue  *queue
	slow   chan *pending
	meters *meters
	log    *slog.Logger

	committers sync.WaitGroup
	lanes      sync.WaitGroup
	closing    sync.Once
}

// maxTries bounds the transactions run for a batch that keeps losing races or deadlocks. Each loss means that somebody else
// committed.
const maxTries = 8

func newWriter(cfg *Config, q *queue, m *meters, makeSession func(lockTimeout time.Duration) *session) *writer {
	w := &writer{
		config: cfg, queue: q, slow: make(chan *pending, cfg.SlowQueueLimit), meters: m, log: cfg.Log,
	}
	for range cfg.Committers {
		c := w.committer(makeSession(cfg.LockTimeout))
		w.committers.Go(func() {
			defer c.session.drop()
			var batch []*pending
			for {
				if batch = w.queue.take(batch, cfg.BatchLimit); len(batch) == 0 {
					return
				}
				c.commit(batch)
				clear(batch)
			}
		})
	}
	for range cfg.SlowLanes {
		c := w.committer(makeSession(cfg.SlowLockTimeout))
		c.lane = true
		w.lanes.Go(func() {
			defer c.session.drop()
			for p := range w.slow {
				c.commit([]*pending{p})
			}
		})
	}
	return w
}

// close lets every command that waits be answered, and returns when none is left.
func (w *writer) close() {
	w.closing.Do(func() {
		w.queue.shut()
		w.committers.Wait()
		close(w.slow)
		w.lanes.Wait()
	})
}

// submit queues the commands and waits for their answers. Commands for which there is no room fail at once; when ctx ends, those
// that no committer has taken yet are dropped, and the others go on without the caller.
func (w *writer) submit(ctx context.Context, commands []*pending) error {
	t := newTicket(len(commands))
	for _, p := range commands {
		p.ticket = t
		p.claims = claimsOf(&p.command)
	}
	n, closed := w.queue.put(commands)
	if n < len(commands) && !closed {
		w.meters.unanswered(ReasonQueueFull, len(commands)-n)
	}
	for _, p := range commands[n:] {
		p.err = &Failure{Reason: ReasonQueueFull, RetryDelay: jitter(200 * time.Millisecond), Overload: true}
		if closed {
			p.err = &Failure{Reason: ReasonShuttingDown, RetryDelay: jitter(200 * time.Millisecond)}
		}
		p.settle()
	}
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		for _, p := range commands {
			p.state.CompareAndSwap(waiting, abandoned)
		}
		return ctx.Err()
	}
}

// jitter spreads a delay over half to one and a half of its length, so that callers do not come back together.
func jitter(d time.Duration) time.Duration {
	return d/2 + rand.N(d)
}

// isolateTimeout is how long the parts of a batch wait for a lock that the whole has waited for. Each blocked command costs the
// others this long for every time that the batch is halved.
const isolateTimeout = 2 * time.Millisecond

// committer runs the transactions of one session.
type committer struct {
	*writer
	session *session
	run     transaction
	counts  map[answerLabels]int64
	// lane says that this is a slow lane, which has nowhere to send a blocked command.
	lane bool
}

func (w *writer) committer(s *session) *committer {
	c := &committer{writer: w, session: s, counts: make(map[answerLabels]int64)}
	c.run = transaction{session: s, catalog: w.config.Catalog, timeout: w.config.CommitTimeout}
	return c
}

// commit sees the batch through: every command of it is answered, or is handed to the slow lane.
func (c *committer) commit(batch []*pending) {
	for try := 1; ; try++ {
		started := time.Now()
		err := c.try(batch)
		if err == nil {
			c.meters.committed(batch, time.Since(started), c.counts)
			c.settle(batch)
			return
		}
		var fate unknownFate
		if errors.As(err, &fate) {
			c.session.drop()
			c.fail(batch, &Failure{Reason: ReasonCommitUnknown, RetryDelay: jitter(time.Second), cause: err})
			return
		}
		what, reason := interpretError(err)
		c.meters.retried(err)
		switch {
		case what == runAgain && try < maxTries:
			continue
		case what == dropConnection && reason == ReasonDatabaseUnavailable && try == 1 && c.session.conn != nil:
			// Most likely the session died while it was idle. Nothing was committed, so a new one may try.
			c.session.drop()
			continue
		case what == splitOff && len(batch) > 1:
			// One command's lock or data must not be the others' trouble. The lock was waited for once; the halves only look.
			before := c.run.lockTimeout
			c.run.lockTimeout = isolateTimeout
			half := len(batch) / 2
			c.commit(batch[:half])
			c.commit(batch[half:])
			c.run.lockTimeout = before
			return
		case what == splitOff && reason == ReasonLockTimeout && !c.lane:
			c.divert(batch[0], err)
			return
		case what == dropConnection:
			c.session.drop()
			c.fail(batch, &Failure{Reason: reason, RetryDelay: jitter(time.Second), cause: err})
			return
		case reason != "":
			c.fail(batch, &Failure{Reason: reason, RetryDelay: jitter(500 * time.Millisecond), cause: err})
			return
		default:
			c.log.Error("a transaction failed", "commands", len(batch), "error", err)
			c.fail(batch, fmt.Errorf("commit: %w", err))
			return
		}
	}
}

// try runs one transaction for the batch.
func (c *committer) try(batch []*pending) error {
	ctx, end := c.trace(batch)
	if err := c.session.connect(c.config.ConnectTimeout); err != nil {
		end(err)
		return err
	}
	err := c.run.run(ctx, batch)
	end(err)
	return err
}

// divert hands a blocked command to the slow lane, which is bounded: a flood of blocked commands must not hold every other.
func (c *committer) divert(p *pending, why error) {
	select {
	case c.slow <- p:
		c.meters.diverted()
	default:
		c.fail([]*pending{p}, &Failure{Reason: ReasonLockTimeout, RetryDelay: jitter(time.Second), cause: why})
	}
}

func (c *committer) fail(batch []*pending, err error) {
	reason := "internal"
	var f *Failure
	if errors.As(err, &f) {
		reason = f.Reason
		c.log.Warn("a transaction gave no answer", "commands", len(batch), "reason", reason, "error", f.cause)
	}
	c.meters.unanswered(reason, len(batch))
	for _, p := range batch {
		p.answer, p.err = Answer{}, err
	}
	c.settle(batch)
}

// settle gives back the batch's claims, then wakes its callers.
func (c *committer) settle(batch []*pending) {
	c.queue.release(batch)
	for _, p := range batch {
		p.settle()
	}
}
