package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Config is what a store is made from. The zero value of every field but DatabaseURL stands for its default.
type Config struct {
	// DatabaseURL may name several hosts; writes go to the one that is a writable primary.
	DatabaseURL string
	// Catalog is nil where every type may be granted.
	Catalog *Catalog
	// Destinations get the entries that are appended from now on. Without any, entries stay at home.
	Destinations []Destination

	// Committers is how many transactions run at once, 2 by default. Fewer and larger ones cost less, so another one begins only when as
	// much waits as those under way hold.
	Committers int
	// BatchLimit is how many commands one transaction takes, 1000 by default.
	BatchLimit int
	// QueueLimit is how many commands may wait, 8192 by default.
	QueueLimit int
	// SlowLanes is how many blocked commands are waited for at once, and SlowQueueLimit how many may wait for that; 4 and 256 by
	// default.
	SlowLanes      int
	SlowQueueLimit int
	// LockTimeout is how long a batch waits for a row that another session holds, 25 ms by default; SlowLockTimeout how
	// long a command in the slow lane does, 5 s by default.
	LockTimeout     time.Duration
	SlowLockTimeout time.Duration
	// CommitTimeout bounds the silence of a transaction's socket, 10 s by default; after it the commit's fate is unknown. A refund of more
	// than 1000 entitlements has a millisecond more for each.
	CommitTimeout time.Duration
	// ConnectTimeout bounds the making of a session, 5 s by default.
	ConnectTimeout time.Duration
	// ReadConns is the size of the pool for reads, 8 by default.
	ReadConns int32
	// OutboxConns is the size of the pool for deliveries, 4 by default; there is none without destinations.
	OutboxConns int32

	// AliasRetention is how long an alias is kept, 400 days by default; AttemptRetention how long an attempt is, 30 days.
	AliasRetention   time.Duration
	AttemptRetention time.Duration
	// DeliveryRetention is how long a delivery is kept after it was delivered or discarded, 30 days by default.
	DeliveryRetention time.Duration

	Log            *slog.Logger
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// QueryTracer sees every statement, where telemetry is on.
	QueryTracer pgx.QueryTracer

	tracer trace.Tracer
}

