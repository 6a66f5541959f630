package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
)

// benchCmd is `grantd bench`.
type benchCmd struct {
	Target       target   `embed:""`
	Mode         []string `help:"Single calls, batches, or both." enum:"unary,batch" default:"unary,batch" env:"GRANTD_BENCH_MODE"`
	Keys         []string `help:"New grants, replays of applied ones, or both." enum:"new,replay" default:"new,replay" env:"GRANTD_BENCH_KEYS"`
	Callers      []int    `help:"Numbers of single calls under way at once." default:"1,32,128,512" env:"GRANTD_BENCH_CALLERS"`
	BatchCallers []int    `help:"Numbers of batches under way at once." default:"1,2" env:"GRANTD_BENCH_BATCH_CALLERS"`
	Batch        int      `help:"Grants in a batch, at most 1000." default:"1000" env:"GRANTD_BENCH_BATCH"`
	Seconds      int      `help:"Length of each measurement; 0: until --count." default:"5" env:"GRANTD_BENCH_SECONDS"`
	Count        int      `help:"Requests after which a measurement ends, if sooner; 0: no limit." default:"0" env:"GRANTD_BENCH_COUNT"`
	Conns        int      `help:"Connections that the callers share." default:"4" env:"GRANTD_BENCH_CONNS"`
	JSON         bool     `name:"json" help:"Print JSON instead of a table." env:"GRANTD_BENCH_JSON"`

	Deliveries  bool `help:"Start a private PostgreSQL, and measure grants, the draining of a backlog to a webhook and to NATS, and both at once." env:"GRANTD_BENCH_DELIVERIES"`
	Backlog     int  `help:"With --deliveries: how many deliveries wait." default:"60000" env:"GRANTD_BENCH_BACKLOG"`
	Concurrency int  `help:"With --deliveries: the destination's concurrency; 0 leaves the default." default:"0" env:"GRANTD_BENCH_CONCURRENCY"`

	Compare bool              `help:"Start a private PostgreSQL and a server, measure them beside pgbench on the same PostgreSQL, and remove both." env:"GRANTD_BENCH_COMPARE"`
	Rounds  int               `help:"With --compare and --deliveries: rounds of measurements, of which the medians count." default:"3" env:"GRANTD_BENCH_ROUNDS"`
	Preload int               `help:"With --compare: also measure a second database that holds that many entitlements, for example 5000000." default:"0" env:"GRANTD_BENCH_PRELOAD"`
	Clients []int             `help:"With --compare: other numbers of pgbench's clients, beside 32 and 1." default:"8,16,64" env:"GRANTD_BENCH_CLIENTS"`
	PGBin   string            `name:"pg-bin" help:"With --compare and --deliveries: folder of PostgreSQL's programs; found on the machine when empty." type:"path" env:"GRANTD_PG_BIN"`
	PG      map[string]string `name:"pg" help:"With --compare and --deliveries: settings of the private PostgreSQL, name=value." mapsep:";" env:"GRANTD_BENCH_PG"`
}

// replayedGrants is how many grants are made for the replays of one run.
const replayedGrants = 20_000

// loadGCPercent lets the load's own heap grow: the server is measured, and shares the machine.
const loadGCPercent = 800

func (c *benchCmd) run(ctx context.Context, io stdio) error {
	switch {
	case c.Conns < 1:
		return errors.New("--conns must be at least 1")
	case c.Batch < 1 || c.Batch > bench.MaxBatch:
		return fmt.Errorf("--batch must be between 1 and %d", bench.MaxBatch)
	case c.Seconds < 0 || c.Count < 0 || c.Preload < 0:
		return errors.New("--seconds, --count and --preload must not be negative")
	case c.Seconds == 0 && (c.Count == 0 || c.Compare || c.Deliveries):
		return errors.New("--seconds must be positive")
	case c.Compare && c.Deliveries:
		return errors.New("--compare and --deliveries are two measurements")
	case (c.Compare || c.Deliveries) && c.Rounds < 1:
		return errors.New("--rounds must be at least 1")
	case c.Deliveries && c.Backlog < 1:
		return errors.New("--backlog must be at least 1")
	case slices.ContainsFunc(slices.Concat(c.Callers, c.BatchCallers, c.Clients), func(n int) bool { return n < 1 }):
		return errors.New("--callers, --batch-callers and --clients must be at least 1")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(loadGCPercent))
	if c.Compare {
		return c.compare(ctx, io)
	}
	if c.Deliveries {
		return c.deliveries(ctx, io)
	}
	return c.measure(ctx, io)
}

