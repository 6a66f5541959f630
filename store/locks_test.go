package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// outcome is what a call in the background ended with.
type outcome struct {
	answer store.Answer
	err    error
}

func applyInBackground(ctx context.Context, s *store.Store, c *store.Command) <-chan outcome {
	ended := make(chan outcome, 1)
	go func() {
		a, err := s.Apply(ctx, c)
		ended <- outcome{a, err}
	}()
	return ended
}

// applyAllInBackground returns what waits for the batch's results, which must be asked for in the test's own goroutine.
func applyAllInBackground(t *testing.T, s *store.Store, commands []store.Command) func() []store.Result {
	t.Helper()
	var results []store.Result
	ended := make(chan error, 1)
	go func() {
		var err error
		results, err = s.ApplyAll(t.Context(), commands, nil)
		ended <- err
	}()
	return func() []store.Result {
		t.Helper()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		return results
	}
}

// insertGrant writes what another replica's transaction would for a grant.
func insertGrant(t *testing.T, tx pgx.Tx, c *store.Command) {
	t.Helper()
	g, id, sum := &c.Grant, [16]byte(uuid.Must(uuid.NewV7())), c.Grant.Fingerprint()
	for _, s := range []struct {
		sql  string
		args []any
	}{
		{`INSERT INTO invoices VALUES ($1, $2, 2, 1, $3, now())`, []any{g.TenantID, g.InvoiceID, c.IdempotencyKey}},
		{`INSERT INTO operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, entitlement_id, entry_number, attempt_id,
			event_id, source, caller, applied_at) VALUES ($1, $2, 1, $3, 1, $4, $5, 1, gen_random_uuid(), '', '', '', now())`,
			[]any{g.TenantID, c.IdempotencyKey, sum[:], g.InvoiceID, id}},
		{`INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint, recipe,
			operation_key, granted_at, state, version, changed_at) VALUES ($1, $2, $3, $4, 0, $5, $6, 1, $7, now(), 1, 1, now())`,
			[]any{g.TenantID, id, g.InvoiceID, g.EntitlementType, g.Scope, sum[:], c.IdempotencyKey}},
		{`INSERT INTO entries VALUES ($1, $2, 1, 1, $3, 1, '', '', now())`, []any{g.TenantID, id, c.IdempotencyKey}},
	} {
		if _, err := tx.Exec(t.Context(), s.sql, s.args...); err != nil {
			t.Fatalf("%s: %v", s.sql, err)
		}
	}
}

// Another session holds the winner's rows uncommitted. Whoever comes for them waits in the slow lane and is told the truth in the end;
// the other tenants do not notice.
func TestLocks_HeldByAWinnerInFlight(t *testing.T) {
	held := func(key string) *store.Command { return grant("held", key, "i", "x") }
	conflicting := grant("held", "k", "i", "x")
	conflicting.Grant.Scope = nil
	for _, c := range []struct {
		name    string
		command *store.Command
		end     func(pgx.Tx, context.Context) error
		check   func(*testing.T, outcome)
	}{
		{"commits, same key", held("k"), pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != already || o.answer.MatchedBy != byKey {
				t.Errorf("got %v by %v, %v", o.answer.Outcome, o.answer.MatchedBy, o.err)
			}
		}},
		{"commits, same key and another payload", conflicting, pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != conflict || o.answer.MatchedBy != byKey {
				t.Errorf("got %v by %v, %v", o.answer.Outcome, o.answer.MatchedBy, o.err)
			}
		}},
		{"commits, same business key", held("k2"), pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != already || o.answer.MatchedBy != byBusinessKey || o.answer.Operation.IdempotencyKey != "k" {
				t.Errorf("got %v by %v, %v", o.answer.Outcome, o.answer.MatchedBy, o.err)
			}
		}},
		{"commits, same key for another invoice", grant("held", "k", "j", "x"), pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != conflict || !slices.Equal(fields(&o.answer), []string{"invoice_id"}) {
				t.Errorf("got %v, %v", o.answer.Outcome, o.err)
			}
		}},
		{"commits, another type of the invoice", grant("held", "k2", "i", "y"), pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != newly {
				t.Errorf("got %v, %v", o.answer.Outcome, o.err)
			}
		}},
		{"commits, a refund of the invoice", record("held", "s", "i", refunded, 2), pgx.Tx.Commit, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != newly || len(o.answer.Reversed) != 1 {
				t.Errorf("got %v with %d reversed, %v", o.answer.Outcome, len(o.answer.Reversed), o.err)
			}
		}},
		{"rolls back", held("k"), pgx.Tx.Rollback, func(t *testing.T, o outcome) {
			if o.err != nil || o.answer.Outcome != newly {
				t.Errorf("got %v, %v", o.answer.Outcome, o.err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := setup(t)
			tx, _ := begin(t, b.url)
			insertGrant(t, tx, held("k"))
			ended := applyInBackground(t.Context(), b.Store, c.command)
			// Longer than a batch waits: it is in the slow lane by now.
			eventually(t, b.sql, blockedSQL, 0.1)
			want(t, b.Store, grant("other", "k", "i", "x"), newly)
			if err := c.end(tx, t.Context()); err != nil {
				t.Fatal(err)
			}
			c.check(t, <-ended)
			checkLedgers(t, b.sql)
		})
	}
}