func (c Config) withDefaults() Config {
	setDefault(&c.Committers, 2)
	setDefault(&c.BatchLimit, 1000)
	setDefault(&c.QueueLimit, 8192)
	setDefault(&c.SlowLanes, 4)
	setDefault(&c.SlowQueueLimit, 256)
	setDefault(&c.LockTimeout, 25*time.Millisecond)
	setDefault(&c.SlowLockTimeout, 5*time.Second)
	setDefault(&c.CommitTimeout, 10*time.Second)
	setDefault(&c.ConnectTimeout, 5*time.Second)
	setDefault(&c.ReadConns, 8)
	setDefault(&c.OutboxConns, 4)
	setDefault(&c.AliasRetention, 400*24*time.Hour)
	setDefault(&c.AttemptRetention, 30*24*time.Hour)
	setDefault(&c.DeliveryRetention, 30*24*time.Hour)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.TracerProvider == nil {
		c.TracerProvider = tracenoop.NewTracerProvider()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = metricnoop.NewMeterProvider()
	}
	c.tracer = c.TracerProvider.Tracer("github.com/grantd/grantd/store")
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Store is the authority. Its methods may be called from any number of goroutines, in any number of processes on one
// database.
type Store struct {
	config Config
	reads  *pgxpool.Pool
	// outbox has the sessions of those who deliver: their load must not stand before look-ups. Without destinations it is reads.
	outbox *pgxpool.Pool
	// house is for the store's own questions: whether it is ready, and what has expired. They must not wait behind look-ups.
	house  *pgxpool.Pool
	writer *writer
	tokens pageTokens
	// made wakes whoever delivers.
	made chan struct{}

	stopMaintenance context.CancelFunc
	maintenance     sync.WaitGroup
}

// Open connects to a migrated database and starts the writer and the maintenance of old rows. It fails when no primary answers, so
// that a wrong URL is noticed at once.
func Open(ctx context.Context, config Config) (*Store, error) {
	s := &Store{config: config.withDefaults(), made: make(chan struct{}, 1)}
	cfg := &s.config
	if err := checkDestinations(cfg.Destinations); err != nil {
		return nil, err
	}

	writerConn, err := pgx.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	applySettings(&writerConn.Config)
	writerConn.Tracer = cfg.QueryTracer

	primary := pgconn.ValidateConnectTargetSessionAttrsPrimary
	if s.reads, err = openPool(ctx, cfg, cfg.ReadConns, primary, nil); err != nil {
		return nil, err
	}
	if s.house, err = openPool(ctx, cfg, houseConns, primary, houseSettings); err != nil {
		s.reads.Close()
		return nil, err
	}
	s.outbox = s.reads
	if err = s.reads.Ping(ctx); err != nil {
		err = fmt.Errorf("open the database: %w", err)
	} else if len(cfg.Destinations) > 0 {
		var outbox *pgxpool.Pool
		if outbox, err = openPool(ctx, cfg, cfg.OutboxConns, validateWriter(cfg.CommitTimeout), nil); err == nil {
			s.outbox = outbox
		}
	}
	if err != nil {
		s.closePools()
		return nil, err
	}
	q := newQueue(cfg.QueueLimit)
	m, err := newMeters(cfg.MeterProvider, q, cfg.Destinations)
	if err := errors.Join(err, s.observePools()); err != nil {
		s.closePools()
		return nil, err
	}
	s.writer = newWriter(cfg, q, m, s.wake, func(ended context.Context, lockTimeout time.Duration) *session {
		return &session{config: writerConn, lockTimeout: lockTimeout, commitTimeout: cfg.CommitTimeout, ended: ended}
	})
	if err := errors.Join(s.loadPageTokens(ctx), s.startMaintenance(ctx)); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Store) observePools() error {
	errs := []error{observePool(s.config.MeterProvider, s.reads, "reads"), observePool(s.config.MeterProvider, s.house, "house")}
	if s.outbox != s.reads {
		errs = append(errs, observePool(s.config.MeterProvider, s.outbox, "outbox"))
	}
	return errors.Join(errs...)
}

// houseConns are one for readiness and one for maintenance.
const houseConns = 2

// houseSettings keep a round of maintenance from waiting for one lock, a backup's for example, when there is more to be done.
var houseSettings = map[string]string{"lock_timeout": "5s"}

// openPool makes a pool. Look-ups go to a primary, also while it is read-only: what is there may be told. Deliveries go to a writable one.
func openPool(ctx context.Context, cfg *Config, size int32, validate pgconn.ValidateConnectFunc, settings map[string]string) (*pgxpool.Pool, error) {
	pool, err := pgxpool.ParseConfig(cfg.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	applySettings(&pool.ConnConfig.Config)
	maps.Copy(pool.ConnConfig.RuntimeParams, settings)
	pool.ConnConfig.ValidateConnect = validate
	pool.ConnConfig.ConnectTimeout = cfg.ConnectTimeout
	pool.ConnConfig.Tracer = cfg.QueryTracer
	pool.MaxConns = size
	pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		registerArrays(conn.TypeMap())
		return registerRowTypes(ctx, conn)
	}
	p, err := pgxpool.NewWithConfig(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	return p, nil
}

// Close answers what is still queued, then ends every session.
func (s *Store) Close() {
	if s.stopMaintenance != nil {
		s.stopMaintenance()
		s.maintenance.Wait()
	}
	s.writer.close()
	// A pool waits for its sessions to end, and a silent server never ends one.
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		s.closePools()
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
		s.config.Log.Warn("the database did not end its sessions in time")
	}
}

func (s *Store) closePools() {
	if s.outbox != s.reads {
		s.outbox.Close()
	}
	s.reads.Close()
	s.house.Close()
}

// Apply decides and commits one command. It returns a *Failure when the database gave no answer, and ctx's error when the caller
// left first: a command that was already taken up is then committed all the same, and a replay tells.
func (s *Store) Apply(ctx context.Context, c *Command) (Answer, error) {
	p := &pending{command: *c}
	if err := s.locate(ctx, &p.command); err != nil {
		return Answer{}, err
	}
	p.traceWith(ctx)
	if err := s.writer.submit(ctx, []*pending{p}); err != nil {
		return Answer{}, err
	}
	return p.answer, p.err
}

// Result is what one command of many is told: an answer, or an error as Apply returns.
type Result struct {
	Answer Answer
	Err    error
}

// ApplyAll decides and commits many commands, not atomically: each has its own result, in the order given. Where two share
// a key or a business key, the earlier one is decided first. contexts carry each command's span; nil stands for ctx.
func (s *Store) ApplyAll(ctx context.Context, commands []Command, contexts []context.Context) ([]Result, error) {
	all := make([]*pending, len(commands))
	room := make([]pending, len(commands))
	for i := range commands {
		p := &room[i]
		p.command = commands[i]
		if err := s.locate(ctx, &p.command); err != nil {
			return nil, err
		}
		p.traceWith(ctx)
		if contexts != nil {
			p.traceWith(contexts[i])
		}
		all[i] = p
	}
	if len(all) > 0 {
		if err := s.writer.submit(ctx, all); err != nil {
			return nil, err
		}
	}
	results := make([]Result, len(all))
	for i, p := range all {
		results[i] = Result{p.answer, p.err}
	}
	return results, nil
}

// readTimeout bounds a look-up, or an operator's order, whose caller set no deadline, so that a silent server does not hold it, and its
// connection, for ever.
const readTimeout = 10 * time.Second

// locateSQL finds what never changes: the business key of an id, and the id of a business key.
const locateSQL = `
SELECT entitlement_id, invoice_id, entitlement_type, operation_version
  FROM entitlements
 WHERE tenant_id = $1 AND (entitlement_id = $2
    OR invoice_id = $3 AND entitlement_type = $4 AND operation_version = $5)
 LIMIT 1`

// locate completes the target of a reversal or reinstatement, so that the writer knows which invoice to lock. A target that is not
// there is left as it is: the ladder refuses it.
func (s *Store) locate(ctx context.Context, c *Command) error {
	if c.Kind != entitlementv1.OperationKind_OPERATION_KIND_REVERSE && c.Kind != entitlementv1.OperationKind_OPERATION_KIND_REINSTATE {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	b := &c.Target.BusinessKey
	var id any
	if c.Target.EntitlementID != uuid.Nil {
		id = [16]byte(c.Target.EntitlementID)
	}
	var found [16]byte
	err := s.reads.QueryRow(ctx, locateSQL, c.TenantID, id, b.InvoiceID, b.EntitlementType, b.OperationVersion).
		Scan(&found, &b.InvoiceID, &b.EntitlementType, &b.OperationVersion)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		err = readFailure(err)
		if f, ok := errors.AsType[*Failure](err); ok {
			s.writer.meters.unanswered(f.Reason, 1)
		}
		return err
	}
	c.Target.EntitlementID = found
	return nil
}

// readFailure turns an error of a read, or of a transaction of the outbox's sessions, into a Failure where a later one may succeed.
func readFailure(err error) error {
	if _, unknown := errors.AsType[unknownFate](err); unknown {
		return &Failure{Reason: ReasonCommitUnknown, RetryDelay: jitter(time.Second), cause: err}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	switch what, reason := interpretError(err); {
	case what == giveUp || reason == "":
		return fmt.Errorf("read: %w", err)
	default:
		return &Failure{Reason: reason, RetryDelay: jitter(time.Second), cause: err}
	}
}
