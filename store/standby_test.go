package store_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/migrations"
	"github.com/grantd/grantd/store"
)

// The synchronous standby is away. PostgreSQL keeps a session whose COMMIT waits for it, also when its client has left; a store that made
// a new one for each try took all of the server's connections within minutes.
func TestCommit_WaitingForTheStandbyTakesNoMoreSessions(t *testing.T) {
	t.Parallel()
	url := pgtest.StartServer(t, nil).URL("postgres")
	if _, err := migrations.Up(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	const committers, lanes, calls = 1, 1, 20
	s := open(t, url, func(c *store.Config) {
		c.Committers, c.SlowLanes, c.CommitTimeout = committers, lanes, time.Second
	})
	sql := connect(t, url)
	exec(t, sql, `ALTER SYSTEM SET synchronous_standby_names = 'away'`)
	exec(t, sql, `SELECT pg_reload_conf()`)

	// PostgreSQL takes note of it in its own time, so the first calls may still have been in time.
	var sent []*store.Command
	unknown := 0
	for n := 0; len(sent) < calls; n++ {
		c := grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x")
		_, err := s.Apply(t.Context(), c)
		if err == nil && len(sent) == 0 && n < 10_000 {
			continue
		}
		var f *store.Failure
		if !errors.As(err, &f) || f.Reason != store.ReasonCommitUnknown && f.Reason != store.ReasonDatabaseUnavailable {
			t.Fatalf("without the standby: %v", err)
		}
		if f.Reason == store.ReasonCommitUnknown {
			unknown++
		}
		sent = append(sent, c)
	}
	if n := value[int](t, sql, `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`); n == 0 || n > committers+lanes {
		t.Errorf("%d sessions wait for the standby", n)
	}
	if unknown == 0 || unknown > committers+lanes {
		t.Errorf("%d of %d calls have left their commit in doubt", unknown, calls)
	}

	exec(t, sql, `ALTER SYSTEM RESET synchronous_standby_names`)
	exec(t, sql, `SELECT pg_reload_conf()`)
	eventually(t, sql, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')`)
	found := 0
	for _, c := range sent {
		a, err := s.Apply(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if a.Outcome == already {
			found++
		}
	}
	if found != unknown {
		t.Errorf("%d were committed, and %d left in doubt", found, unknown)
	}
	checkLedgers(t, sql)
}