func TestLocks_OutlastTheSlowLane(t *testing.T) {
	b := setup(t, func(c *store.Config) { c.SlowLockTimeout = 200 * time.Millisecond })
	tx, _ := begin(t, b.url)
	insertGrant(t, tx, grant("held", "k", "i", "x"))
	_, err := b.Apply(t.Context(), grant("held", "k", "i", "x"))
	var f *store.Failure
	if !errors.As(err, &f) || f.Reason != store.ReasonLockTimeout || f.RetryDelay <= 0 || f.Overload {
		t.Errorf("got %v, want a failure for %s", err, store.ReasonLockTimeout)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, b.Store, grant("held", "k", "i", "x"), already)
}

// A flood of calls for one held invoice, in the same batches as everybody else's.
func TestLocks_HeldInvoiceLeavesOthersAlone(t *testing.T) {
	const (
		blockedCalls = 20
		stall        = 200 * time.Millisecond
	)
	b := setup(t, func(c *store.Config) { c.LockTimeout = stall })
	want(t, b.Store, grant("held", "k", "i", "x"), newly)
	tx, _ := begin(t, b.url)
	if _, err := tx.Exec(t.Context(), `SELECT FROM invoices WHERE tenant_id = 'held' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	var blocked []<-chan outcome
	for n := range blockedCalls {
		blocked = append(blocked, applyInBackground(t.Context(), b.Store, grant("held", fmt.Sprint("k", n), "i", fmt.Sprint("x", n))))
	}
	var waited atomic.Int64
	var others sync.WaitGroup
	for w := range 4 {
		others.Go(func() {
			for n := range 100 {
				begun := time.Now()
				a, err := b.Apply(t.Context(), grant(fmt.Sprint("t", w), fmt.Sprint("k", n), fmt.Sprint("i", n), "x"))
				if err != nil || a.Outcome != newly {
					t.Errorf("another tenant got %v, %v", a.Outcome, err)
				}
				waited.Add(int64(time.Since(begun)))
			}
		})
	}
	others.Wait()
	// One stall for each blocked call, one after the other, would be four seconds for each of the four, and its halves as much again.
	if all := time.Duration(waited.Load()); all > 4*blockedCalls*stall/2 {
		t.Errorf("the other tenants waited for %v while one invoice was held", all)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for n, ended := range blocked {
		if o := <-ended; o.err != nil || o.answer.Outcome != newly {
			t.Errorf("%d: got %v, %v", n, o.answer.Outcome, o.err)
		}
	}
}

// A replica dies in the middle of a large commit, and its session holds hundreds of rows until the server notices. Every call that wants one
// of them is blocked; each used to cost everybody else a quarter of a second, one after the other.
func TestLocks_ManyHeldInvoicesLeaveOthersAlone(t *testing.T) {
	const (
		held  = 40
		stall = 200 * time.Millisecond
	)
	b := setup(t, func(c *store.Config) { c.LockTimeout, c.SlowLockTimeout = stall, 100*time.Millisecond })
	tx, _ := begin(t, b.url)
	for n := range held {
		// Not committed yet, so that no other session even sees the rows.
		if _, err := tx.Exec(t.Context(), `INSERT INTO invoices VALUES ('held', $1, 2, 1, 'elsewhere', now())`, fmt.Sprint("i", n)); err != nil {
			t.Fatal(err)
		}
	}
	for n := range held {
		applyInBackground(t.Context(), b.Store, grant("held", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"))
	}
	begun := time.Now()
	for n := range 300 {
		want(t, b.Store, grant("other", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"), newly)
	}
	// One stall for each blocked call, one after the other, would be twice that.
	if all := time.Since(begun); all > held*stall/2 {
		t.Errorf("the other tenant waited for %v while %d invoices were held", all, held)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// stall makes every transaction of the store wait, until the returned function is called.
func stall(t *testing.T, b *bundle) (release func()) {
	t.Helper()
	tx, _ := begin(t, b.url)
	if _, err := tx.Exec(t.Context(), `LOCK TABLE attempts IN SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func patient(c *store.Config) { c.LockTimeout = 8 * time.Second }

func TestQueue_FullTurnsCallersAwayAtOnce(t *testing.T) {
	b := setup(t, patient, func(c *store.Config) { c.QueueLimit = 3 })
	release := stall(t, b)
	first := applyInBackground(t.Context(), b.Store, grant("t", "first", "i", "x"))
	eventually(t, b.sql, blockedSQL, 0)

	const callers = 10
	ended := make(chan outcome, callers)
	for n := range callers {
		go func() {
			a, err := b.Apply(t.Context(), grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x"))
			ended <- outcome{a, err}
		}()
	}
	for range callers - 3 {
		o := <-ended
		var f *store.Failure
		if !errors.As(o.err, &f) || !f.Overload || f.Reason != store.ReasonQueueFull || f.RetryDelay <= 0 {
			t.Errorf("got %v, %v; want an overload", o.answer.Outcome, o.err)
		}
	}
	release()
	for range 3 {
		if o := <-ended; o.err != nil || o.answer.Outcome != newly {
			t.Errorf("one that waited got %v, %v", o.answer.Outcome, o.err)
		}
	}
	if o := <-first; o.err != nil || o.answer.Outcome != newly {
		t.Errorf("the first got %v, %v", o.answer.Outcome, o.err)
	}
}

// A caller that leaves before its command is taken up takes it along; after that, leaving stops the waiting, not the commit.
func TestApply_CallerLeaves(t *testing.T) {
	b := setup(t, patient)
	release := stall(t, b)
	ctx, leave := context.WithCancel(t.Context())
	takenUp := applyInBackground(ctx, b.Store, grant("t", "taken-up", "i", "x"))
	eventually(t, b.sql, blockedSQL, 0)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.Apply(short, grant("t", "waiting", "j", "x")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the one that waited got %v", err)
	}
	leave()
	if o := <-takenUp; !errors.Is(o.err, context.Canceled) {
		t.Errorf("the one that was taken up got %v", o.err)
	}
	release()
	// Behind both of them: its answer comes after theirs.
	want(t, b.Store, grant("t", "taken-up", "i", "x"), already)
	if found := find(t, b, store.Lookup{TenantID: "t", IdempotencyKey: "waiting", Full: true}); found.Answer.Outcome != missing || len(found.Attempts) != 0 {
		t.Errorf("the one that waited came to %v, with %d attempts", found.Answer.Outcome, len(found.Attempts))
	}
}

func TestClose_AnswersWhatWaits(t *testing.T) {
	url := pgtest.New(t)
	s, err := store.Open(t.Context(), store.Config{DatabaseURL: url, LockTimeout: 8 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	b := &bundle{Store: s, url: url, sql: connect(t, url)}
	release := stall(t, b)
	var ended []<-chan outcome
	for n := range 5 {
		ended = append(ended, applyInBackground(t.Context(), s, grant("t", fmt.Sprint("k", n), fmt.Sprint("i", n), "x")))
	}
	eventually(t, b.sql, blockedSQL, 0)
	closed := make(chan struct{})
	go func() {
		s.Close()
		close(closed)
	}()
	release()
	<-closed
	for n, c := range ended {
		// One that came after the closing is turned away.
		o := <-c
		var f *store.Failure
		if errors.As(o.err, &f) && f.Reason == store.ReasonShuttingDown {
			continue
		}
		if o.err != nil || o.answer.Outcome != newly {
			t.Errorf("%d: got %v, %v", n, o.answer.Outcome, o.err)
		}
	}
	_, err = s.Apply(t.Context(), grant("t", "late", "i", "x"))
	var f *store.Failure
	if !errors.As(err, &f) || f.Reason != store.ReasonShuttingDown {
		t.Errorf("after the closing: %v, want a failure for %s", err, store.ReasonShuttingDown)
	}
}

// A foreign key of somebody else's table shares the invoice's row. That needs no waiting, but made the row's lock look like another's:
// every transaction with such an invoice was run again until it failed, and every tenant in it.
func TestLocks_SharedRowDisturbsNobody(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("shared", "k", "i", "x"), newly)
	tx, _ := begin(t, b.url)
	if _, err := tx.Exec(t.Context(), `SELECT FROM invoices WHERE tenant_id = 'shared' FOR KEY SHARE`); err != nil {
		t.Fatal(err)
	}
	want(t, b.Store, grant("shared", "k2", "i", "y"), newly)
	results, err := b.ApplyAll(t.Context(), []store.Command{*grant("shared", "k3", "i", "z"), *grant("other", "k", "i", "x")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results {
		if r.Err != nil || r.Answer.Outcome != newly {
			t.Errorf("got %v, %v", r.Answer.Outcome, r.Err)
		}
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// One tenant's row is damaged, or somebody's trigger refuses it: whatever the error, only that tenant's commands may fail.
func TestErrors_OfOneTenantAreItsOwn(t *testing.T) {
	for _, code := range []string{"P0001", "XX001", "55000", "23514", "22000"} {
		t.Run(code, func(t *testing.T) {
			b := setup(t)
			exec(t, b.sql, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused' USING ERRCODE = '`+code+`'; END $$`)
			exec(t, b.sql, `CREATE TRIGGER refuse BEFORE INSERT ON entries FOR EACH ROW WHEN (NEW.tenant_id = 'evil') EXECUTE FUNCTION refuse()`)
			var commands []store.Command
			for n := range 50 {
				commands = append(commands, *grant(fmt.Sprint("t", n), "k", "i", "x"))
			}
			commands[17] = *grant("evil", "k", "i", "x")
			results, err := b.ApplyAll(t.Context(), commands, nil)
			if err != nil {
				t.Fatal(err)
			}
			for n, r := range results {
				if failed := r.Err != nil; failed != (n == 17) {
					t.Errorf("%d: got %v, %v", n, r.Answer.Outcome, r.Err)
				}
			}
		})
	}
}
