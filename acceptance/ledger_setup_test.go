package acceptance_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	active   = pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE
	reversed = pb.EntitlementState_ENTITLEMENT_STATE_REVERSED

	opGrant     = pb.OperationKind_OPERATION_KIND_GRANT
	opRecord    = pb.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE
	opReverse   = pb.OperationKind_OPERATION_KIND_REVERSE
	opReinstate = pb.OperationKind_OPERATION_KIND_REINSTATE

	never      = pb.RetryAdvice_RETRY_ADVICE_NEVER
	afterState = pb.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE
)

func recording(tenant, key, invoice string, state pb.InvoiceState, version int64) *pb.RecordInvoiceStateRequest {
	return &pb.RecordInvoiceStateRequest{IdempotencyKey: key, TenantId: tenant, InvoiceId: invoice, State: state, Version: version}
}

func reversal(tenant, key, invoice, typeName string, changes ...func(*pb.ReverseEntitlementRequest)) *pb.ReverseEntitlementRequest {
	r := &pb.ReverseEntitlementRequest{
		IdempotencyKey: key, TenantId: tenant, Reason: "charge disputed", Actor: "alice",
		Target: &pb.ReverseEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{InvoiceId: invoice, EntitlementType: typeName}},
	}
	for _, change := range changes {
		change(r)
	}
	return r
}

func reinstatement(tenant, key, invoice, typeName string, changes ...func(*pb.ReinstateEntitlementRequest)) *pb.ReinstateEntitlementRequest {
	r := &pb.ReinstateEntitlementRequest{
		IdempotencyKey: key, TenantId: tenant, Reason: "dispute won", Actor: "bob",
		Target: &pb.ReinstateEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{InvoiceId: invoice, EntitlementType: typeName}},
	}
	for _, change := range changes {
		change(r)
	}
	return r
}

// turnAnswer is what the answers to reversals and reinstatements have in common, which is everything.
type turnAnswer interface {
	GetOutcome() pb.Outcome
	GetMatchedBy() pb.MatchedBy
	GetOperation() *pb.Operation
	GetEntitlement() *pb.Entitlement
	GetConflict() *pb.Conflict
	GetRejection() *pb.Rejection
	GetFailure() *pb.RetryableFailure
	GetCurrentState() pb.EntitlementState
	GetCurrentVersion() int64
}

// turn sends a reversal or a reinstatement, and fails the test at a status or another outcome.
func (b *bundle) turn(t testing.TB, outcome pb.Outcome, by pb.MatchedBy, request any) turnAnswer {
	t.Helper()
	var resp turnAnswer
	var err error
	switch r := request.(type) {
	case *pb.ReverseEntitlementRequest:
		resp, err = b.ReverseEntitlement(t.Context(), r)
	case *pb.ReinstateEntitlementRequest:
		resp, err = b.ReinstateEntitlement(t.Context(), r)
	default:
		t.Fatalf("%T is neither", request)
	}
	if err != nil {
		t.Fatalf("%v: %v", request, err)
	}
	if resp.GetOutcome() != outcome || resp.GetMatchedBy() != by {
		t.Fatalf("%v: got %v, want %v %v", request, resp, outcome, by)
	}
	applied := outcome == newly || outcome == already
	got := []bool{
		resp.GetEntitlement() != nil, resp.GetOperation() != nil, resp.GetCurrentState() != 0, resp.GetCurrentVersion() != 0,
		resp.GetConflict() != nil, resp.GetRejection() != nil, resp.GetFailure() != nil,
	}
	want := []bool{applied, applied, applied, applied, outcome == conflict, outcome == rejected, false}
	if !slices.Equal(got, want) {
		t.Errorf("the parts of %v are not those of its outcome", resp)
	}
	return resp
}

// turnRefused is turn for a rejection.
func (b *bundle) turnRefused(t testing.TB, reason pb.RejectionReason, request any) *pb.Rejection {
	t.Helper()
	r := b.turn(t, rejected, byNothing, request).GetRejection()
	if r.GetReason() != reason || r.GetRetry() != afterState || r.GetMessage() == "" {
		t.Fatalf("%v: rejected with %v, want %v", request, r, reason)
	}
	return r
}

// record sends an invoice's state, and fails the test at a status or another outcome.
func (b *bundle) record(t testing.TB, outcome pb.Outcome, by pb.MatchedBy, r *pb.RecordInvoiceStateRequest) *pb.RecordInvoiceStateResponse {
	t.Helper()
	resp, err := b.RecordInvoiceState(t.Context(), r)
	if err != nil {
		t.Fatalf("%v: %v", r, err)
	}
	if resp.GetOutcome() != outcome || resp.GetMatchedBy() != by {
		t.Fatalf("%v: got %v, want %v %v", r, resp, outcome, by)
	}
	applied := outcome == newly || outcome == already
	got := []bool{
		resp.GetRecorded() != nil, resp.GetOperation() != nil, resp.GetConflict() != nil, resp.GetRejection() != nil, resp.GetFailure() != nil,
	}
	if want := []bool{applied, applied, outcome == conflict, outcome == rejected, false}; !slices.Equal(got, want) {
		t.Errorf("the parts of %v are not those of its outcome", resp)
	}
	return resp
}

