package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/migrations"
	"github.com/grantd/grantd/store"
)

// What replicas that know 0008 and no more send, as far as it matters here.
const (
	oldInsertSQL = `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at)
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, at, at
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::uuid[], $6::timestamptz[])
       AS c (tenant_id, entitlement_id, entry_number, destination, delivery_id, at)`
	oldDueSQL = `
SELECT d.ctid, d.tenant_id, d.entitlement_id, d.entry_number, d.state, CASE WHEN d.entry_number > 1 THEN
       COALESCE((SELECT p.entry_number FROM deliveries p
                  WHERE p.tenant_id = d.tenant_id AND p.entitlement_id = d.entitlement_id AND p.entry_number < d.entry_number
                    AND p.destination = d.destination AND p.state IN (1, 2, 3, 5)
                  ORDER BY p.entry_number LIMIT 1), 0) ELSE 0 END
  FROM deliveries d
 WHERE d.destination = $1 AND d.state IN (1, 2) AND d.due_at > '-infinity' AND d.due_at <= statement_timestamp()
   AND NOT EXISTS (SELECT FROM destination_pauses WHERE destination = $1 AND resumed_at IS NULL)
 ORDER BY d.due_at LIMIT $2
   FOR NO KEY UPDATE OF d SKIP LOCKED`
	oldClaimedSQL = `
SELECT d.ctid, d.tenant_id, d.delivery_id, d.destination, d.state, d.attempts, d.poison, d.due_at, d.lease_token, d.last_error, d.created_at,
       d.settled_at, d.body, d.content_type
  FROM unnest($1::tid[]) WITH ORDINALITY AS c (place, position)
  JOIN deliveries d ON d.ctid = c.place
 ORDER BY c.position`
	oldLeaseSQL = `
UPDATE deliveries d
   SET state = c.state, attempts = d.attempts + 1, lease_token = c.token, due_at = clock_timestamp() + make_interval(secs => $5),
       body = COALESCE(d.body, CASE c.state WHEN 2 THEN c.body END),
       content_type = CASE WHEN d.body IS NULL THEN c.content_type ELSE d.content_type END,
       last_error = COALESCE(NULLIF(c.error, ''), d.last_error)
  FROM unnest($1::tid[], $2::uuid[], $3::bytea[], $4::text[], $6::smallint[], $7::text[])
       AS c (place, token, body, content_type, state, error)
 WHERE d.ctid = c.place
RETURNING d.ctid, d.delivery_id, d.due_at`
	oldDoubtSQL = `
WITH doubted AS (
    UPDATE deliveries d
       SET state = 3, due_at = clock_timestamp(), last_error = $5
      FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[]) AS c (tenant_id, entitlement_id, entry_number, destination)
     WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
       AND d.destination = c.destination AND d.state = 2
    RETURNING d.tenant_id, d.delivery_id, d.attempts)
UPDATE delivery_attempts a
   SET ended_at = clock_timestamp(), outcome = 4, error = $5
  FROM doubted d
 WHERE a.tenant_id = d.tenant_id AND a.delivery_id = d.delivery_id AND a.attempt_number = d.attempts`
	oldSettleSQL = `
UPDATE deliveries d
   SET state = c.state, poison = d.poison + c.poison, last_error = c.error,
       due_at = CASE c.state WHEN 1 THEN clock_timestamp() + c.retry_seconds * interval '1 second' ELSE clock_timestamp() END,
       settled_at = CASE c.state WHEN 4 THEN clock_timestamp() END
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::tid[], $6::uuid[], $7::smallint[], $8::bigint[], $9::float8[], $10::text[])
       AS c (tenant_id, entitlement_id, entry_number, destination, place, token, state, poison, retry_seconds, error)
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state IN (2, 3) AND d.lease_token = c.token`
	oldOrderSQL = `
UPDATE deliveries
   SET state = $4, due_at = clock_timestamp(), settled_at = CASE WHEN $4::smallint IN (4, 6) THEN clock_timestamp() END,
       lease_token = NULL,
       poison = CASE $4::smallint WHEN 1 THEN 0 ELSE poison END
 WHERE tenant_id = $1 AND delivery_id = $2 AND state = $3 AND attempts = $5
   AND (state <> 2 OR due_at <= clock_timestamp())`
	oldLookUpSQL = `
SELECT d.tenant_id, d.delivery_id, d.destination, d.state, d.attempts, d.poison, d.due_at, d.lease_token, d.last_error, d.created_at,
       d.settled_at, d.body, d.content_type
  FROM deliveries d
 WHERE d.tenant_id = $1 AND d.delivery_id = $2`
	oldPurgeSQL = `
WITH old AS (
    DELETE FROM deliveries d
     USING (SELECT tenant_id, entitlement_id, entry_number, destination FROM deliveries
             WHERE settled_at IS NOT NULL AND settled_at < $1
             ORDER BY settled_at LIMIT $2
               FOR UPDATE SKIP LOCKED) AS c
     WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
       AND d.destination = c.destination
    RETURNING d.tenant_id, d.delivery_id), gone AS (
    DELETE FROM delivery_attempts a USING old
     WHERE a.tenant_id = old.tenant_id AND a.delivery_id = old.delivery_id)
SELECT count(*) FROM old`
)

