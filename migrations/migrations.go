// Package migrations is the authority for the shape of the database: numbered, forward-only SQL files, embedded in the
// binary. Any number of replicas may call Up at once.
package migrations

import (
	"cmp"
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// FS holds the migrations, 0001_*.sql and on.
//
//go:embed *.sql
var FS embed.FS

// versionTable keeps which migrations ran.
const versionTable = "grantd.schema_version"

// makeSchemaSQL comes before the first migration, since the version table is in it.
const (
	schemaThereSQL = `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'grantd')`
	makeSchemaSQL  = `CREATE SCHEMA IF NOT EXISTS grantd`
)

// letServiceReadSQL lets the service see whether it is up to date.
const (
	serviceReadsSQL   = `SELECT has_table_privilege('grantd_service', 'grantd.schema_version', 'SELECT')`
	letServiceReadSQL = `GRANT SELECT ON grantd.schema_version TO grantd_service`
)

const encodingSQL = `SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname = current_database()`

// Up brings the database up to date and returns the names of the files it ran; none when it already was. The login needs
// CREATE on the database and, unless the role grantd_service exists and the login is its member, CREATEROLE.
func Up(ctx context.Context, databaseURL string) ([]string, error) {
	cfg, err := parse(databaseURL)
	if err != nil {
		return nil, err
	}
	cfg.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	db := stdlib.OpenDB(*cfg)
	defer db.Close()

	provider, err := newProvider(db)
	if err != nil {
		return nil, err
	}
	var encoding string
	if err := db.QueryRowContext(ctx, encodingSQL).Scan(&encoding); err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	if encoding != "UTF8" {
		return nil, fmt.Errorf("migrate: the database's encoding is %s and must be UTF8, or it could not hold every scope that callers may send", encoding)
	}
	if err := ensure(ctx, db, schemaThereSQL, makeSchemaSQL); err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	results, err := provider.Up(ctx)
	for try := 1; isRaced(err) && try < maxTries; try++ {
		results, err = provider.Up(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	if err := ensure(ctx, db, serviceReadsSQL, letServiceReadSQL); err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	names := make([]string, 0, len(results))
	for _, r := range results {
		names = append(names, r.Source.Path)
	}
	return names, nil
}

// connectTimeout is each host's, unless the URL has another: one that is silent must not keep the next from being asked.
const connectTimeout = 5 * time.Second

func parse(databaseURL string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, connectTimeout)
	return cfg, nil
}

// maxTries bounds how often a migration is run that others made fail.
const maxTries = 10

// isRaced says that a migration of another database of the cluster came between, which the migrations' lock does not keep away: roles and
// memberships are the cluster's, and of two that grant the same one at once the second fails. What failed was rolled back.
func isRaced(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) &&
		(pg.Code == "23505" && pg.TableName == "pg_auth_members" || pg.Code == "XX000" && pg.Message == "tuple concurrently updated")
}

// ensure makes what is not there, outside of the migrations' lock. It tolerates another replica that makes it at the same moment: IF NOT
// EXISTS looks before it locks, and of two that grant the same one is told "tuple concurrently updated".
func ensure(ctx context.Context, db *sql.DB, thereSQL, makeSQL string) error {
	var there bool
	if err := db.QueryRowContext(ctx, thereSQL).Scan(&there); err != nil || there {
		return err
	}
	if _, err := db.ExecContext(ctx, makeSQL); err != nil {
		if look := db.QueryRowContext(ctx, thereSQL).Scan(&there); look == nil && there {
			return nil
		}
		return err
	}
	return nil
}

func newProvider(db *sql.DB) (*goose.Provider, error) {
	// The session lock lets one replica migrate while the others wait for it: they try once a second, for five minutes.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, FS,
		goose.WithSessionLocker(locker), goose.WithTableName(versionTable))
}

// pendingSQL compares what ran with the newest file, as the service's role, and writes nothing. The role or the table is not there before
// the first migration.
const (
	migratedOnceSQL = `
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = 'grantd_service')
   AND EXISTS (SELECT FROM pg_tables WHERE schemaname = 'grantd' AND tablename = 'schema_version')`
	takeRoleSQL = `SET ROLE grantd_service`
	pendingSQL  = `SELECT COALESCE(max(version_id), 0) < $1 FROM grantd.schema_version WHERE is_applied`
)

// Pending says whether the database lacks migrations that this build needs. It needs no more rights than the service has.
func Pending(ctx context.Context, databaseURL string) (bool, error) {
	cfg, err := parse(databaseURL)
	if err != nil {
		return false, err
	}
	cfg.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return false, err
	}
	defer conn.Close(ctx)
	var once bool
	if err := conn.QueryRow(ctx, migratedOnceSQL).Scan(&once); err != nil || !once {
		return true, err
	}
	if _, err := conn.Exec(ctx, takeRoleSQL); err != nil {
		return false, fmt.Errorf("the login must be a member of grantd_service: %w", err)
	}
	newest, err := newestVersion()
	if err != nil {
		return false, err
	}
	var pending bool
	if err := conn.QueryRow(ctx, pendingSQL, newest).Scan(&pending); err != nil {
		return false, fmt.Errorf("read the migrations that ran: %w", err)
	}
	return pending, nil
}

func newestVersion() (int64, error) {
	files, err := FS.ReadDir(".")
	if err != nil {
		return 0, err
	}
	// Sorted by name, and so by number.
	return goose.NumericComponent(files[len(files)-1].Name())
}
