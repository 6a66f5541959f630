// Package pgtest gives each test a PostgreSQL database of its own, migrated, on one private server that the test
// binaries of a `go test` run share. Without PostgreSQL the tests fail and say how to get it.
package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev"
	"github.com/grantd/grantd/migrations"
)

// New returns the URL of a new database with all migrations applied. It is dropped at the end of the test, sessions
// that are still open are ended. The user is a superuser.
func New(t testing.TB) string {
	t.Helper()
	server := join(t)
	template, err := server.template()
	if err != nil {
		t.Fatalf("migrating the tests' template database: %v", err)
	}
	return create(t, server, template)
}

// NewEmpty is New without the migrations.
func NewEmpty(t testing.TB) string {
	t.Helper()
	return create(t, join(t), "template0")
}

// AdminURL names the shared server's database postgres, for what is done outside a test's own database. Other tests use
// the server at the same time: a test that stops or reconfigures one starts its own with StartServer.
func AdminURL(t testing.TB) string {
	t.Helper()
	return join(t).hold.URL("postgres")
}

// StartServer starts a server for this test alone, with the settings of the shared one and these on top. It ends with
// the test.
func StartServer(t testing.TB, settings map[string]string) *pgdev.Server {
	t.Helper()
	all := serverSettings()
	maps.Copy(all, settings)
	server, err := pgdev.Start(context.Background(), pgdev.Options{BinDir: os.Getenv("GRANTD_PG_BIN"), Settings: all})
	if err != nil {
		t.Fatalf("the tests need PostgreSQL: %v", err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Errorf("stopping the test's PostgreSQL: %v", err)
		}
	})
	return server
}

// serverSettings give up what only a crash of the machine would miss.
func serverSettings() map[string]string {
	return map[string]string{
		"fsync":                     "off",
		"full_page_writes":          "off",
		"synchronous_commit":        "on",
		"max_connections":           "300",
		"max_locks_per_transaction": "256",
		"max_wal_size":              "2GB",
		"checkpoint_timeout":        "30min",
		"jit":                       "off",
	}
}

// sharedServer is this process's hold on the server; the process keeps it until it ends.
type sharedServer struct {
	hold     *pgdev.Shared
	template func() (string, error)
}

var joinOnce = sync.OnceValues(func() (*sharedServer, error) {
	ctx := context.Background()
	dir, err := serverDir(ctx)
	if err != nil {
		return nil, err
	}
	hold, err := pgdev.Join(ctx, dir, pgdev.Options{
		BinDir:   os.Getenv("GRANTD_PG_BIN"),
		Settings: serverSettings(),
		Log:      os.Stderr,
	})
	if err != nil {
		return nil, err
	}
	server := &sharedServer{hold: hold}
	server.template = sync.OnceValues(server.makeTemplate)
	return server, nil
})

func join(t testing.TB) *sharedServer {
	t.Helper()
	server, err := joinOnce()
	if err != nil {
		t.Fatalf("the tests need PostgreSQL: %v", err)
	}
	return server
}

// serverDir is one per user, checkout and configuration.
func serverDir(ctx context.Context) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	temp, err := pgdev.TempDir(ctx)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%v", root, os.Getenv("GRANTD_PG_BIN"), serverSettings()))
	return filepath.Join(temp, fmt.Sprintf("grantd-test-%d-%x", os.Geteuid(), sum[:6])), nil
}

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no go.mod in the working directory or above it")
		}
		dir = parent
	}
}

// makeTemplate returns the name of a database with these very migrations applied, and makes it if no other process has.
func (s *sharedServer) makeTemplate() (string, error) {
	ctx := context.Background()
	name, err := templateName(migrations.FS)
	if err != nil {
		return "", err
	}
	admin, err := pgx.Connect(ctx, s.hold.URL("postgres"))
	if err != nil {
		return "", err
	}
	defer admin.Close(ctx) // and with it the lock
	if _, err := admin.Exec(ctx, `SELECT pg_advisory_lock(hashtext($1))`, "template"); err != nil {
		return "", err
	}
	var exists bool
	if err := admin.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name).Scan(&exists); err != nil {
		return "", err
	}
	if exists {
		return name, nil
	}
	draft := name + "_draft"
	if err := execAll(ctx, admin,
		`DROP DATABASE IF EXISTS `+draft+` WITH (FORCE)`,
		`CREATE DATABASE `+draft+` TEMPLATE template0`,
	); err != nil {
		return "", err
	}
	if _, err := migrations.Up(ctx, s.hold.URL(draft)); err != nil {
		return "", err
	}
	return name, execAll(ctx, admin,
		`ALTER DATABASE `+draft+` RENAME TO `+name,
		`ALTER DATABASE `+name+` ALLOW_CONNECTIONS false`,
	)
}

func templateName(files fs.FS) (string, error) {
	sum := sha256.New()
	err := fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(files, path)
		fmt.Fprintf(sum, "%s %d\n%s", path, len(content), content)
		return err
	})
	return "template_" + hex.EncodeToString(sum.Sum(nil)[:8]), err
}

func create(t testing.TB, server *sharedServer, template string) string {
	t.Helper()
	// A test's context ends before its clean-up.
	ctx := context.Background()
	name := "test_" + strings.ToLower(rand.Text())
	if err := server.administer(ctx, `CREATE DATABASE `+name+` TEMPLATE `+template); err != nil {
		t.Fatalf("creating the test's database: %v", err)
	}
	t.Cleanup(func() {
		if err := server.administer(ctx, `DROP DATABASE `+name+` WITH (FORCE)`); err != nil {
			t.Errorf("dropping the test's database: %v", err)
		}
	})
	return server.hold.URL(name)
}

func (s *sharedServer) administer(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, s.hold.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return execAll(ctx, conn, statement)
}

func execAll(ctx context.Context, conn *pgx.Conn, statements ...string) error {
	for _, statement := range statements {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}
