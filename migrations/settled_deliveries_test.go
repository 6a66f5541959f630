package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/migrations"
	"github.com/grantd/grantd/store"
)

// The deliveries of a database in use are moved by 0009, beside replicas that know nothing of it.

const file0009 = "0009_settled_deliveries.sql"

// upTo8 migrates an empty database as far as older replicas know.
func upTo8(t *testing.T, databaseURL string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), `CREATE SCHEMA grantd`); err != nil {
		t.Fatal(err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName("grantd.schema_version"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := provider.UpTo(t.Context(), 8); err != nil {
		t.Fatal(err)
	}
}

func up(t *testing.T, databaseURL string) {
	t.Helper()
	ran, err := migrations.Up(t.Context(), databaseURL)
	if err != nil || len(ran) == 0 || ran[0] != file0009 {
		t.Fatalf("ran %v, %v", ran, err)
	}
}

func open(t *testing.T, databaseURL string, destinations ...store.Destination) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), store.Config{
		DatabaseURL: databaseURL, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Destinations: destinations,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// fillSQL makes deliveries of entries that are there, in every state that 0008 knows, with their attempts and what operators did. Each is
// named by its invoice and entry.
const fillSQL = `
WITH made AS (
    INSERT INTO grantd.deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, poison, due_at, lease_token,
           last_error, created_at, settled_at, body, content_type)
    SELECT e.tenant_id, e.entitlement_id, c.entry, d.name, gen_random_uuid(), c.state, c.attempts, c.poison, now() + c.due, CASE WHEN c.leased THEN gen_random_uuid() END,
           c.error, now() - interval '1 hour', CASE WHEN c.state IN (4, 6) THEN now() - interval '1 minute' END,
           CASE WHEN c.body THEN convert_to(e.invoice_id || ' ' || c.entry || ' to ' || d.name, 'UTF8') END, CASE WHEN c.body THEN 'text/plain' ELSE '' END
      FROM (VALUES
               ('never',     1, 1, 0, 0, '-1 minute'::interval, false, '',         false),
               ('retried',   1, 1, 3, 2, '1 hour',              true,  'HTTP 503', true),
               ('again',     1, 1, 2, 0, '-1 second',           false, 'HTTP 400', true),
               ('calling',   1, 2, 2, 1, '1 hour',              true,  'HTTP 500', true),
               ('calling',   2, 1, 0, 0, '1 hour',              false, '',         false),
               ('lapsed',    1, 2, 2, 0, '-1 minute',           true,  '',         true),
               ('doubtful',  1, 3, 1, 0, '-1 minute',           true,  'timeout',  true),
               ('dead',      1, 5, 4, 4, '-1 minute',           true,  'HTTP 400', true),
               ('delivered', 1, 4, 2, 1, '-1 minute',           true,  '',         true),
               ('spared',    1, 4, 0, 0, '-1 minute',           false, '',         false),
               ('discarded', 1, 6, 1, 0, '-1 minute',           false, 'HTTP 410', true)
           ) AS c (invoice, entry, state, attempts, poison, due, leased, error, body)
      JOIN grantd.entitlements e ON e.invoice_id = c.invoice
     CROSS JOIN (VALUES ('crm'), ('ledger')) AS d (name)
    RETURNING *), acted AS (
    INSERT INTO grantd.operator_actions
    SELECT tenant_id, delivery_id, attempts, CASE state WHEN 6 THEN 2 ELSE 1 END, 5, state, 'ops', 'asked for', 'admin', now()
      FROM made WHERE state = 6 OR state = 1 AND attempts = 2)
INSERT INTO grantd.delivery_attempts
SELECT tenant_id, delivery_id, n, 'worker ' || n, created_at + n * interval '1 second',
       CASE WHEN state <> 2 OR n < attempts THEN created_at + (n + 0.5) * interval '1 second' END,
       CASE WHEN state <> 2 OR n < attempts THEN 2 ELSE 0 END, 500 + n, 'error ' || n, 'note ' || n
  FROM made CROSS JOIN LATERAL generate_series(1, attempts) n`

// bundle is a database at 0008 with deliveries in every state, and those who use it.
type bundle struct {
	migrator, service string
	super             *pgx.Conn
}

func filled(t *testing.T) *bundle {
	t.Helper()
	database := pgtest.NewEmpty(t)
	b := bundle{super: connect(t, database)}
	b.migrator, b.service = twoLogins(t, database, b.super)
	upTo8(t, b.migrator)
	exec(t, b.super, ledgerSQL)
	exec(t, b.super, fillSQL)
	return &b
}

// ledgerSQL is what the store writes but for deliveries, which the one of today makes in a later shape.
const ledgerSQL = `
INSERT INTO grantd.invoices SELECT 't', i, 2, 1, i, now() FROM unnest('{never, retried, again, calling, lapsed, doubtful, dead, delivered, spared, discarded}'::text[]) i;
INSERT INTO grantd.operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       attempt_id, event_id, source, caller, applied_at)
SELECT 't', invoice_id, 1, '', 1, invoice_id, gen_random_uuid(), 1, gen_random_uuid(), '', '', '', now() FROM grantd.invoices;
INSERT INTO grantd.entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint,
       recipe, operation_key, granted_at, state, version, changed_at)
SELECT 't', entitlement_id, invoice_id, 'x', 0, '{}', '', 1, idempotency_key, now(), 1, 1, now() FROM grantd.operations;
INSERT INTO grantd.entries SELECT 't', entitlement_id, 1, 1, idempotency_key, 1, '', '', now() FROM grantd.operations;
INSERT INTO grantd.entries SELECT 't', entitlement_id, 2, 2, idempotency_key, 1, '', '', now() FROM grantd.operations WHERE idempotency_key = 'calling'`

func granting(invoice string) *store.Command {
	return &store.Command{
		Kind: pb.OperationKind_OPERATION_KIND_GRANT, TenantID: "t", IdempotencyKey: invoice,
		Grant:   store.Grant{TenantID: "t", InvoiceID: invoice, EntitlementType: "x"},
		Invoice: store.InvoiceVersion{State: pb.InvoiceState_INVOICE_STATE_PAID, Version: 1},
	}
}

// What is known of all deliveries, before and after, in the same words.
const (
	deliveriesAt8SQL = `
SELECT row_to_json(d)::text FROM (
    SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, poison, lease_token AS lease, last_error, created_at,
           settled_at, CASE WHEN settled_at IS NULL THEN due_at END AS due_at, CASE state WHEN 2 THEN due_at END AS leased_until,
           content_type, octet_length(body) AS body_bytes, body
      FROM grantd.deliveries) d
 ORDER BY delivery_id`
	deliveriesAt9SQL = `
SELECT row_to_json(d)::text FROM (
    SELECT a.tenant_id, a.entitlement_id, a.entry_number, a.destination, a.delivery_id, a.state, a.attempts, a.poison, a.lease, a.last_error, a.created_at,
           a.settled_at, CASE WHEN a.settled_at IS NULL THEN a.due_at END AS due_at, a.leased_until,
           a.content_type, a.body_bytes, b.body
      FROM grantd.all_deliveries a
      JOIN (SELECT delivery_id, body FROM grantd.deliveries UNION ALL SELECT delivery_id, body FROM grantd.settled_deliveries) b USING (delivery_id)) d
 ORDER BY delivery_id`

	attemptsAt8SQL = attemptsHead + `grantd.delivery_attempts` + attemptsTail
	attemptsAt9SQL = attemptsHead + `grantd.all_delivery_attempts` + attemptsTail
	attemptsHead   = `
SELECT row_to_json(a)::text FROM (
    SELECT tenant_id, delivery_id, attempt_number, worker, started_at, ended_at, outcome, status_code, error, note FROM `
	attemptsTail = `) a
 ORDER BY delivery_id, attempt_number`

	actionsSQL = `SELECT row_to_json(a)::text FROM grantd.operator_actions a ORDER BY delivery_id, attempts, kind`
)

// lines are what the queries select, one after the other.
func lines(t *testing.T, conn *pgx.Conn, queries ...string) []string {
	t.Helper()
	var all []string
	for _, sql := range queries {
		rows, err := conn.Query(t.Context(), sql)
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		some, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		all = append(all, some...)
	}
	return all
}

func at8(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	return lines(t, conn, deliveriesAt8SQL, attemptsAt8SQL, actionsSQL)
}

func at9(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	return lines(t, conn, deliveriesAt9SQL, attemptsAt9SQL, actionsSQL)
}

func wantSame(t *testing.T, got, want []string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("not as before:\n%s", diff)
	}
}

func TestSettledDeliveries_KeepsEverything(t *testing.T) {
	b := filled(t)
	before := at8(t, b.super)
	if len(before) != 22+34+4 {
		t.Fatalf("%d lines", len(before))
	}
	up(t, b.migrator)
	wantSame(t, at9(t, b.super), before)
	for sql, want := range map[string][]string{
		`SELECT state || ' ' || count(*) FROM grantd.deliveries WHERE tenant_id <> '' GROUP BY state ORDER BY state`: {"1 8", "2 4", "3 2", "5 2"},
		`SELECT state || ' ' || count(*) FROM grantd.settled_deliveries GROUP BY state ORDER BY state`:               {"4 4", "6 2"},
		// The latest attempt stands with its delivery.
		`SELECT count(*)::text FROM grantd.delivery_attempts a JOIN grantd.deliveries d USING (delivery_id) WHERE attempt_number >= attempts`: {"0"},
		`SELECT count(*)::text FROM pg_class WHERE relname ~ 'deliver' AND relowner = 'grantd_service'::regrole`:                              {"0"},
		`SELECT count(*)::text FROM grantd.deliveries WHERE (attempts > 0) <> (worker IS NOT NULL)`:                                           {"0"},
	} {
		if diff := cmp.Diff(want, lines(t, b.super, sql)); diff != "" {
			t.Errorf("%s:\n%s", sql, diff)
		}
	}
}

func TestSettledDeliveries_GoOnAsTheyWere(t *testing.T) {
	b := filled(t)
	up(t, b.migrator)
	s := open(t, b.service, store.Destination{Name: "crm", Deduplicates: true}, store.Destination{Name: "ledger"})
	claims := func(destination string, want ...string) []*store.Delivery {
		t.Helper()
		all, err := s.Claim(t.Context(), destination, "new", time.Hour, 100, rendered)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		for _, d := range all {
			got[fmt.Sprintf("%s %t", d.Body, d.Repeated)] = true
		}
		wanted := map[string]bool{}
		for _, w := range want {
			wanted[w] = true
		}
		if diff := cmp.Diff(wanted, got); diff != "" || len(all) != len(want) {
			t.Fatalf("claimed for %s:\n%s", destination, diff)
		}
		return all
	}
	settle := func(outcome store.DeliveryOutcome, all ...*store.Delivery) {
		t.Helper()
		var results []store.DeliveryResult
		for _, d := range all {
			results = append(results, store.DeliveryResult{Delivery: d, Outcome: outcome, StatusCode: 200})
		}
		if lost, err := s.Settle(t.Context(), results); err != nil || len(lost) != 0 {
			t.Fatalf("lost %d, %v", len(lost), err)
		}
	}
	find := func(destination, invoice string) *store.DeliveryStory {
		t.Helper()
		e, err := s.Entitlement(t.Context(), "t", store.Target{BusinessKey: store.BusinessKey{InvoiceID: invoice, EntitlementType: "x"}})
		if err != nil {
			t.Fatal(err)
		}
		story, err := s.Delivery(t.Context(), "t", store.DeliveryName{EntitlementID: e.ID, EntryNumber: 1, Destination: destination})
		if err != nil {
			t.Fatal(err)
		}
		numbers := map[int64]int{}
		for _, a := range story.Attempts {
			numbers[a.Number]++
		}
		if int64(len(numbers)) != story.Delivery.Attempts || len(numbers) != len(story.Attempts) {
			t.Errorf("%s has had %d attempts, and shows %v", invoice, story.Delivery.Attempts, numbers)
		}
		return story
	}
	order := func(d *store.Delivery) store.DeliveryOrder {
		return store.DeliveryOrder{TenantID: "t", Delivery: store.DeliveryName{ID: d.ID}, Actor: "ops", Reason: "asked for"}
	}

	settle(store.Delivered, claims("crm", "never 1 rendered false", "again 1 to crm false", "lapsed 1 to crm true")...)
	claims("ledger", "never 1 rendered false", "again 1 to ledger false")
	for destination, want := range map[string]map[string]pb.DeliveryState{
		"crm": {
			"never": pb.DeliveryState_DELIVERY_STATE_DELIVERED, "again": pb.DeliveryState_DELIVERY_STATE_DELIVERED,
			"lapsed": pb.DeliveryState_DELIVERY_STATE_DELIVERED, "spared": pb.DeliveryState_DELIVERY_STATE_DELIVERED,
		},
		"ledger": {
			"never": pb.DeliveryState_DELIVERY_STATE_SENDING, "retried": pb.DeliveryState_DELIVERY_STATE_PENDING,
			"calling": pb.DeliveryState_DELIVERY_STATE_SENDING, "lapsed": pb.DeliveryState_DELIVERY_STATE_UNKNOWN,
			"doubtful": pb.DeliveryState_DELIVERY_STATE_UNKNOWN, "dead": pb.DeliveryState_DELIVERY_STATE_DEAD,
			"delivered": pb.DeliveryState_DELIVERY_STATE_DELIVERED, "discarded": pb.DeliveryState_DELIVERY_STATE_DISCARDED,
		},
	} {
		for invoice, state := range want {
			if got := find(destination, invoice).Delivery.State; got != state {
				t.Errorf("%s for %s is %v, want %v", invoice, destination, got, state)
			}
		}
	}

	// Who still has the token of a call may record its result; the successor that it held back goes on.
	settle(store.Delivered, find("crm", "calling").Delivery, find("crm", "doubtful").Delivery)
	claims("crm", "calling 2 rendered false")

	unknown, err := s.TakeUnknown(t.Context(), "ledger", time.Minute, 10)
	if err != nil || len(unknown) != 2 {
		t.Fatalf("%d are UNKNOWN, %v", len(unknown), err)
	}
	for _, d := range unknown {
		if a, err := s.Resolve(t.Context(), order(d), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil || a.Outcome != pb.Outcome_OUTCOME_NEWLY_APPLIED {
			t.Fatalf("%v, %v", a.Outcome, err)
		}
	}
	dead := find("ledger", "dead").Delivery
	if a, err := s.Redeliver(t.Context(), order(dead)); err != nil || a.Outcome != pb.Outcome_OUTCOME_NEWLY_APPLIED {
		t.Fatalf("%v, %v", a.Outcome, err)
	}
	for _, d := range claims("ledger", "lapsed 1 to ledger false", "doubtful 1 to ledger false", "dead 1 to ledger false") {
		if d.ID == dead.ID && d.Key != dead.Key {
			t.Errorf("the key was %s and is %s", dead.Key, d.Key)
		}
		settle(store.Dead, d)
	}
	if story := find("ledger", "dead"); story.Delivery.Attempts != 5 || len(story.Actions) != 1 {
		t.Errorf("%d attempts, %d actions", story.Delivery.Attempts, len(story.Actions))
	}
	for invoice, want := range map[string]pb.RejectionReason{
		"delivered": pb.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED, "discarded": pb.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED,
	} {
		a, err := s.Redeliver(t.Context(), order(find("crm", invoice).Delivery))
		if err != nil || a.Rejection == nil || a.Rejection.Reason != want {
			t.Errorf("%s: %+v, %v", invoice, a, err)
		}
	}
	if story := find("crm", "discarded"); len(story.Actions) != 1 || story.Delivery.BodyBytes == 0 {
		t.Errorf("%d actions, %d bytes", len(story.Actions), story.Delivery.BodyBytes)
	}
}

func rendered(d *store.Delivery) ([]byte, string, error) {
	return fmt.Appendf(nil, "%s %d rendered", d.Event.Entitlement.Grant.InvoiceID, d.Event.Entry.Number), "text/plain", nil
}

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

	// A grant of such a one is sent, with the body that the claim makes.
	grants := open(t, b.service)
	if _, err := grants.Apply(t.Context(), granting("late")); err != nil {
		t.Fatal(err)
	}
	e, err := grants.Entitlement(t.Context(), "t", store.Target{BusinessKey: store.BusinessKey{InvoiceID: "late", EntitlementType: "x"}})
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.New()
	if _, err := older.Exec(t.Context(), oldInsertSQL, one, []uuid.UUID{e.ID}, first, []string{"mail"}, []uuid.UUID{id}, []time.Time{time.Now().Add(-time.Minute)}); err != nil {
		t.Fatal(err)
	}
	s := open(t, b.service, store.Destination{Name: "mail"})
	all, err := s.Claim(t.Context(), "mail", "new", time.Hour, 10, rendered)
	if err != nil || len(all) != 1 || string(all[0].Body) != "late 1 rendered" || all[0].ID != id || all[0].Key == "" {
		t.Fatalf("claimed %v, %v", all, err)
	}
	if lost, err := s.Settle(t.Context(), []store.DeliveryResult{{Delivery: all[0], Outcome: store.Delivered}}); err != nil || len(lost) > 0 {
		t.Fatalf("lost %d, %v", len(lost), err)
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

// A claim holds the table for as long as its transaction takes. The migration gives up soon, since every grant waits behind it, and
// leaves all as it was.
func TestSettledDeliveries_TableIsHeld(t *testing.T) {
	b := filled(t)
	before := at8(t, b.super)
	tx, err := connect(t, b.super.Config().ConnString()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM grantd.deliveries FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	var pg *pgconn.PgError
	if ran, err := migrations.Up(t.Context(), b.migrator); !errors.As(err, &pg) || pg.Code != "55P03" {
		t.Fatalf("ran %v, %v, want lock_not_available", ran, err)
	}
	wantSame(t, at8(t, b.super), before)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	up(t, b.migrator)
	wantSame(t, at9(t, b.super), before)
}

func TestSettledDeliveries_ManyMigrateAtOnce(t *testing.T) {
	b := filled(t)
	before := at8(t, b.super)
	var all sync.WaitGroup
	ran := make(chan string, 100)
	for range 4 {
		all.Go(func() {
			files, err := migrations.Up(t.Context(), b.migrator)
			if err != nil {
				t.Error(err)
			}
			for _, file := range files {
				ran <- file
			}
		})
	}
	all.Wait()
	close(ran)
	times := 0
	for file := range ran {
		if file == file0009 {
			times++
		}
	}
	if times != 1 {
		t.Errorf("it ran %d times", times)
	}
	wantSame(t, at9(t, b.super), before)
}
