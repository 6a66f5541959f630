package store

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// writer is the combining writer: a few committers take whatever commands wait and commit them together. There is no timer, so
// an idle service commits a single command at once, and a busy one commits hundreds for the price of one.
//
//	put → queue → committer → one transaction for all → answers
//	                  │ a lock is held elsewhere
//	                  └→ splitter → transactions for the parts → answers
//	                         │ a command whose own lock it is
//	                         └→ slow lane → a transaction of its own, with time to wait
type writer struct {
	config *Config
	queue  *queue
	// split has batches to be divided, and slow the commands that are blocked.
	split  chan []*pending
	slow   *blocked
	meters *meters
	// made is called after deliveries were made.
	made  func()
	log   *slog.Logger
	quiet quiet

	sessions []*session
	// end ends the making of sessions.
	end        context.CancelFunc
	committers sync.WaitGroup
	splitter   sync.WaitGroup
	lanes      sync.WaitGroup
	stopping   atomic.Bool
	closing    sync.Once
}

// splitQueueLimit bounds the batches that wait to be divided; beyond it the committer divides them itself.
const splitQueueLimit = 4

func newWriter(cfg *Config, q *queue, m *meters, made func(),
	makeSession func(ended context.Context, lockTimeout time.Duration) *session) *writer {
	ended, end := context.WithCancel(context.Background())
	w := &writer{
		config: cfg, queue: q, meters: m, made: made, log: cfg.Log,
		split: make(chan []*pending, splitQueueLimit), slow: newBlocked(cfg.SlowQueueLimit), end: end,
	}
	for range cfg.Committers {
		s := makeSession(ended, cfg.LockTimeout)
		// Now, so that no call waits for it. What keeps it from being made, the first batch is told.
		_ = s.connect(cfg.ConnectTimeout)
		w.start(&w.committers, s, (*committer).takeBatches)
	}
	w.start(&w.splitter, makeSession(ended, isolateTimeout), (*committer).divideBatches)
	for range cfg.SlowLanes {
		w.start(&w.lanes, makeSession(ended, laneTimeout), (*committer).waitForLocks)
	}
	return w
}

func (w *writer) start(group *sync.WaitGroup, s *session, work func(*committer)) {
	c := &committer{writer: w, session: s, counts: make(map[answerLabels]int64)}
	c.run = transaction{
		session: s, catalog: w.config.Catalog, timeout: w.config.CommitTimeout, destinations: w.config.Destinations, made: w.made,
	}
	w.sessions = append(w.sessions, s)
	group.Go(func() {
		defer s.drop()
		work(c)
	})
}

// closeTimeout bounds the end: after it the sockets are closed, and what was under way is answered as of unknown fate.
const closeTimeout = time.Second

// close lets every command that waits be answered, and returns when none is left. Blocked commands are not waited for.
func (w *writer) close() {
	w.closing.Do(func() {
		w.stopping.Store(true)
		w.queue.shut()
		defer w.end()
		cut := time.AfterFunc(closeTimeout, func() {
			w.end()
			for _, s := range w.sessions {
				s.cut()
			}
		})
		defer cut.Stop()
		w.committers.Wait()
		close(w.split)
		w.splitter.Wait()
		w.slow.shut()
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
	if n < len(commands) {
		refused := Failure{Reason: ReasonQueueFull, Overload: true}
		if closed {
			refused = Failure{Reason: ReasonShuttingDown}
		}
		w.meters.unanswered(refused.Reason, len(commands)-n)
		for _, p := range commands[n:] {
			f := refused
			f.RetryDelay = jitter(200 * time.Millisecond)
			p.err = &f
			p.settle()
		}
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
