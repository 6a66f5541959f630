package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/grantd/grantd/cmd/grantd/internal/latency"
)

// grantSQL is one statement that writes everything that a new grant writes, for each row of "drawn": tenant_id, invoice_id and
// event_id. It is what a handler without a combining writer would send, and it also loads what is there before. Colons stand in
// it as \072: pgbench takes a colon before a letter for one of its variables, also inside quotes.
//
//go:embed grant.sql
var grantSQL string

// pgbenchScript is a grant with random keys. \set makes the tenant a parameter, so that -M prepared has something to bind.
var pgbenchScript = fmt.Sprintf(`\set tenant random(1, %d)
WITH drawn AS MATERIALIZED (
    SELECT 'cus_' || substr(md5(:tenant::text), 1, 14) AS tenant_id, 'in_' || substr(md5(random()::text), 1, 20) AS invoice_id,
           'evt_' || substr(md5(random()::text), 1, 14) AS event_id
)%s;
`, tenantCount, strings.TrimSpace(grantSQL))

// pgbenchBulkScript is a thousand of them in one statement: what the inserts cost PostgreSQL when nothing else does, and so what a batch
// cannot pass.
var pgbenchBulkScript = fmt.Sprintf(`WITH drawn AS MATERIALIZED (
    SELECT 'cus_' || substr(md5(floor(1 + random() * %d)::text), 1, 14) AS tenant_id, 'in_' || substr(md5(random()::text), 1, 20) AS invoice_id,
           'evt_' || substr(md5(random()::text), 1, 14) AS event_id
      FROM generate_series(1, %d)
)%s;
`, tenantCount, MaxBatch, strings.TrimSpace(grantSQL))

// pgbench is PostgreSQL's own load generator.
type pgbench struct {
	program  string
	database string // URL
}

// newPgbench looks beside the server's programs, then in PATH.
func newPgbench(binDir, database string) (*pgbench, error) {
	program := filepath.Join(binDir, "pgbench")
	if _, err := os.Stat(program); err != nil {
		if program, err = exec.LookPath("pgbench"); err != nil {
			return nil, errors.New("pgbench is not installed; it comes with PostgreSQL's packages (Debian, Ubuntu: postgresql-contrib or postgresql)")
		}
	}
	return &pgbench{program: program, database: database}, nil
}

// run lets the clients send one grant after the other, each in a transaction of its own.
func (p *pgbench) run(ctx context.Context, clients int, duration time.Duration) (*Result, error) {
	return p.runScript(ctx, pgbenchScript, clients, duration)
}

// runBulk lets them send a thousand grants in each transaction.
func (p *pgbench) runBulk(ctx context.Context, clients int, duration time.Duration) (*Result, error) {
	r, err := p.runScript(ctx, pgbenchBulkScript, clients, duration)
	if err != nil {
		return nil, err
	}
	r.Name, r.Batch = pgbenchBulkName, MaxBatch
	r.PerSecond *= MaxBatch
	r.Requests *= MaxBatch
	return r, nil
}

func (p *pgbench) runScript(ctx context.Context, text string, clients int, duration time.Duration) (*Result, error) {
	dir, err := os.MkdirTemp("", "grantd-pgbench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	script := filepath.Join(dir, "grant.sql")
	if err := os.WriteFile(script, []byte(text), 0o600); err != nil {
		return nil, err
	}
	seconds := max(int(duration.Round(time.Second)/time.Second), 1)
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.program, "--no-vacuum", "--protocol=prepared", "--file="+script,
		"--client="+strconv.Itoa(clients), "--jobs="+strconv.Itoa(min(clients, runtime.NumCPU())),
		"--time="+strconv.Itoa(seconds), "--log", "--log-prefix="+filepath.Join(dir, "log"), p.database)
	cmd.Dir = dir
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("pgbench: %w: %s", err, lastLines(stderr.String(), 5))
	}

	r := &Result{Name: pgbenchName(clients), Callers: clients, Seconds: float64(seconds)}
	if r.PerSecond, err = parseRate(stdout.String()); err != nil {
		return nil, err
	}
	times, err := readTransactionLogs(filepath.Join(dir, "log.*"))
	if err != nil {
		return nil, err
	}
	r.Requests = times.Count()
	r.P50Millis, r.P99Millis = millis(times.Percentile(50)), millis(times.Percentile(99))
	r.P999Millis, r.MaxMillis = millis(times.Percentile(99.9)), millis(times.Max())
	return r, nil
}

var rateLine = regexp.MustCompile(`(?m)^tps = ([0-9.]+) \(without initial connection time\)`)

func parseRate(output string) (float64, error) {
	match := rateLine.FindStringSubmatch(output)
	if match == nil {
		return 0, fmt.Errorf("pgbench printed no rate: %s", lastLines(output, 5))
	}
	return strconv.ParseFloat(match[1], 64)
}

// readTransactionLogs reads the files that pgbench's threads wrote: a line for each transaction, with its latency in
// microseconds as the third number.
func readTransactionLogs(pattern string) (*latency.Histogram, error) {
	names, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	times := new(latency.Histogram)
	for _, name := range names {
		if err := readTransactionLog(name, times); err != nil {
			return nil, err
		}
	}
	if times.Count() == 0 {
		return nil, errors.New("pgbench logged no transaction")
	}
	return times, nil
}

func readTransactionLog(name string, times *latency.Histogram) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		fields := strings.Fields(scanner.Text())
		if len(fields) < 3 {
			return fmt.Errorf("pgbench's log: %q", scanner.Text())
		}
		micros, err := strconv.ParseInt(fields[2], 10, 64)
		if err != nil {
			return fmt.Errorf("pgbench's log: %w", err)
		}
		times.Record(time.Duration(micros) * time.Microsecond)
	}
	return scanner.Err()
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(len(lines)-n, 0):], "\n")
}
