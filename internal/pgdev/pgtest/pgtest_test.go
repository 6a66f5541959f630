package pgtest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func TestNew_DatabasesAreMigratedAndApart(t *testing.T) {
	one, other := connect(t, pgtest.New(t)), connect(t, pgtest.New(t))
	for _, conn := range []*pgx.Conn{one, other} {
		var tables int
		if err := conn.QueryRow(t.Context(),
			`SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')`).Scan(&tables); err != nil {
			t.Fatal(err)
		}
		if tables == 0 {
			t.Error("a new database has no tables, want the migrations' ones")
		}
	}
	if _, err := one.Exec(t.Context(), `CREATE TABLE mine ()`); err != nil {
		t.Fatal(err)
	}
	var leaked bool
	if err := other.QueryRow(t.Context(), `SELECT to_regclass('mine') IS NOT NULL`).Scan(&leaked); err != nil {
		t.Fatal(err)
	}
	if leaked {
		t.Error("a table of one test's database is seen in another's")
	}
}

func TestNew_DatabaseIsDroppedUnderAnOpenSession(t *testing.T) {
	var name string
	t.Run("inner", func(t *testing.T) {
		// Not closed before the clean-up of New, as a leaked pool would not be.
		conn, err := pgx.Connect(t.Context(), pgtest.New(t))
		if err != nil {
			t.Fatal(err)
		}
		name = conn.Config().Database
	})
	var exists bool
	if err := connect(t, pgtest.AdminURL(t)).QueryRow(t.Context(),
		`SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name).Scan(&exists); err != nil {
		t.Fatal(err)
	}
	if exists {
		t.Errorf("database %s is still there after its test", name)
	}
}

func TestSettings_CommitsAreSynchronous(t *testing.T) {
	var commit, collation, encoding string
	if err := connect(t, pgtest.New(t)).QueryRow(t.Context(),
		`SELECT current_setting('synchronous_commit'), datcollate, pg_encoding_to_char(encoding)
		FROM pg_database WHERE datname = current_database()`).Scan(&commit, &collation, &encoding); err != nil {
		t.Fatal(err)
	}
	if commit != "on" || collation != "C" || encoding != "UTF8" {
		t.Errorf("synchronous_commit %s, collation %s, encoding %s; want on, C, UTF8", commit, collation, encoding)
	}
}