func (c *benchCmd) deliveries(ctx context.Context, io stdio) error {
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	report, err := bench.Deliveries(ctx, bench.DeliveriesOptions{
		Serve:       []string{executable, "serve"},
		Duration:    time.Duration(c.Seconds) * time.Second,
		Rounds:      c.Rounds,
		Conns:       c.Conns,
		Backlog:     c.Backlog,
		Concurrency: c.Concurrency,
		BinDir:      c.PGBin,
		Settings:    c.PG,
		StartNATS: func(dir string) (string, func(), error) {
			broker, err := startDevNATS("127.0.0.1:0", dir)
			if err != nil {
				return "", nil, err
			}
			return broker.url, broker.stop, nil
		},
		Logf: func(format string, args ...any) { fmt.Fprintf(io.stderr, format+"\n", args...) },
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(io.stdout, report)
	}
	return report.Write(io.stdout)
}

func (c *benchCmd) compare(ctx context.Context, io stdio) error {
	executable, err := os.Executable()
	if err != nil {
		return err
	}
	comparison, err := bench.Compare(ctx, bench.CompareOptions{
		Serve:    []string{executable, "serve"},
		Duration: time.Duration(c.Seconds) * time.Second,
		Rounds:   c.Rounds,
		Conns:    c.Conns,
		Clients:  c.Clients,
		Preload:  c.Preload,
		BinDir:   c.PGBin,
		Settings: c.PG,
		Logf:     func(format string, args ...any) { fmt.Fprintf(io.stderr, format+"\n", args...) },
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(io.stdout, comparison)
	}
	return comparison.Write(io.stdout)
}

func (c *benchCmd) measure(ctx context.Context, io stdio) error {
	var conns []*grpc.ClientConn
	for range c.Conns {
		conn, err := c.Target.dial(ctx, bench.DialOptions()...)
		if err != nil {
			return err
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	load := bench.NewLoad(conns)
	if slices.Contains(c.Keys, "replay") {
		if err := load.Fill(ctx, replayedGrants); err != nil {
			return err
		}
	}
	var results []*bench.Result
	for _, point := range c.points() {
		result, err := load.Run(ctx, point)
		if err != nil {
			return err
		}
		if !c.JSON {
			fmt.Fprintln(io.stderr, result)
		}
		results = append(results, result)
	}
	if c.JSON {
		return writeJSON(io.stdout, results)
	}
	return writeResults(io.stdout, results)
}

func (c *benchCmd) points() []bench.Point {
	var points []bench.Point
	for _, mode := range c.Mode {
		callers, batch := c.Callers, 0
		if mode == "batch" {
			callers, batch = c.BatchCallers, c.Batch
		}
		for _, keys := range c.Keys {
			for _, n := range callers {
				points = append(points, bench.Point{
					Callers: n, Batch: batch, Replay: keys == "replay",
					Duration: time.Duration(c.Seconds) * time.Second, Count: c.Count,
				})
			}
		}
	}
	return points
}

func writeResults(w io.Writer, results []*bench.Result) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "work\tper second\tp50 ms\tp99 ms\tp99.9 ms\tmax ms\tnew\talready\tother\t\n")
	for _, r := range results {
		var other uint64
		for _, n := range r.Unexpected() {
			other += n
		}
		fmt.Fprintf(table, "%s\t%.0f\t%.2f\t%.2f\t%.2f\t%.2f\t%d\t%d\t%d\t\n", r.Name, r.PerSecond, r.P50Millis, r.P99Millis,
			r.P999Millis, r.MaxMillis, r.Outcomes["OUTCOME_NEWLY_APPLIED"], r.Outcomes["OUTCOME_ALREADY_APPLIED"], other)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		unexpected := r.Unexpected()
		for _, name := range slices.Sorted(maps.Keys(unexpected)) {
			if _, err := fmt.Fprintf(w, "%s: %d times %s\n", r.Name, unexpected[name], name); err != nil {
				return err
			}
		}
	}
	return nil
}

func writeJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
