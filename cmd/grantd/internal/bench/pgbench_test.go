package bench_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// The comparison is only fair while the statement writes what a grant writes, and the statement breaks with every change
// of the tables that it does not know of.
func TestGrantSQL_WritesEveryTable(t *testing.T) {
	url := pgtest.New(t)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(t.Context()) })
	if _, err := conn.Exec(t.Context(), "CREATE TABLE grantd.attempts_all PARTITION OF grantd.attempts DEFAULT"); err != nil {
		t.Fatal(err)
	}
	count := func(want int) {
		t.Helper()
		for _, table := range []string{"invoices", "operations", "entitlements", "entries", "attempts"} {
			var n int
			if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM grantd."+table).Scan(&n); err != nil {
				t.Fatal(err)
			}
			if n != want {
				t.Errorf("%d rows in %s, want %d", n, table, want)
			}
		}
	}

	if err := bench.Preload(t.Context(), url, 60_001); err != nil {
		t.Fatal(err)
	}
	count(60_001)

	set, statement, found := strings.Cut(bench.PgbenchScript, "\n")
	if !found || !strings.HasPrefix(set, `\set tenant `) {
		t.Fatalf("the script begins with %q", set)
	}
	if colon := regexp.MustCompile(`[^:]:[a-z]+`).FindAllString(statement, -1); len(colon) != 1 {
		t.Errorf("pgbench would take %q for variables", colon)
	}
	for range 3 {
		if _, err := conn.Exec(t.Context(), strings.ReplaceAll(statement, ":tenant", "7")); err != nil {
			t.Fatal(err)
		}
	}
	count(60_004)
}

func TestParseRate(t *testing.T) {
	output := "number of transactions actually processed: 9\nlatency average = 6.1 ms\n" +
		"tps = 5234.567890 (without initial connection time)\n"
	if got, err := bench.ParseRate(output); err != nil || got != 5234.56789 {
		t.Errorf("ParseRate = %v, %v", got, err)
	}
	if got, err := bench.ParseRate("pgbench: error\n"); err == nil {
		t.Errorf("ParseRate = %v of an output without a rate", got)
	}
}

func TestReadTransactionLogs(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"log.17":   "0 1 1000 0 1700000000 1\n1 1 3000 0 1700000000 2\n",
		"log.17.1": "2 1 2000 0 1700000000 3\n",
		"other":    "0 1 9000 0 1700000000 1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	times, err := bench.ReadTransactionLogs(filepath.Join(dir, "log.*"))
	if err != nil {
		t.Fatal(err)
	}
	if got := times.Percentile(50).Round(100 * time.Microsecond); times.Count() != 3 || got != 2*time.Millisecond || times.Max() != 3*time.Millisecond {
		t.Errorf("%d transactions, p50 %v, max %v; want 3, 2ms, 3ms", times.Count(), got, times.Max())
	}
	if _, err := bench.ReadTransactionLogs(filepath.Join(dir, "none.*")); err == nil {
		t.Error("no log is no error")
	}
}
