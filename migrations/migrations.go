// Package migrations is the authority for the shape of the database: numbered, forward-only SQL files, embedded in the
// binary. Any number of replicas may call Up at once.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// FS holds the migrations, 0001_*.sql and on.
//
//go:embed *.sql
var FS embed.FS

// versionTable keeps which migrations ran. It stands outside the service's schema: the service's role has no business in it.
const versionTable = "grantd_schema_version"

// Up brings the database up to date and returns the names of the files it ran; none when it already was. The login needs
// CREATE on the database, and CREATEROLE unless the role grantd_service exists.
func Up(ctx context.Context, databaseURL string) ([]string, error) {
	cfg, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()

	provider, err := newProvider(db)
	if err != nil {
		return nil, err
	}
	results, err := provider.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	names := make([]string, 0, len(results))
	for _, r := range results {
		names = append(names, r.Source.Path)
	}
	return names, nil
}

// Pending says whether the database lacks migrations that this build needs.
func Pending(ctx context.Context, databaseURL string) (bool, error) {
	cfg, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return false, fmt.Errorf("database URL: %w", err)
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	provider, err := newProvider(db)
	if err != nil {
		return false, err
	}
	return provider.HasPending(ctx)
}

func newProvider(db *sql.DB) (*goose.Provider, error) {
	// The session lock lets one replica migrate while the others wait for it.
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, FS,
		goose.WithSessionLocker(locker), goose.WithTableName(versionTable))
}