// Replicas are replaced one after the other: those that know 0008 grant, claim and settle while the first of the new ones migrates, and
// go on with the statements that they have prepared.
func TestSettledDeliveries_OlderReplicasDoNoHarm(t *testing.T) {
	b := filled(t)
	older := connect(t, b.service)
	exec(t, older, `SET ROLE grantd_service`)
	exec(t, older, `SET search_path = grantd`)
	for _, sql := range []string{
		oldInsertSQL, oldDueSQL, oldClaimedSQL, oldLeaseSQL, oldDoubtSQL, oldSettleSQL, oldOrderSQL, oldLookUpSQL, oldPurgeSQL,
	} {
		if _, err := older.Prepare(t.Context(), sql, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	if got := oldDue(t, older); len(got) != 3 {
		t.Fatalf("%d are due", len(got))
	}
	up(t, b.migrator)
	before := at9(t, b.super)

	type key struct {
		entitlement, id uuid.UUID
		token           uuid.UUID
		state           int16
		attempts        int64
	}
	of := func(invoice string) (k key) {
		t.Helper()
		if err := b.super.QueryRow(t.Context(), `
			SELECT d.entitlement_id, delivery_id, COALESCE(lease, '00000000-0000-0000-0000-000000000000'), d.state, attempts
			  FROM grantd.all_deliveries d JOIN grantd.entitlements e USING (tenant_id, entitlement_id)
			 WHERE invoice_id = $1 AND entry_number = 1 AND destination = 'crm'`, invoice).Scan(&k.entitlement, &k.id, &k.token, &k.state, &k.attempts); err != nil {
			t.Fatal(err)
		}
		return k
	}
	calling, lapsed, dead := of("calling"), of("lapsed"), of("dead")
	one := []string{"t"}
	crm := []string{"crm"}
	first := []int64{1}
	for name, f := range map[string]func(pgx.Tx) error{
		"claim": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldClaimedSQL, []string{"(0,1)"})
			return err
		},
		"lease": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldLeaseSQL, []string{"(0,1)"}, []uuid.UUID{uuid.New()}, [][]byte{{}}, []string{""}, 60.0, []int16{2}, []string{""})
			return err
		},
		"doubt": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldDoubtSQL, one, []uuid.UUID{lapsed.entitlement}, first, crm, "")
			return err
		},
		"settle": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldSettleSQL, one, []uuid.UUID{calling.entitlement}, first, crm, []string{"(0,1)"}, []uuid.UUID{calling.token},
				[]int16{4}, []int64{0}, []float64{0}, []string{""})
			return err
		},
		"order": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldOrderSQL, "t", dead.id, dead.state, int16(1), dead.attempts)
			return err
		},
		"look up": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldLookUpSQL, "t", of("delivered").id)
			return err
		},
		"purge": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), oldPurgeSQL, time.Now().Add(time.Hour), 100)
			return err
		},
	} {
		var pg *pgconn.PgError
		err := pgx.BeginFunc(t.Context(), older, func(tx pgx.Tx) error {
			// What is due is still found, and locked for as long as this takes.
			if name == "claim" || name == "lease" {
				oldDue(t, tx)
			}
			return f(tx)
		})
		if !errors.As(err, &pg) || pg.Code != "42703" && pg.ConstraintName != "deliveries_lease" {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantSame(t, at9(t, b.super), before)

	// What such a one grants is sent, with the body that the claim makes; also over a session that it opens now.
	grants := open(t, b.service)
	for name, session := range map[string]*pgx.Conn{"mail": older, "letter": connect(t, b.service)} {
		if a, err := grants.Apply(t.Context(), granting(name)); err != nil || a.Outcome != pb.Outcome_OUTCOME_NEWLY_APPLIED {
			t.Fatalf("%v, %v", a.Outcome, err)
		}
		e, err := grants.Entitlement(t.Context(), "t", store.Target{BusinessKey: store.BusinessKey{InvoiceID: name, EntitlementType: "x"}})
		if err != nil {
			t.Fatal(err)
		}
		id := uuid.New()
		exec(t, session, `SET ROLE grantd_service`)
		exec(t, session, `SET search_path = grantd`)
		if _, err := session.Exec(t.Context(), oldInsertSQL, one, []uuid.UUID{e.ID}, first, []string{name}, []uuid.UUID{id}, []time.Time{time.Now().Add(-time.Minute)}); err != nil {
			t.Fatal(err)
		}
		s := open(t, b.service, store.Destination{Name: name})
		all, err := s.Claim(t.Context(), name, "new", time.Hour, 10, rendered)
		if err != nil || len(all) != 1 || string(all[0].Body) != name+" 1 rendered" || all[0].ID != id || all[0].Key == "" {
			t.Fatalf("claimed %v, %v", all, err)
		}
		if lost, err := s.Settle(t.Context(), []store.DeliveryResult{{Delivery: all[0], Outcome: store.Delivered}}); err != nil || len(lost) > 0 {
			t.Fatalf("lost %d, %v", len(lost), err)
		}
	}
}

// oldDue is the first statement of an older replica's claim.
func oldDue(t *testing.T, q interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}) []string {
	t.Helper()
	rows, err := q.Query(t.Context(), oldDueSQL, "crm", 100)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		all = append(all, fmt.Sprint(rows.RawValues()))
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// A grant that is under way while the migration runs waits for it, and its delivery is then made where the new replicas look.
func TestSettledDeliveries_AGrantThatWaitsForTheMigration(t *testing.T) {
	b := filled(t)
	older := connect(t, b.service)
	exec(t, older, `SET ROLE grantd_service`)
	exec(t, older, `SET search_path = grantd`)
	if _, err := older.Prepare(t.Context(), oldInsertSQL, oldInsertSQL); err != nil {
		t.Fatal(err)
	}
	tx, err := connect(t, b.super.Config().ConnString()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM grantd.deliveries FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	waiting := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			var n int
			if err := b.super.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE relation = 'grantd.deliveries'::regclass AND NOT granted`).Scan(&n); err != nil {
				t.Fatal(err)
			}
			if n == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d wait for the table, want %d", n, want)
			}
		}
	}
	migrated, granted := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := migrations.Up(t.Context(), b.migrator)
		migrated <- err
	}()
	waiting(1)
	id := uuid.New()
	go func() {
		_, err := older.Exec(t.Context(), oldInsertSQL, []string{"t"}, []uuid.UUID{uuid.New()}, []int64{1}, []string{"crm"}, []uuid.UUID{id}, []time.Time{time.Now()})
		granted <- err
	}()
	waiting(2)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-migrated; err != nil {
		t.Fatal(err)
	}
	if err := <-granted; err != nil {
		t.Fatal(err)
	}
	var there bool
	if err := b.super.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM grantd.deliveries WHERE delivery_id = $1)`, id).Scan(&there); err != nil || !there {
		t.Errorf("made %t, %v", there, err)
	}
}

func granting(invoice string) *store.Command {
	return &store.Command{
		Kind: pb.OperationKind_OPERATION_KIND_GRANT, TenantID: "t", IdempotencyKey: invoice,
		Grant:   store.Grant{TenantID: "t", InvoiceID: invoice, EntitlementType: "x"},
		Invoice: store.InvoiceVersion{State: pb.InvoiceState_INVOICE_STATE_PAID, Version: 1},
	}
}
