package migrations_test

import (
	"context"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/migrations"
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

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func as(t *testing.T, databaseURL, user string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(user)
	return u.String()
}

// twoLogins returns the URLs of a login that may migrate the database and of one that may serve, neither of which may do more.
func twoLogins(t *testing.T, database string, super *pgx.Conn) (migrator, service string) {
	t.Helper()
	name := super.Config().Database
	m, s := "m_"+name, "s_"+name
	exec(t, super, `CREATE ROLE `+m+` LOGIN CREATEROLE NOINHERIT`)
	exec(t, super, `CREATE ROLE `+s+` LOGIN NOINHERIT`)
	t.Cleanup(func() {
		if _, err := super.Exec(context.Background(), `DROP OWNED BY `+m+` CASCADE; DROP ROLE `+m+`; DROP ROLE `+s); err != nil {
			t.Error(err)
		}
	})
	exec(t, super, `GRANT CREATE ON DATABASE `+name+` TO `+m)
	exec(t, super, `DO $$ BEGIN CREATE ROLE grantd_service NOLOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$`)
	exec(t, super, `GRANT grantd_service TO `+m+`, `+s)
	exec(t, super, `ALTER ROLE `+s+` SET search_path = elsewhere`)
	return as(t, database, m), as(t, database, s)
}

// The documents said which rights migrating and serving need, and nobody had tried it with any but a superuser: neither was enough.
func TestRights_OfTwoLogins(t *testing.T) {
	database := pgtest.NewEmpty(t)
	super := connect(t, database)
	migrator, service := twoLogins(t, database, super)

	if pending, err := migrations.Pending(t.Context(), service); err != nil || !pending {
		t.Fatalf("before: pending %v, %v", pending, err)
	}
	ran, err := migrations.Up(t.Context(), migrator)
	if err != nil || len(ran) == 0 {
		t.Fatalf("migrate: %v, %v", ran, err)
	}
	if pending, err := migrations.Pending(t.Context(), service); err != nil || pending {
		t.Errorf("after: pending %v, %v", pending, err)
	}
	if ran, err := migrations.Up(t.Context(), migrator); err != nil || len(ran) != 0 {
		t.Errorf("again: %v, %v", ran, err)
	}
	exec(t, super, `DELETE FROM grantd.schema_version WHERE version_id = (SELECT max(version_id) FROM grantd.schema_version)`)
	if pending, err := migrations.Pending(t.Context(), service); err != nil || !pending {
		t.Errorf("with one missing: pending %v, %v", pending, err)
	}
}

func TestPending_WritesNothing(t *testing.T) {
	database := pgtest.NewEmpty(t)
	if pending, err := migrations.Pending(t.Context(), database); err != nil || !pending {
		t.Fatalf("pending %v, %v", pending, err)
	}
	var tables int
	conn := connect(t, database)
	err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')`).Scan(&tables)
	if err != nil || tables != 0 {
		t.Errorf("%d tables, %v", tables, err)
	}
}

// Replicas are started together, and each migrates first.
func TestUp_ByManyAtOnce(t *testing.T) {
	database := pgtest.NewEmpty(t)
	var all sync.WaitGroup
	var mu sync.Mutex
	var ran []string
	for range 4 {
		all.Go(func() {
			files, err := migrations.Up(t.Context(), database)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ran = append(ran, files...)
		})
	}
	all.Wait()
	seen := strings.Join(ran, " ")
	for _, file := range ran {
		if strings.Count(seen, file) != 1 {
			t.Errorf("%s ran more than once: %s", file, seen)
		}
	}
}

// A primary whose machine is lost stands first in the URL and says nothing: a replica that started then waited for it for ever.
func TestPending_SilentHostIsNotWaitedForLong(t *testing.T) {
	t.Parallel()
	database := pgtest.BehindSilentHost(t, pgtest.New(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if pending, err := migrations.Pending(ctx, database); err != nil || pending {
		t.Errorf("pending: %v, %v", pending, err)
	}
}

// In another encoding a grant whose scope has a character that the encoding lacks was answered INTERNAL, for ever.
func TestUp_RefusesOtherEncodings(t *testing.T) {
	u, err := url.Parse(pgtest.NewEmpty(t))
	if err != nil {
		t.Fatal(err)
	}
	admin := connect(t, pgtest.AdminURL(t))
	name := strings.TrimPrefix(u.Path, "/") + "_latin1"
	exec(t, admin, `CREATE DATABASE `+name+` TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'`)
	t.Cleanup(func() {
		if _, err := admin.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`); err != nil {
			t.Error(err)
		}
	})
	u.Path = "/" + name
	if ran, err := migrations.Up(t.Context(), u.String()); err == nil || !strings.Contains(err.Error(), "LATIN1") {
		t.Errorf("migrated: %v, %v", ran, err)
	}
}
