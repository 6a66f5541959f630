package migrations_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev"
	"github.com/grantd/grantd/migrations"
)

// An administrator has made the service's role, and several databases of the cluster are migrated at once, for the first time. Each takes a
// lock of its own, and they share their roles: one was told that a membership was there already, and failed.
func TestUp_DatabasesOfOneCluster(t *testing.T) {
	server, err := pgdev.Start(t.Context(), pgdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "CREATE ROLE grantd_service NOLOGIN"); err != nil {
		t.Fatal(err)
	}
	const databases = 6
	for n := range databases {
		if _, err := conn.Exec(t.Context(), fmt.Sprintf("CREATE DATABASE one_of_%d", n)); err != nil {
			t.Fatal(err)
		}
	}
	var running sync.WaitGroup
	for n := range databases {
		running.Go(func() {
			url := server.URL(fmt.Sprintf("one_of_%d", n))
			if _, err := migrations.Up(t.Context(), url); err != nil {
				t.Error(err)
			}
			if pending, err := migrations.Pending(t.Context(), url); err != nil || pending {
				t.Errorf("pending: %v, %v", pending, err)
			}
		})
	}
	running.Wait()
}
