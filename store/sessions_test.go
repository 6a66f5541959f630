package store_test

import (
	"errors"
	"testing"
	"time"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// endSessions ends the store's sessions, as a failover or an operator does.
const endSessions = `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'grantd' AND datname = current_database()`

func TestSession_EndedWhileIdleIsReplaced(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	exec(t, b.sql, endSessions)
	want(t, b.Store, grant("t", "k2", "j", "x"), newly)
	want(t, b.Store, grant("t", "k1", "i", "x"), already)
}

// A session that ends before COMMIT has committed nothing: a new one runs the transaction again, and the caller does not notice.
func TestSession_EndedInATransactionLosesNothing(t *testing.T) {
	b := setup(t, patient, func(c *store.Config) { c.Committers = 1 })
	want(t, b.Store, grant("t", "before", "i", "x"), newly)
	release := stall(t, b)
	ended := applyInBackground(t.Context(), b.Store, grant("t", "k", "j", "x"))
	eventually(t, b.sql, blockedSQL, 0)
	exec(t, b.sql, endSessions)
	// Another session has taken it up before the way is free.
	eventually(t, b.sql, blockedSQL, 0)
	release()
	if o := <-ended; o.err != nil || o.answer.Outcome != newly {
		t.Errorf("got %v, %v", o.answer.Outcome, o.err)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM entries`); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
	checkLedgers(t, b.sql)
}

// The machine of the primary is lost: its address answers nothing, not even that it is not there. All the time for a session went to it, and the
// standby behind it in the URL was never asked, however often a caller tried again.
func TestSession_SilentHostLeavesTimeForTheNext(t *testing.T) {
	s := open(t, pgtest.BehindSilentHost(t, pgtest.New(t)), func(c *store.Config) { c.ConnectTimeout = time.Second })
	want(t, s, grant("t", "k", "i", "x"), newly)
}

// A role or database that is set to another encoding: names were stored as other characters than they have, and what others had stored could
// not be read.
func TestSession_SpeaksUTF8(t *testing.T) {
	b := setup(t)
	c := grant("t", "k", "i", "x")
	c.Grant.Scope = map[string]string{"region": "é 東京"}
	want(t, b.Store, c, newly)
	exec(t, b.sql, `ALTER DATABASE `+b.sql.Config().Database+` SET client_encoding = 'LATIN1'`)
	other := open(t, b.url)
	if a := want(t, other, c, already); a.Entitlement.Grant.Scope["region"] != "é 東京" {
		t.Errorf("read as %q", a.Entitlement.Grant.Scope["region"])
	}
	c.IdempotencyKey, c.Grant.InvoiceID = "k2", "j"
	want(t, other, c, newly)
	if got := value[int](t, b.sql, `SELECT count(DISTINCT scope) FROM entitlements`); got != 1 {
		t.Errorf("the same scope is stored in %d ways", got)
	}
}

func TestSession_OpenFailsWithoutADatabase(t *testing.T) {
	_, err := store.Open(t.Context(), store.Config{DatabaseURL: "postgres://127.0.0.1:1/none", ConnectTimeout: time.Second})
	if err == nil {
		t.Error("a store without a database was opened")
	}
}

// A row of a newer build, under a recipe that this one does not know: neither ALREADY nor CONFLICT may be claimed of it, and the others
// of its batch go on.
func TestApply_RecipeOfANewerBuild(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	exec(t, b.sql, `UPDATE operations SET recipe = 99`)
	exec(t, b.sql, `UPDATE entitlements SET recipe = 99`)
	results, err := b.ApplyAll(t.Context(), []store.Command{
		*grant("t", "k", "i", "x"), *grant("t", "k2", "i", "x"), *grant("t", "k3", "j", "x"),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results[:2] {
		var f *store.Failure
		if !errors.As(r.Err, &f) || f.Reason != store.ReasonNewerRecipe {
			t.Errorf("got %v, %v; want a failure for %s", r.Answer.Outcome, r.Err, store.ReasonNewerRecipe)
		}
	}
	if r := results[2]; r.Err != nil || r.Answer.Outcome != newly {
		t.Errorf("beside it: %v, %v", r.Answer.Outcome, r.Err)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM attempts`); n != 2 {
		t.Errorf("%d attempts, want 2: a failure is no answer", n)
	}
}
