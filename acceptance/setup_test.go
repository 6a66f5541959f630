package acceptance_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/server"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

const (
	newly      = pb.Outcome_OUTCOME_NEWLY_APPLIED
	already    = pb.Outcome_OUTCOME_ALREADY_APPLIED
	conflict   = pb.Outcome_OUTCOME_CONFLICTING_PAYLOAD
	rejected   = pb.Outcome_OUTCOME_REJECTED
	retryable  = pb.Outcome_OUTCOME_RETRYABLE_FAILURE
	notApplied = pb.Outcome_OUTCOME_NOT_APPLIED

	byNothing     = pb.MatchedBy_MATCHED_BY_UNSPECIFIED
	byKey         = pb.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY
	byBusinessKey = pb.MatchedBy_MATCHED_BY_BUSINESS_KEY

	unpaid   = pb.InvoiceState_INVOICE_STATE_OPEN
	paid     = pb.InvoiceState_INVOICE_STATE_PAID
	voided   = pb.InvoiceState_INVOICE_STATE_VOIDED
	refunded = pb.InvoiceState_INVOICE_STATE_REFUNDED

	full = pb.OperationView_OPERATION_VIEW_FULL
)

// soak says that there is time to look for rare races.
var soak = os.Getenv("GRANTD_SOAK") != ""

// settings are what a test changes of the usual server.
type settings struct {
	store store.Config
	stop  server.Stop
	dial  []grpc.DialOption
}

// bundle is a server on a database of its own, and a client that retries nothing.
type bundle struct {
	pb.EntitlementServiceClient
	store      *store.Store
	closeStore func()
	server     *server.Server
	addr       string
	conn       *grpc.ClientConn
	url        string
	// sql is the database's superuser.
	sql *pgxpool.Pool
}

func setup(t testing.TB, changes ...func(*settings)) *bundle {
	t.Helper()
	url := pgtest.New(t)
	return serveOn(t, url, url, changes...)
}

// serveOn serves on a database; url is the way that the store takes to it, and direct the test's own.
func serveOn(t testing.TB, url, direct string, changes ...func(*settings)) *bundle {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	with := settings{store: store.Config{DatabaseURL: url, Log: log}, stop: server.Stop{Grace: 10 * time.Second}}
	for _, change := range changes {
		change(&with)
	}
	b := &bundle{url: direct, sql: connect(t, direct)}

	var err error
	if b.store, err = store.Open(context.Background(), with.store); err != nil {
		t.Fatal(err)
	}
	b.closeStore = sync.OnceFunc(b.store.Close)
	t.Cleanup(b.closeStore)
	quiet, err := telemetry.Setup(context.Background(), telemetry.Config{Version: "test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	b.server = server.New(server.Config{Store: b.store, Telemetry: quiet, Log: log, Stop: with.stop})
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.addr = lis.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.server.Serve(ctx, lis) }()
	b.conn = dial(t, b.addr, with.dial...)
	t.Cleanup(func() {
		b.conn.Close()
		stop()
		if err := <-served; err != nil {
			t.Errorf("the server ended with %v", err)
		}
	})
	b.EntitlementServiceClient = pb.NewEntitlementServiceClient(b.conn)
	return b
}

// dial opens a connection of its own, which retries nothing.
func dial(t testing.TB, addr string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry()}, options...)
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// connect opens sessions of the superuser beside the store's.
func connect(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["search_path"] = "grantd"
	cfg.ConnConfig.RuntimeParams["timezone"] = "UTC"
	// The tests read what they have just seen written, and change settings while they go on.
	cfg.MaxConns = 20 // made as they are needed
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func (b *bundle) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := b.sql.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// value returns the one value that a query selects.
func value[T any](t testing.TB, b *bundle, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := b.sql.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// lines returns a query's rows as text.
func (b *bundle) lines(t testing.TB, sql string, args ...any) []string {
	t.Helper()
	rows, err := b.sql.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return all
}

// begin opens a transaction on a session of its own; it is rolled back with the test, if nothing ended it before.
func (b *bundle) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := b.sql.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback(context.Background()) })
	return tx
}

// eventually waits until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not true: %s", what)
		}
	}
}

