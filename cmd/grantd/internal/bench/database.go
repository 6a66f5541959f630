package bench

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grantd/grantd/internal/pgdev"
	"github.com/grantd/grantd/migrations"
)

// productionSettings keep every promise of a commit, and the memory and log sizes of a small dedicated server.
func productionSettings() map[string]string {
	return map[string]string{
		"fsync":                        "on",
		"synchronous_commit":           "on",
		"full_page_writes":             "on",
		"shared_buffers":               "1GB",
		"effective_cache_size":         "4GB",
		"maintenance_work_mem":         "256MB",
		"max_wal_size":                 "4GB",
		"min_wal_size":                 "2GB",
		"checkpoint_timeout":           "15min",
		"checkpoint_completion_target": "0.9",
		"wal_buffers":                  "16MB",
	}
}

// database is one of the private server's, with a grantd server on it.
type database struct {
	url     string
	service *service
	conns   []*grpc.ClientConn
	load    *Load
}

// emptyTables leaves the tables as the migrations made them: what is measured late in a round finds what the first found.
func emptyTables(ctx context.Context, url string) error {
	return execute(ctx, url, `TRUNCATE grantd.invoices, grantd.operations, grantd.entitlements, grantd.entries, grantd.attempts,
		grantd.settled_deliveries, grantd.delivery_attempts`,
		`DELETE FROM grantd.deliveries WHERE tenant_id <> ''`, "VACUUM grantd.deliveries", "CHECKPOINT")
}

// newDatabase makes the database, migrates it and starts a server on it.
func newDatabase(ctx context.Context, postgres *pgdev.Server, name string, o CompareOptions) (*database, error) {
	if err := execute(ctx, postgres.URL("postgres"), "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return nil, err
	}
	url := postgres.URL(name)
	if _, err := migrations.Up(ctx, url); err != nil {
		return nil, err
	}
	return serveDatabase(ctx, url, o)
}

// serveDatabase starts a server on a database that is there; environment is added to its own.
func serveDatabase(ctx context.Context, url string, o CompareOptions, environment ...string) (*database, error) {
	d := &database{url: url}
	var err error
	if d.service, err = startService(ctx, o.Serve, d.url, environment...); err != nil {
		return nil, err
	}
	if d.conns, err = openConns(d.service.addr, o.Conns); err != nil {
		d.close()
		return nil, err
	}
	d.load = NewLoad(d.conns)
	return d, nil
}

func (d *database) close() {
	closeConns(d.conns)
	d.service.stop()
}

// openConns opens the connections of a server's callers.
func openConns(addr string, count int) (conns []*grpc.ClientConn, err error) {
	for range count {
		conn, err := grpc.NewClient("passthrough:///"+addr, append(DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			closeConns(conns)
			return nil, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

func closeConns(conns []*grpc.ClientConn) {
	for _, conn := range conns {
		conn.Close()
	}
}

// execute runs statements one by one outside a transaction.
func execute(ctx context.Context, url string, statements ...string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, statement := range statements {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// recycleLog writes as much of the write-ahead log as the server keeps, and marks it as used: so its segments are used again from the
// beginning, as on a server that has run for a while, and what is measured does not pay for making them.
func recycleLog(ctx context.Context, url string) error {
	return execute(ctx, url,
		`SELECT count(pg_logical_emit_message(false, '', repeat(' ', 1000000))) FROM generate_series(1, 2200)`,
		"CHECKPOINT", "SELECT pg_switch_wal()", "CHECKPOINT")
}

// preloadSQL writes the grants numbered $1 to $2. The keys look random, as those of invoices do, so that they spread over the
// indexes as they would have in years of use.
var preloadSQL = fmt.Sprintf(`WITH drawn AS MATERIALIZED (
    SELECT 'cus_' || substr(md5((1 + n %% %d)::text), 1, 14) AS tenant_id, 'in_' || substr(md5('invoice ' || n), 1, 20) AS invoice_id,
           'evt_' || substr(md5('event ' || n), 1, 14) AS event_id
      FROM generate_series($1::bigint, $2::bigint) AS n
)%s`, tenantCount, strings.TrimSpace(grantSQL))

const (
	preloadChunk   = 50_000
	preloadWriters = 2
)

// preload fills every table with count grants. The attempts' partition of today must be there: the server makes it.
func preload(ctx context.Context, url string, count int, logf func(string, ...any)) error {
	group, writing := errgroup.WithContext(ctx)
	var next atomic.Int64
	begin := time.Now()
	for range preloadWriters {
		group.Go(func() error {
			conn, err := pgx.Connect(writing, url)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(writing))
			// Nothing here has to survive a crash; the measurements come later, on sessions of their own.
			if _, err := conn.Exec(writing, "SET synchronous_commit = off"); err != nil {
				return err
			}
			for {
				last := next.Add(preloadChunk)
				first := last - preloadChunk + 1
				if first > int64(count) {
					return nil
				}
				if _, err := conn.Exec(writing, preloadSQL, first, min(last, int64(count))); err != nil {
					return fmt.Errorf("preload: %w", err)
				}
				if last%(10*preloadChunk) == 0 {
					logf("%d of %d entitlements loaded in %v", min(last, int64(count)), count, time.Since(begin).Round(time.Second))
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	// What autovacuum would do soon, and in the middle of a measurement.
	logf("vacuum and checkpoint")
	return execute(ctx, url, "VACUUM (FREEZE, ANALYZE)", "CHECKPOINT")
}
