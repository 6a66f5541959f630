package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

const scopeName = "github.com/grantd/grantd/outbox"

// Config is what an outbox is made from. The zero value of every field but Store stands for its default.
type Config struct {
	// Store must have been opened with Stored(Destinations).
	Store        *store.Store
	Destinations []Destination
	// Worker names this replica in the attempts it records; the host's name and the process id by default.
	Worker string
	// Grace is how long attempts that are under way may go on after the outbox was told to stop; 10 s by default. Those that take
	// longer are cut off, and their leases run out where they may have arrived.
	Grace time.Duration
	// LeaseMargin is what a lease lasts beyond the deadline of its attempt, so that the result can be recorded; 30 s by default. What was
	// claimed ahead may wait for its call during the first third of it.
	LeaseMargin time.Duration
	// Getenv finds the variables that hold secrets; os.Getenv by default.
	Getenv func(string) string
	// Now is the clock of signatures and breakers; time.Now by default. What is due is for the database's clock to say.
	Now func() time.Time

	Log            *slog.Logger
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
}

func (c Config) withDefaults() Config {
	if c.Worker == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "grantd"
		}
		c.Worker = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	if c.Grace == 0 {
		c.Grace = 10 * time.Second
	}
	if c.LeaseMargin == 0 {
		c.LeaseMargin = 30 * time.Second
	}
	if c.Getenv == nil {
		c.Getenv = os.Getenv
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.TracerProvider == nil {
		c.TracerProvider = tracenoop.NewTracerProvider()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = metricnoop.NewMeterProvider()
	}
	return c
}

// Outbox delivers to every destination of one replica.
type Outbox struct {
	config  Config
	workers []*worker
	byName  map[string]*worker
	// backlogs are for the metrics alone.
	backlogs backlogs
}

// New opens the way to every destination. It connects to none yet, but fails where a secret or a certificate cannot be read.
func New(cfg Config) (*Outbox, error) {
	cfg = cfg.withDefaults()
	o := &Outbox{config: cfg, byName: make(map[string]*worker, len(cfg.Destinations))}
	m, err := newMeters(cfg.MeterProvider)
	if err != nil {
		return nil, err
	}
	for i := range cfg.Destinations {
		d := &cfg.Destinations[i]
		s, err := d.section.open(d, surroundings{getenv: cfg.Getenv, now: cfg.Now, log: cfg.Log})
		if err != nil {
			o.close()
			return nil, fmt.Errorf("destination %s: %w", d.Name, err)
		}
		w := newWorker(&o.config, d, s, m)
		o.workers = append(o.workers, w)
		m.beginAtZero(d, w.label)
		o.byName[d.Name] = w
	}
	if err := o.observe(cfg.MeterProvider); err != nil {
		o.close()
		return nil, err
	}
	return o, nil
}

// BreakerState is what this replica makes of a destination as a whole; UNSPECIFIED where it does not deliver to it.
func (o *Outbox) BreakerState(destination string) entitlementv1.BreakerState {
	if w, ok := o.byName[destination]; ok {
		return w.breaker.current()
	}
	return entitlementv1.BreakerState_BREAKER_STATE_UNSPECIFIED
}

// Run delivers until ctx ends. Then it takes up nothing more, lets attempts under way finish within the grace, and records what came
// of them. An outbox is run once.
func (o *Outbox) Run(ctx context.Context) {
	var running sync.WaitGroup
	o.followPauses(ctx)
	running.Go(func() { o.watchPauses(ctx) })
	for _, w := range o.workers {
		running.Go(func() { w.run(ctx) })
		if a, ok := w.sender.(asker); ok && a.canAsk() {
			running.Go(func() { w.reconcile(ctx, a) })
		}
	}
	running.Go(func() { o.spread(ctx) })
	running.Wait()
	o.close()
}

// pausePoll is how often the database is asked which destinations are paused, and pauseTimeout bounds the question.
const (
	pausePoll    = 2 * time.Second
	pauseTimeout = 2 * time.Second
)

func (o *Outbox) watchPauses(ctx context.Context) {
	ticker := time.NewTicker(pausePoll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			o.followPauses(ctx)
		}
	}
}

// followPauses tells every worker whether its destination is paused. While the database does not say, they stay as they are: a claim
// asks it again.
func (o *Outbox) followPauses(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pauseTimeout)
	defer cancel()
	known := make([]uint64, len(o.workers))
	for i, w := range o.workers {
		known[i] = w.breaker.pausesKnown()
	}
	all, err := o.pauses(ctx)
	if err != nil {
		return
	}
	for i, w := range o.workers {
		w.breaker.follow(slices.ContainsFunc(all, func(p store.Pause) bool { return p.Destination == w.destination.Name }), known[i], time.Now())
	}
}

func (o *Outbox) pauses(ctx context.Context) (all []store.Pause, err error) {
	defer caught(o.config.Log, "the question for pauses", "", &err)
	return o.config.Store.Pauses(ctx)
}

func (o *Outbox) close() {
	for _, w := range o.workers {
		w.sender.close()
	}
}

// spread wakes every worker when this process has made deliveries. Those of other replicas are found by polling.
func (o *Outbox) spread(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.config.Store.DeliveriesMade():
		}
		for _, w := range o.workers {
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}
}
