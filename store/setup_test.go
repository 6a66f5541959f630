package store_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

const (
	newly    = pb.Outcome_OUTCOME_NEWLY_APPLIED
	already  = pb.Outcome_OUTCOME_ALREADY_APPLIED
	conflict = pb.Outcome_OUTCOME_CONFLICTING_PAYLOAD
	rejected = pb.Outcome_OUTCOME_REJECTED
	missing  = pb.Outcome_OUTCOME_NOT_APPLIED

	byKey         = pb.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY
	byBusinessKey = pb.MatchedBy_MATCHED_BY_BUSINESS_KEY

	unpaid   = pb.InvoiceState_INVOICE_STATE_OPEN
	paid     = pb.InvoiceState_INVOICE_STATE_PAID
	voided   = pb.InvoiceState_INVOICE_STATE_VOIDED
	refunded = pb.InvoiceState_INVOICE_STATE_REFUNDED

	active   = pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE
	reversed = pb.EntitlementState_ENTITLEMENT_STATE_REVERSED
)

// bundle is a store on a database of its own.
type bundle struct {
	*store.Store
	url string
	// sql is a session of the database's superuser.
	sql *pgx.Conn
}

func setup(t testing.TB, changes ...func(*store.Config)) *bundle {
	t.Helper()
	url := pgtest.New(t)
	return &bundle{Store: open(t, url, changes...), url: url, sql: connect(t, url)}
}

func open(t testing.TB, url string, changes ...func(*store.Config)) *store.Store {
	t.Helper()
	cfg := store.Config{DatabaseURL: url, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	for _, change := range changes {
		change(&cfg)
	}
	s, err := store.Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// connect opens a session beside the store's.
func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["search_path"] = "grantd"
	cfg.RuntimeParams["timezone"] = "UTC"
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// exec runs statements, and fails the test with the first that fails.
func exec(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// value returns the one value that a query selects.
func value[T any](t testing.TB, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// begin opens a transaction on a session of its own; it is rolled back with the test, if nothing ended it before.
func begin(t testing.TB, url string) (pgx.Tx, *pgx.Conn) {
	t.Helper()
	conn := connect(t, url)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tx, conn
}

// eventually waits until the query selects true.
func eventually(t testing.TB, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !value[bool](t, conn, sql, args...); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not true: %s", sql)
		}
	}
}

// blockedSQL says whether a statement of the service has waited for another session's lock for some time.
const blockedSQL = `
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'grantd' AND wait_event_type = 'Lock'
                  AND clock_timestamp() - query_start > make_interval(secs => $1))`

// want applies the command, and fails the test at an error or another outcome.
func want(t testing.TB, s *store.Store, c *store.Command, outcome pb.Outcome) store.Answer {
	t.Helper()
	a, err := s.Apply(t.Context(), c)
	if err != nil {
		t.Fatalf("%v %s: %v", c.Kind, c.IdempotencyKey, err)
	}
	if a.Outcome != outcome {
		t.Fatalf("%v %s: got %v, want %v: %s", c.Kind, c.IdempotencyKey, a.Outcome, outcome, describe(&a))
	}
	return a
}

func wantRejected(t testing.TB, s *store.Store, c *store.Command, reason pb.RejectionReason) store.Answer {
	t.Helper()
	a := want(t, s, c, rejected)
	if a.Rejection.Reason != reason {
		t.Fatalf("%v %s: rejected for %v, want %v", c.Kind, c.IdempotencyKey, a.Rejection.Reason, reason)
	}
	return a
}

// operationNamed is the key of the operation that an answer names, empty where it names none.
func operationNamed(a *store.Answer) string {
	switch {
	case a.Operation != nil:
		return a.Operation.IdempotencyKey
	case a.Conflict != nil:
		return a.Conflict.Stored.IdempotencyKey
	default:
		return ""
	}
}

func describe(a *store.Answer) string {
	switch {
	case a.Rejection != nil:
		return fmt.Sprintf("%v: %s", a.Rejection.Reason, a.Rejection.Message)
	case a.Conflict != nil:
		return fmt.Sprint(fields(a))
	default:
		return a.MatchedBy.String()
	}
}

// fields lists the paths of a conflict.
func fields(a *store.Answer) []string {
	var names []string
	for _, d := range a.Conflict.Differences {
		names = append(names, d.Field)
	}
	return names
}

func grant(tenant, key, invoice, typ string) *store.Command {
	return &store.Command{
		Kind: pb.OperationKind_OPERATION_KIND_GRANT, TenantID: tenant, IdempotencyKey: key,
		Grant:   store.Grant{TenantID: tenant, InvoiceID: invoice, EntitlementType: typ, Scope: map[string]string{"seats": "10"}},
		Invoice: store.InvoiceVersion{State: paid, Version: 1},
	}
}

func record(tenant, key, invoice string, state pb.InvoiceState, version int64) *store.Command {
	return &store.Command{
		Kind: pb.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE, TenantID: tenant, IdempotencyKey: key, InvoiceID: invoice,
		Invoice: store.InvoiceVersion{State: state, Version: version},
	}
}

func reverse(tenant, key, invoice, typ string) *store.Command {
	return &store.Command{
		Kind: pb.OperationKind_OPERATION_KIND_REVERSE, TenantID: tenant, IdempotencyKey: key,
		Target: store.Target{BusinessKey: store.BusinessKey{InvoiceID: invoice, EntitlementType: typ}},
		Actor:  "ops@example.com", Reason: "asked for",
	}
}

func reinstate(tenant, key, invoice, typ string) *store.Command {
	c := reverse(tenant, key, invoice, typ)
	c.Kind = pb.OperationKind_OPERATION_KIND_REINSTATE
	return c
}

func pointer[T any](v T) *T { return &v }
