package store_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// days lists the tables of attempts, attached or not.
func days(t *testing.T, conn *pgx.Conn, attached bool) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
SELECT substr(c.relname, 10) FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
 WHERE c.relkind = 'r' AND c.relname LIKE 'attempts\_%' AND (i.inhrelid IS NOT NULL) = $1 ORDER BY 1`, attached)
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func span(from time.Time, n int) []string {
	var names []string
	for d := range n {
		names = append(names, from.AddDate(0, 0, d).Format("20060102"))
	}
	return names
}

func maintain(t *testing.T, s *store.Store, now time.Time) {
	t.Helper()
	if err := s.Maintain(t.Context(), now); err != nil {
		t.Fatal(err)
	}
}

func TestMaintain_PartitionsAreMadeAheadAndDroppedWhenExpired(t *testing.T) {
	b := setup(t, func(c *store.Config) { c.AttemptRetention = 3 * 24 * time.Hour })
	today := time.Now().UTC().Truncate(24 * time.Hour)
	if got, want := days(t, b.sql, true), span(today.AddDate(0, 0, -1), 16); !slices.Equal(got, want) {
		t.Fatalf("a new store has the days %v, want %v", got, want)
	}
	want(t, b.Store, grant("t", "k", "i", "x"), newly)

	// Ten days on, a moment before a day has been kept for long enough, and then.
	later := today.AddDate(0, 0, 10)
	maintain(t, b.Store, later.Add(-time.Microsecond))
	if got, want := days(t, b.sql, true), span(later.AddDate(0, 0, -4), 18); !slices.Equal(got, want) {
		t.Errorf("after ten days there are %v, want %v", got, want)
	}
	maintain(t, b.Store, later)
	if got, want := days(t, b.sql, true), span(later.AddDate(0, 0, -3), 18); !slices.Equal(got, want) {
		t.Errorf("a moment later there are %v, want %v", got, want)
	}
	if left := days(t, b.sql, false); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM attempts`); n != 0 {
		t.Errorf("%d attempts outlived their day", n)
	}
	maintain(t, b.Store, later) // again: nothing to do
}

// A crash between the detaching and the dropping leaves a table that no partition list shows any more.
func TestMaintain_DropsWhatACrashLeftDetached(t *testing.T) {
	b := setup(t)
	// In a year, so that the store's own look at the tables leaves them alone.
	future := time.Now().UTC().AddDate(1, 0, 0)
	for d := range 3 {
		day := future.AddDate(0, 0, d)
		exec(t, b.sql, fmt.Sprintf(`CREATE TABLE attempts_%s PARTITION OF attempts FOR VALUES FROM ('%s') TO ('%s')`,
			day.Format("20060102"), day.Format(time.DateOnly), day.AddDate(0, 0, 1).Format(time.DateOnly)))
		exec(t, b.sql, fmt.Sprintf(`ALTER TABLE attempts_%s OWNER TO grantd_service`, day.Format("20060102")))
	}
	names := span(future, 3)
	exec(t, b.sql, `ALTER TABLE attempts DETACH PARTITION attempts_`+names[0])

	// Cut off while it waits for a session that still looks at the partition.
	reader, _ := begin(t, b.url)
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM attempts`); err != nil {
		t.Fatal(err)
	}
	detacher := connect(t, b.url)
	exec(t, detacher, `SET statement_timeout = '300ms'`)
	if _, err := detacher.Exec(t.Context(), `ALTER TABLE attempts DETACH PARTITION attempts_`+names[1]+` CONCURRENTLY`); err == nil {
		t.Fatal("the detaching did not wait for the reader")
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !value[bool](t, b.sql, `SELECT inhdetachpending FROM pg_inherits WHERE inhrelid = $1::regclass`, "attempts_"+names[1]) {
		t.Fatal("the detaching is not pending")
	}

	maintain(t, b.Store, future.AddDate(1, 0, 0))
	for _, attached := range []bool{true, false} {
		for _, day := range days(t, b.sql, attached) {
			if slices.Contains(names, day) {
				t.Errorf("%s is still there, attached: %v", day, attached)
			}
		}
	}
}

// A backup, or a session that somebody has forgotten, has read a day that has expired. Whoever drops the day waits for it; if that were for
// as long as it takes, no round would follow, no day would be made any more, and in a fortnight every grant would fail.
func TestMaintain_ReaderOfAnExpiredDayStopsNoOtherRound(t *testing.T) {
	b := setup(t, func(c *store.Config) { c.AttemptRetention = 3 * 24 * time.Hour })
	reader, _ := begin(t, b.url)
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM attempts`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	later := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 5)
	if err := b.Maintain(ctx, later); err == nil || ctx.Err() != nil {
		t.Fatalf("got %v, and for the time given: %v", err, ctx.Err())
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	maintain(t, b.Store, later.AddDate(0, 0, 1))
	if got, want := days(t, b.sql, true), span(later.AddDate(0, 0, -2), 18); !slices.Equal(got, want) {
		t.Errorf("the days are %v, want %v", got, want)
	}
}

