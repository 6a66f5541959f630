package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/grantd/grantd/internal/pgdev"
)

const (
	baseClients   = 32  // of pgbench, in the comparison
	preloadCaller = 128 // callers of the point that compares a full database with an empty one
	bulkClients   = 2   // of pgbench, with a thousand grants in a transaction
	replayed      = 20_000
	// telemetryCallers are those of the point that compares servers with and without telemetry.
	telemetryCallers = 128
	warmUp           = 5 * time.Second
)

// CompareOptions say what is compared and for how long.
type CompareOptions struct {
	// Serve is the command that starts a server; the flags for its database and addresses are added.
	Serve []string
	// Duration is that of one measurement. pgbench knows whole seconds only.
	Duration time.Duration
	Rounds   int
	Conns    int
	// Clients are other numbers of pgbench's clients, measured in the first round, to show that its best is not missed.
	Clients []int
	// Preload is how many entitlements the second database holds; 0 leaves it out.
	Preload int
	// BinDir and DataDir are pgdev's: which PostgreSQL, and on which disk.
	BinDir  string
	DataDir string
	// Settings change those of the private PostgreSQL.
	Settings map[string]string
	// Logf receives a line before each step.
	Logf func(format string, args ...any)
}

// Comparison is what Compare measured.
type Comparison struct {
	Machine  Machine           `json:"machine"`
	Settings map[string]string `json:"postgres_settings"`
	Seconds  float64           `json:"seconds_per_point"`
	Rounds   int               `json:"rounds"`
	Preload  int               `json:"preload,omitempty"`
	// Results holds one measurement a round for each name.
	Results map[string][]*Result `json:"results"`
}

// step is one measurement of a round.
type step struct {
	name string
	run  func(ctx context.Context) (*Result, error)
}

// Compare starts a private PostgreSQL and a grantd server and measures them beside pgbench on the same PostgreSQL, in
// several rounds. All of it is gone afterwards.
func Compare(ctx context.Context, o CompareOptions) (_ *Comparison, err error) {
	settings := productionSettings()
	for name, value := range o.Settings {
		settings[name] = value
	}
	pgOptions := pgdev.Options{BinDir: o.BinDir, DataDir: o.DataDir, Settings: settings}
	binDir, err := pgdev.BinDir(ctx, pgOptions)
	if err != nil {
		return nil, err
	}
	if _, err := newPgbench(binDir, ""); err != nil {
		return nil, err
	}
	o.Logf("starting PostgreSQL from %s", binDir)
	postgres, err := pgdev.Start(ctx, pgOptions)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, postgres.Stop()) }()

	name := fmt.Sprintf("grantd_bench_%d", time.Now().Unix())
	empty, err := newDatabase(ctx, postgres, name, o)
	if err != nil {
		return nil, err
	}
	defer empty.close()
	base, err := newPgbench(binDir, empty.url)
	if err != nil {
		return nil, err
	}
	if err := recycleLog(ctx, postgres.URL("postgres")); err != nil {
		return nil, err
	}
	collector, err := startCollector()
	if err != nil {
		return nil, err
	}
	defer collector.stop()
	dark, err := serveDatabase(ctx, empty.url, o, "OTEL_SDK_DISABLED=true")
	if err != nil {
		return nil, err
	}
	defer dark.close()
	traced, err := serveDatabase(ctx, empty.url, o, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+collector.addr)
	if err != nil {
		return nil, err
	}
	defer traced.close()
	var full *database
	if o.Preload > 0 {
		if full, err = newDatabase(ctx, postgres, name+"_full", o); err != nil {
			return nil, err
		}
		defer full.close()
		if err := preload(ctx, full.url, o.Preload, o.Logf); err != nil {
			return nil, err
		}
	}
	c := &Comparison{
		Machine: readMachine(postgres.Version()), Settings: settings, Seconds: o.Duration.Seconds(), Rounds: o.Rounds,
		Preload: o.Preload, Results: make(map[string][]*Result),
	}
	return c, c.measure(ctx, o, base, &databases{empty: empty, dark: dark, traced: traced, full: full})
}