// wantNow checks what stands beside an answer.
func wantNow(t testing.TB, what string, resp interface {
	GetCurrentState() pb.EntitlementState
	GetCurrentVersion() int64
}, state pb.EntitlementState, version int64) {
	t.Helper()
	if resp.GetCurrentState() != state || resp.GetCurrentVersion() != version {
		t.Errorf("%s: now %v %d, want %v %d", what, resp.GetCurrentState(), resp.GetCurrentVersion(), state, version)
	}
}

// ledger is an entitlement's ledger as lines, for example "2 REVERSED F at 2: the invoice is REFUNDED".
func (b *bundle) ledger(t testing.TB, tenant, invoice, typeName string) []string {
	t.Helper()
	return b.lines(t, `
		SELECT entry_number || ' ' || (ARRAY['GRANTED', 'REVERSED', 'REINSTATED'])[kind] || ' ' || n.operation_key || ' at ' || invoice_version
		       || CASE WHEN actor || reason <> '' THEN ': ' || btrim(actor || ' ' || reason) ELSE '' END
		  FROM entitlements e JOIN entries n USING (tenant_id, entitlement_id)
		 WHERE tenant_id = $1 AND invoice_id = $2 AND entitlement_type = $3
		 ORDER BY operation_version, entry_number`, tenant, invoice, typeName)
}

// wantOrdered checks what the order of invoices and the ledger promise in every database at any time, beside wantWhole.
func (b *bundle) wantOrdered(t testing.TB) {
	t.Helper()
	for what, sql := range map[string]string{
		"active entitlements of a reversed invoice": `
			SELECT e::text FROM invoices i JOIN entitlements e USING (tenant_id, invoice_id) WHERE i.state IN (3, 4) AND e.state = 1`,
		"entitlements whose state or version is not their last entry's": `
			SELECT e::text FROM entitlements e
			  LEFT JOIN LATERAL (SELECT * FROM entries n WHERE (n.tenant_id, n.entitlement_id) = (e.tenant_id, e.entitlement_id)
			                      ORDER BY entry_number DESC LIMIT 1) n ON true
			 WHERE n.entry_number IS DISTINCT FROM e.version OR n.at IS DISTINCT FROM e.changed_at
			    OR e.state <> CASE n.kind WHEN 2 THEN 2 ELSE 1 END`,
		"entries that do not turn what stood before, or go back in time or version": `
			SELECT n::text FROM entries p
			  JOIN entries n ON (n.tenant_id, n.entitlement_id, n.entry_number) = (p.tenant_id, p.entitlement_id, p.entry_number + 1)
			 WHERE (p.kind = 2) = (n.kind = 2) OR n.at < p.at OR n.invoice_version < p.invoice_version`,
		"entries without the operation that they name": `
			SELECT n::text FROM entries n
			 WHERE NOT EXISTS (
			       SELECT FROM operations o
			        WHERE o.tenant_id = n.tenant_id AND o.idempotency_key = n.operation_key AND o.owner_key IS NULL
			          AND (o.kind = 2 AND n.kind = 2
			            OR o.kind = CASE n.kind WHEN 1 THEN 1 WHEN 2 THEN 3 ELSE 4 END
			               AND (o.entitlement_id, o.entry_number) = (n.entitlement_id, n.entry_number)))`,
		"reversals and reinstatements without their entry": `
			SELECT o::text FROM operations o
			 WHERE o.kind IN (3, 4) AND o.owner_key IS NULL AND NOT EXISTS (
			       SELECT FROM entries n
			        WHERE (n.tenant_id, n.entitlement_id, n.entry_number, n.operation_key)
			            = (o.tenant_id, o.entitlement_id, o.entry_number, o.idempotency_key))`,
		"invoices without the operation that recorded them": `
			SELECT i::text FROM invoices i
			 WHERE NOT EXISTS (
			       SELECT FROM operations o
			        WHERE o.tenant_id = i.tenant_id AND o.idempotency_key = i.recorded_by AND o.invoice_id = i.invoice_id
			          AND o.owner_key IS NULL AND o.kind IN (1, 2))`,
	} {
		if found := b.lines(t, sql); len(found) > 0 {
			t.Errorf("%d %s, for example %s", len(found), what, found[0])
		}
	}
}

// short is an enum's value without the prefix of its type.
func short(e fmt.Stringer) string {
	text := e.String()
	for _, prefix := range []string{
		"OUTCOME_", "MATCHED_BY_", "REJECTION_REASON_", "INVOICE_STATE_", "ENTITLEMENT_STATE_", "OPERATION_KIND_", "ABSENCE_REASON_", "ENTRY_KIND_",
	} {
		if rest, ok := strings.CutPrefix(text, prefix); ok {
			return rest
		}
	}
	return text
}