// waitBlocked waits until that many statements of the service wait for another session's lock.
func (b *bundle) waitBlocked(t testing.TB, statements int) {
	t.Helper()
	eventually(t, "statements wait for a lock", func() bool {
		return value[int](t, b, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'grantd' AND wait_event_type = 'Lock'`) >= statements
	})
}

// written is all that the ledger holds, attempts left out, as text.
func (b *bundle) written(t testing.TB) []string {
	t.Helper()
	return b.lines(t, `
		SELECT 'invoice ' || i::text FROM invoices i
		UNION ALL SELECT 'operation ' || o::text FROM operations o
		UNION ALL SELECT 'entitlement ' || e::text FROM entitlements e
		UNION ALL SELECT 'entry ' || n::text FROM entries n
		ORDER BY 1`)
}

// wantWhole checks what must hold in every database at any time: each owner of a grant has one entitlement with one first entry and
// one winning attempt, no business key has two, and each alias has an owner.
func (b *bundle) wantWhole(t testing.TB) {
	t.Helper()
	for what, sql := range map[string]string{
		"grants without their entitlement": `
			SELECT o::text FROM operations o
			  LEFT JOIN entitlements e ON e.tenant_id = o.tenant_id AND e.operation_key = o.idempotency_key
			       AND e.entitlement_id = o.entitlement_id AND e.fingerprint = o.fingerprint AND e.granted_at = o.applied_at
			 WHERE o.kind = 1 AND o.owner_key IS NULL AND e.entitlement_id IS NULL`,
		"entitlements without their operation": `
			SELECT e::text FROM entitlements e
			  LEFT JOIN operations o ON o.tenant_id = e.tenant_id AND o.idempotency_key = e.operation_key
			       AND o.entitlement_id = e.entitlement_id AND o.owner_key IS NULL AND o.kind = 1
			 WHERE o.idempotency_key IS NULL`,
		"entitlements whose ledger does not say what they say": `
			SELECT e::text FROM entitlements e
			  LEFT JOIN entries n ON n.tenant_id = e.tenant_id AND n.entitlement_id = e.entitlement_id
			 GROUP BY e.tenant_id, e.entitlement_id, e.version, e.state, e.changed_at, e::text
			HAVING count(n.entry_number) <> e.version OR max(n.entry_number) IS DISTINCT FROM e.version OR max(n.at) <> e.changed_at
			    OR (max(n.entry_number) FILTER (WHERE n.kind = 2) IS NOT DISTINCT FROM e.version) <> (e.state = 2)`,
		"entries without an entitlement": `
			SELECT n::text FROM entries n
			 WHERE NOT EXISTS (SELECT FROM entitlements e WHERE e.tenant_id = n.tenant_id AND e.entitlement_id = n.entitlement_id)`,
		"business keys granted twice": `
			SELECT min(tenant_id || ' ' || invoice_id) FROM entitlements
			 GROUP BY tenant_id, invoice_id, entitlement_type, operation_version HAVING count(*) > 1`,
		"aliases without an owner": `
			SELECT a::text FROM operations a
			 WHERE a.owner_key IS NOT NULL AND NOT EXISTS (
			       SELECT FROM operations o
			        WHERE o.tenant_id = a.tenant_id AND o.idempotency_key = a.owner_key AND o.owner_key IS NULL)`,
		"owners without exactly one winning attempt": `
			SELECT o::text FROM operations o
			 WHERE o.owner_key IS NULL AND 1 <> (
			       SELECT count(*) FROM attempts a
			        WHERE a.tenant_id = o.tenant_id AND a.idempotency_key = o.idempotency_key AND a.outcome = 1
			          AND a.attempt_id = o.attempt_id AND a.at = o.applied_at)`,
		"winning attempts without an owner": `
			SELECT a::text FROM attempts a
			 WHERE a.outcome = 1 AND NOT EXISTS (
			       SELECT FROM operations o
			        WHERE o.tenant_id = a.tenant_id AND o.idempotency_key = a.idempotency_key AND o.attempt_id = a.attempt_id)`,
		"entitlements without their invoice": `
			SELECT e::text FROM entitlements e
			 WHERE NOT EXISTS (SELECT FROM invoices i WHERE i.tenant_id = e.tenant_id AND i.invoice_id = e.invoice_id)`,
	} {
		if found := b.lines(t, sql); len(found) > 0 {
			t.Errorf("%d %s, for example %s", len(found), what, found[0])
		}
	}
}

// recordInvoice moves the authority's record of an invoice to a state.
func (b *bundle) recordInvoice(t testing.TB, tenant, invoice string, state pb.InvoiceState, version int64) {
	t.Helper()
	resp, err := b.RecordInvoiceState(t.Context(), &pb.RecordInvoiceStateRequest{
		IdempotencyKey: fmt.Sprintf("billing:invoice:%s:%d", invoice, version),
		TenantId:       tenant, InvoiceId: invoice, State: state, Version: version,
	})
	if err != nil || resp.GetOutcome() != newly {
		t.Fatalf("recording %s: %v %v", invoice, resp, err)
	}
}

// invoice is the authority's record, for example "PAID 5"; "" where there is none.
func (b *bundle) invoice(t testing.TB, tenant, invoice string) string {
	t.Helper()
	return strings.Join(b.lines(t, `
		SELECT (ARRAY['OPEN', 'PAID', 'VOIDED', 'REFUNDED'])[state] || ' ' || version
		  FROM invoices WHERE tenant_id = $1 AND invoice_id = $2`, tenant, invoice), "")
}

// attempts lists what the arrivals under a key were told, oldest first, as outcome, match and reason.
func (b *bundle) attempts(t testing.TB, tenant, key string) []string {
	t.Helper()
	return b.lines(t, `
		SELECT outcome || ' ' || matched_by || ' ' || reason FROM attempts
		 WHERE tenant_id = $1 AND idempotency_key = $2 ORDER BY at, attempt_id`, tenant, key)
}

// grant is a request for ten seats because an invoice was paid.
func grant(tenant, key, invoice string, changes ...func(*pb.GrantEntitlementRequest)) *pb.GrantEntitlementRequest {
	r := &pb.GrantEntitlementRequest{
		IdempotencyKey: key,
		Grant: &pb.Grant{
			TenantId: tenant, InvoiceId: invoice, EntitlementType: "team_access", Scope: map[string]string{"seats": "10"},
		},
		Invoice: &pb.InvoiceEvidence{State: paid, Version: 1},
	}
	for _, change := range changes {
		change(r)
	}
	return r
}

func seats(n string) func(*pb.GrantEntitlementRequest) {
	return func(r *pb.GrantEntitlementRequest) { r.Grant.Scope["seats"] = n }
}

func ofType(name string) func(*pb.GrantEntitlementRequest) {
	return func(r *pb.GrantEntitlementRequest) { r.Grant.EntitlementType = name }
}

func evidence(state pb.InvoiceState, version int64) func(*pb.GrantEntitlementRequest) {
	return func(r *pb.GrantEntitlementRequest) { r.Invoice = &pb.InvoiceEvidence{State: state, Version: version} }
}

// want sends a grant, and fails the test at a status or another outcome.
func (b *bundle) want(t testing.TB, outcome pb.Outcome, by pb.MatchedBy, r *pb.GrantEntitlementRequest) *pb.GrantEntitlementResponse {
	t.Helper()
	resp, err := b.GrantEntitlement(t.Context(), r)
	if err != nil {
		t.Fatalf("%s: %v", r.GetIdempotencyKey(), err)
	}
	if resp.GetOutcome() != outcome || resp.GetMatchedBy() != by {
		t.Fatalf("%s: got %s, want %v %v", r.GetIdempotencyKey(), told(resp), outcome, by)
	}
	wantShape(t, resp)
	return resp
}

func (b *bundle) wantRejected(t testing.TB, reason pb.RejectionReason, r *pb.GrantEntitlementRequest) *pb.Rejection {
	t.Helper()
	resp := b.want(t, rejected, byNothing, r)
	if got := resp.GetRejection().GetReason(); got != reason {
		t.Fatalf("%s: rejected for %v, want %v", r.GetIdempotencyKey(), got, reason)
	}
	return resp.GetRejection()
}

// result is what became of a call.
type result struct {
	resp    *pb.GrantEntitlementResponse
	err     error
	trailer metadata.MD
	took    time.Duration
}

// start sends a grant and does not wait.
func (b *bundle) start(t testing.TB, r *pb.GrantEntitlementRequest) <-chan result {
	done := make(chan result, 1)
	go func() {
		var got result
		began := time.Now()
		got.resp, got.err = b.GrantEntitlement(t.Context(), r, grpc.Trailer(&got.trailer))
		got.took = time.Since(began)
		done <- got
	}()
	return done
}

// batch sends many grants in one call, and fails the test at a status.
func (b *bundle) batch(t testing.TB, requests ...*pb.GrantEntitlementRequest) []*pb.GrantEntitlementResponse {
	t.Helper()
	resp, err := b.BatchGrantEntitlements(t.Context(), &pb.BatchGrantEntitlementsRequest{Requests: requests})
	if err != nil {
		t.Fatalf("a batch of %d: %v", len(requests), err)
	}
	if len(resp.GetResponses()) != len(requests) {
		t.Fatalf("%d answers to a batch of %d", len(resp.GetResponses()), len(requests))
	}
	for _, r := range resp.GetResponses() {
		wantShape(t, r)
	}
	return resp.GetResponses()
}

// told is an answer in a line.
func told(resp *pb.GrantEntitlementResponse) string {
	switch {
	case resp.GetRejection() != nil:
		return fmt.Sprintf("%v %v: %s", resp.GetOutcome(), resp.GetRejection().GetReason(), resp.GetRejection().GetMessage())
	case resp.GetConflict() != nil:
		return fmt.Sprintf("%v %v %v", resp.GetOutcome(), resp.GetMatchedBy(), differing(resp.GetConflict()))
	case resp.GetFailure() != nil:
		return fmt.Sprintf("%v %s", resp.GetOutcome(), resp.GetFailure().GetReason())
	}
	return fmt.Sprintf("%v %v", resp.GetOutcome(), resp.GetMatchedBy())
}

// differing lists a conflict's fields.
func differing(c *pb.Conflict) []string {
	var fields []string
	for _, d := range c.GetDifferences() {
		fields = append(fields, d.GetField())
	}
	return fields
}

// wantShape checks that an answer carries what its outcome promises, and nothing that could be taken for something else.
func wantShape(t testing.TB, resp *pb.GrantEntitlementResponse) {
	t.Helper()
	applied := resp.GetOutcome() == newly || resp.GetOutcome() == already
	got := []bool{
		resp.GetEntitlement() != nil, resp.GetOperation() != nil, resp.GetCurrentState() != 0, resp.GetCurrentVersion() != 0,
		resp.GetConflict() != nil, resp.GetRejection() != nil, resp.GetFailure() != nil,
		resp.GetMatchedBy() != byNothing,
	}
	want := []bool{
		applied, applied, applied, applied,
		resp.GetOutcome() == conflict, resp.GetOutcome() == rejected, resp.GetOutcome() == retryable,
		resp.GetOutcome() == already || resp.GetOutcome() == conflict,
	}
	if !slices.Equal(got, want) {
		t.Errorf("the parts of %s are not those of its outcome: %v", told(resp), resp)
	}
}

// operation looks an operation up, and fails the test at a status.
func (b *bundle) operation(t testing.TB, r *pb.GetOperationRequest) *pb.GetOperationResponse {
	t.Helper()
	resp, err := b.GetOperation(t.Context(), r)
	if err != nil {
		t.Fatalf("look up %v: %v", r, err)
	}
	return resp
}

func byName(tenant, key string, view pb.OperationView) *pb.GetOperationRequest {
	return &pb.GetOperationRequest{TenantId: tenant, Name: &pb.GetOperationRequest_IdempotencyKey{IdempotencyKey: key}, View: view}
}

func byEffect(tenant, invoice, typeName string) *pb.GetOperationRequest {
	return &pb.GetOperationRequest{TenantId: tenant, Name: &pb.GetOperationRequest_BusinessKey{
		BusinessKey: &pb.BusinessKey{InvoiceId: invoice, EntitlementType: typeName},
	}}
}

// wantSame compares messages, or slices of them.
func wantSame(t testing.TB, what string, got, want any) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func wantCode(t testing.TB, what string, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("%s: got %v, want %v", what, err, want)
	}
}

func pointer[T any](v T) *T { return &v }