// databases are those that a comparison measures. dark is a server on the empty one that has no telemetry at all, traced one that exports a
// span of every call, and full is nil where no database was filled.
type databases struct {
	empty, dark, traced, full *database
}

func (c *Comparison) measure(ctx context.Context, o CompareOptions, base *pgbench, on *databases) error {
	warm := Point{Callers: baseClients, Duration: warmUp}
	for _, d := range []*database{on.empty, on.dark, on.traced, on.full} {
		if d == nil {
			continue
		}
		if _, err := d.load.Run(ctx, warm); err != nil {
			return err
		}
	}
	if _, err := base.run(ctx, baseClients, warmUp); err != nil {
		return err
	}
	steps := compareSteps(o, base, on)
	for round := range o.Rounds {
		for i := range steps {
			// Each round begins elsewhere, so that no measurement always follows the same one.
			s := steps[(i+round)%len(steps)]
			if err := emptyTables(ctx, on.empty.url); err != nil {
				return err
			}
			result, err := s.run(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			result.Name = s.name
			c.Results[s.name] = append(c.Results[s.name], result)
			o.Logf("round %d: %s", round+1, result)
		}
		if round > 0 {
			continue
		}
		for _, clients := range o.Clients {
			if name := pgbenchName(clients); c.Results[name] == nil {
				if err := emptyTables(ctx, on.empty.url); err != nil {
					return err
				}
				result, err := base.run(ctx, clients, o.Duration)
				if err != nil {
					return err
				}
				c.Results[name] = append(c.Results[name], result)
				o.Logf("round %d: %s", round+1, result)
			}
		}
	}
	return nil
}

// compareSteps puts pgbench's measurement among grantd's.
func compareSteps(o CompareOptions, base *pgbench, on *databases) []step {
	pgbenchStep := func(clients int) step {
		return step{pgbenchName(clients), func(ctx context.Context) (*Result, error) { return base.run(ctx, clients, o.Duration) }}
	}
	loadStep := func(d *database, name string, p Point) step {
		p.Duration = o.Duration
		return step{name, func(ctx context.Context) (*Result, error) {
			if p.Replay {
				if err := d.load.Fill(ctx, replayed); err != nil {
					return nil, err
				}
			}
			return d.load.Run(ctx, p)
		}}
	}
	var steps []step
	grants := func(d *database, p Point) step { return loadStep(d, p.Name(), p) }
	steps = append(steps,
		pgbenchStep(baseClients),
		grants(on.empty, unary(32)),
		loadStep(on.dark, darkName, unary(telemetryCallers)), grants(on.empty, unary(128)), loadStep(on.traced, tracedName, unary(telemetryCallers)),
		grants(on.empty, unary(512)),
		grants(on.empty, Point{Callers: 2, Batch: MaxBatch}),
		step{pgbenchBulkName, func(ctx context.Context) (*Result, error) { return base.runBulk(ctx, bulkClients, o.Duration) }},
		grants(on.empty, Point{Callers: 32, Replay: true}),
		pgbenchStep(1), grants(on.empty, unary(1)))
	if on.full != nil {
		steps = append(steps, loadStep(on.full, preloadedName(o.Preload), unary(preloadCaller)))
	}
	return steps
}

func unary(callers int) Point { return Point{Callers: callers} }

var (
	pgbenchBulkName = fmt.Sprintf("pgbench, %d clients, %s grants a transaction", bulkClients, thousands(MaxBatch))
	darkName        = unary(telemetryCallers).Name() + ", no telemetry at all"
	tracedName      = unary(telemetryCallers).Name() + ", every call traced"
)

func pgbenchName(clients int) string {
	if clients == 1 {
		return "pgbench, 1 client"
	}
	return fmt.Sprintf("pgbench, %d clients", clients)
}

func preloadedName(entitlements int) string {
	return fmt.Sprintf("%s, %s entitlements present", unary(preloadCaller).Name(), thousands(float64(entitlements)))
}
