package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// committer runs the transactions of one session.
type committer struct {
	*writer
	session *session
	run     transaction
	counts  map[answerLabels]int64
	// lastBlocked is when a lock was held elsewhere last.
	lastBlocked time.Time
}

// maxTries bounds the transactions run for a batch that keeps losing races or deadlocks. Each loss means that somebody else
// committed.
const maxTries = 8

// takeBatches commits what waits in the queue until it is shut and empty.
func (c *committer) takeBatches() {
	var batch []*pending
	for {
		if batch = c.queue.take(batch, c.config.BatchLimit); len(batch) == 0 {
			return
		}
		now := time.Now()
		c.meters.queueWait.Record(context.Background(), now.Sub(batch[0].arrived).Seconds())
		// While locks are held elsewhere, every batch may meet one: then none of them waits for long.
		c.run.lockTimeout = 0
		if now.Sub(c.lastBlocked) < time.Second {
			c.run.lockTimeout = isolateTimeout
		}
		if why := c.commit(batch); why != nil {
			c.lastBlocked = time.Now()
			c.handOver(batch, why)
		}
		clear(batch)
	}
}

// commit answers every command of the batch, unless it returns an error: then one of them is blocked by a lock that is held
// elsewhere, or made the transaction fail for another reason that is not the session's, and none is answered.
func (c *committer) commit(batch []*pending) error {
	for try := 1; ; try++ {
		started := time.Now()
		err := c.try(batch)
		if err == nil {
			c.meters.committed(batch, time.Since(started), c.counts)
			c.settle(batch)
			return nil
		}
		var fate unknownFate
		if errors.As(err, &fate) {
			c.meters.failed(err)
			c.session.drop()
			c.fail(batch, &Failure{Reason: ReasonCommitUnknown, RetryDelay: jitter(time.Second), cause: err})
			return nil
		}
		what, reason := interpretError(err)
		c.meters.failed(err)
		switch {
		case what == runAgain && try < maxTries:
			c.meters.retried(err)
			continue
		case what == dropConnection && reason == ReasonDatabaseUnavailable && try == 1 && c.session.conn != nil:
			// Most likely the session died while it was idle. Nothing was committed, so a new one may try.
			c.meters.retried(err)
			c.session.drop()
			continue
		case what != dropConnection && len(batch) > 1, what == splitOff && reason == ReasonLockTimeout:
			// Whatever it is, one command may have brought it on, and must not be the others' trouble.
			return err
		case what == dropConnection:
			c.session.drop()
			c.fail(batch, &Failure{Reason: reason, RetryDelay: jitter(time.Second), cause: err})
			return nil
		case reason != "":
			c.fail(batch, &Failure{Reason: reason, RetryDelay: jitter(500 * time.Millisecond), cause: err})
			return nil
		default:
			c.fail(batch, fmt.Errorf("commit: %w", err))
			return nil
		}
	}
}

// try runs one transaction for the batch. A panic in it fails these commands, and not the process with everybody else's.
func (c *committer) try(batch []*pending) (err error) {
	ctx, end := c.trace(batch)
	defer func() {
		if p := recover(); p != nil {
			c.session.drop()
			err = fmt.Errorf("%w: panic: %v\n%s", errBug, p, debug.Stack())
		}
		end(err)
	}()
	if err := c.session.connect(c.config.ConnectTimeout); err != nil {
		return err
	}
	return c.run.run(ctx, batch)
}

// fail answers the batch with an error.
func (c *committer) fail(batch []*pending, err error) {
	reason := failureReason(err)
	c.meters.unanswered(reason, len(batch))
	if c.quiet.mayLog(reason, time.Now()) {
		ctx, log := c.logOf(batch)
		if f, ok := errors.AsType[*Failure](err); ok {
			log.WarnContext(ctx, "a transaction gave no answer", "commands", len(batch), "reason", reason, "error", f.cause)
		} else {
			log.ErrorContext(ctx, "a transaction failed", "commands", len(batch), "error", err)
		}
	}
	for _, p := range batch {
		p.answer, p.err = Answer{}, err
	}
	c.settle(batch)
}

// logOf names the call that a log line is about, where it is about one.
func (c *committer) logOf(batch []*pending) (context.Context, *slog.Logger) {
	if len(batch) > 1 {
		return context.Background(), c.log
	}
	p := batch[0]
	return cmp.Or(p.ctx, context.Background()), c.log.With(string(keyAttribute), p.command.IdempotencyKey)
}

// settle gives back the batch's claims, then wakes its callers.
func (c *committer) settle(batch []*pending) {
	c.queue.release(batch)
	for _, p := range batch {
		p.settle()
	}
}

// quiet keeps an outage, which fails every transaction for the same reason, from flooding the log. The meters count them all.
type quiet struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (q *quiet) mayLog(reason string, now time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if now.Sub(q.last[reason]) < time.Second {
		return false
	}
	if q.last == nil {
		q.last = make(map[string]time.Time)
	}
	q.last[reason] = now
	return true
}