// Replicas are started together and look after the same tables at the same time. Some failed to start, because another had just made the
// partition that they were making.
func TestMaintain_ReplicasDoNotMindEachOther(t *testing.T) {
	url := pgtest.New(t)
	replicas := make([]*store.Store, 4)
	var wg sync.WaitGroup
	for i := range replicas {
		wg.Go(func() {
			s, err := store.Open(context.Background(), store.Config{DatabaseURL: url})
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(s.Close)
			replicas[i] = s
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	later := time.Now().AddDate(0, 0, 36)
	for _, s := range replicas {
		wg.Go(func() {
			if err := s.Maintain(t.Context(), later); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// What one left because another was at it goes the next time.
	maintain(t, replicas[0], later)
	conn := connect(t, url)
	// Of those made today, the last nine have not expired.
	kept := append(span(later.UTC().AddDate(0, 0, -30), 9), span(later.UTC().AddDate(0, 0, -1), 16)...)
	if got := days(t, conn, true); !slices.Equal(got, kept) {
		t.Errorf("there are %v, want %v", got, kept)
	}
	if left := days(t, conn, false); len(left) != 0 {
		t.Errorf("left over: %v", left)
	}
}

func TestMaintain_PurgesAliasesInBatchesAndKeepsOwners(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "owner", "i", "x"), newly)
	want(t, b.Store, grant("t", "alias", "i", "x"), already)
	exec(t, b.sql, `
INSERT INTO operations (tenant_id, idempotency_key, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       attempt_id, event_id, source, caller, applied_at)
SELECT tenant_id, 'old-' || n, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       attempt_id, event_id, source, caller, now() - interval '401 days'
  FROM operations, generate_series(1, 2500) n WHERE idempotency_key = 'alias'`)
	exec(t, b.sql, `UPDATE operations SET applied_at = now() - interval '500 days' WHERE idempotency_key = 'owner'`)
	maintain(t, b.Store, time.Now())
	if n := value[int](t, b.sql, `SELECT count(*) FROM operations`); n != 2 {
		t.Errorf("%d operations are left, want the owner and the young alias", n)
	}
	for _, key := range []string{"owner", "alias", "old-7"} {
		want(t, b.Store, grant("t", key, "i", "x"), already)
	}
}

// Retention removes aliases and attempts, each alone and both together. The same key, and then a fresh one for the same effect, must
// still never grant a second time, and never fail.
func TestMaintain_RetentionNeverReopensTheBusinessRule(t *testing.T) {
	purge := map[string]func(*testing.T, *bundle){
		"nothing": func(*testing.T, *bundle) {},
		"aliases": func(t *testing.T, b *bundle) {
			exec(t, b.sql, `UPDATE operations SET applied_at = now() - interval '500 days' WHERE owner_key IS NOT NULL`)
			maintain(t, b.Store, time.Now())
		},
		"attempts": func(t *testing.T, b *bundle) { maintain(t, b.Store, time.Now().AddDate(0, 0, 40)) },
		"both":     func(t *testing.T, b *bundle) { maintain(t, b.Store, time.Now().AddDate(0, 0, 500)) },
	}
	for name, purge := range purge {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			first := want(t, b.Store, grant("t", "owner", "i", "x"), newly)
			want(t, b.Store, grant("t", "alias", "i", "x"), already)
			want(t, b.Store, grant("t", "taken-back", "i", "y"), newly)
			want(t, b.Store, reverse("t", "reversal", "i", "y"), newly)
			want(t, b.Store, reverse("t", "reversal-alias", "i", "y"), already)
			want(t, b.Store, record("t", "payment", "i", paid, 2), newly)
			want(t, b.Store, record("t", "payment-alias", "i", paid, 2), already)
			purge(t, b)
			// The partition of today is made anew where the future was looked after.
			maintain(t, b.Store, time.Now())

			other := func(key string) *store.Command {
				c := grant("t", key, "i", "x")
				c.Grant.Scope = map[string]string{"seats": "11"}
				return c
			}
			for _, key := range []string{"owner", "alias", "fresh"} {
				want(t, b.Store, other(key), conflict)
				a := want(t, b.Store, grant("t", key, "i", "x"), already)
				if a.Operation.IdempotencyKey != "owner" || a.Entitlement.ID != first.Entitlement.ID {
					t.Errorf("%s is told of %s and %v", key, a.Operation.IdempotencyKey, a.Entitlement.ID)
				}
			}
			if a := want(t, b.Store, grant("t", "taken-back", "i", "y"), already); a.CurrentState != reversed {
				t.Errorf("what was taken back is now %v", a.CurrentState)
			}
			for _, key := range []string{"reversal", "reversal-alias", "reversal-fresh"} {
				want(t, b.Store, reverse("t", key, "i", "y"), already)
			}
			for _, key := range []string{"payment", "payment-alias", "payment-fresh"} {
				want(t, b.Store, record("t", key, "i", paid, 2), already)
			}
			if n := value[int](t, b.sql, `SELECT count(*) FROM entitlements`); n != 2 {
				t.Errorf("%d entitlements, want 2", n)
			}
			if n := value[int](t, b.sql, `SELECT count(*) FROM entries`); n != 3 {
				t.Errorf("%d entries, want 3", n)
			}
			found, err := b.Operation(t.Context(), store.Lookup{TenantID: "t", IdempotencyKey: "alias", Full: true})
			if err != nil || found.Answer.Outcome != already {
				t.Errorf("the look-up says %v, %v", found.Answer.Outcome, err)
			}
		})
	}
}
