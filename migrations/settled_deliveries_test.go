package migrations_test

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
