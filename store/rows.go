package store

import (
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// factsRow receives one row of factsColumns.
type factsRow struct {
	known, winner operationRow
	entitlement   entitlementRow
	entry         entryRow
	// invoiceState and invoice are the record's, for the kind that records one.
	invoiceState int16
	invoice      InvoiceVersion
}

func (r *factsRow) destinations() []any {
	dest := make([]any, 0, 64)
	dest = append(dest, r.known.destinations()...)
	dest = append(dest, r.winner.destinations()...)
	dest = append(dest, r.entitlement.destinations()...)
	dest = append(dest, r.entry.destinations()...)
	return append(dest, &r.invoiceState, &r.invoice.Version)
}

func (r *factsRow) fill(f *facts, tenant string) {
	f.known = r.known.operation(tenant)
	f.winner = r.winner.operation(tenant)
	if f.known != nil && f.known.OwnerKey == "" {
		f.winner = f.known
	}
	f.entitlement = r.entitlement.entitlement(tenant)
	if f.entitlement != nil {
		f.entry = r.entry.entry(tenant, f.entitlement.ID)
	}
	if r.invoiceState != 0 {
		f.invoice = InvoiceVersion{entitlementv1.InvoiceState(r.invoiceState), r.invoice.Version}
	}
}

// operationRow receives one row of operations.
type operationRow struct {
	Operation
	kind, invoiceState     int16
	fingerprint            []byte
	entitlementID, attempt pgtype.UUID
	traceID, spanID        []byte
}

func (r *operationRow) destinations() []any {
	return []any{&r.IdempotencyKey, &r.kind, &r.OwnerKey, &r.fingerprint, &r.Recipe, &r.InvoiceID, &r.entitlementID, &r.EntryNumber,
		&r.invoiceState, &r.Invoice.Version, &r.Actor, &r.Reason, &r.attempt, &r.Origin.EventID, &r.Origin.Source,
		&r.Origin.Caller, &r.traceID, &r.spanID, &r.AppliedAt, &r.Origin.Sampled}
}

// operation returns the row, or nil where the join found none.
func (r *operationRow) operation(tenant string) *Operation {
	if r.IdempotencyKey == "" {
		return nil
	}
	op := r.Operation
	op.TenantID = tenant
	op.Kind = entitlementv1.OperationKind(r.kind)
	op.Invoice.State = entitlementv1.InvoiceState(r.invoiceState)
	op.EntitlementID, op.AttemptID = r.entitlementID.Bytes, r.attempt.Bytes
	copy(op.Fingerprint[:], r.fingerprint)
	copy(op.Origin.TraceID[:], r.traceID)
	copy(op.Origin.SpanID[:], r.spanID)
	return &op
}

// entitlementRow receives one row of entitlements.
type entitlementRow struct {
	Entitlement
	id          pgtype.UUID
	scope       map[string]string
	state       int16
	fingerprint []byte
}

func (r *entitlementRow) destinations() []any {
	g := &r.Grant
	return []any{&r.id, &g.InvoiceID, &g.EntitlementType, &g.OperationVersion, &r.scope, &g.Quantity, &g.StartsAt, &g.ExpiresAt,
		&r.fingerprint, &r.Recipe, &r.OperationKey, &r.GrantedAt, &r.EndsAt, &r.state, &r.Version, &r.ChangedAt}
}

// entitlement returns the row, or nil where the join found none.
func (r *entitlementRow) entitlement(tenant string) *Entitlement {
	if !r.id.Valid {
		return nil
	}
	e := r.Entitlement
	e.ID = r.id.Bytes
	e.Grant.TenantID, e.Grant.Scope = tenant, r.scope
	e.State = entitlementv1.EntitlementState(r.state)
	copy(e.Fingerprint[:], r.fingerprint)
	return &e
}

// entryRow receives one row of entries.
type entryRow struct {
	Entry
	kind int16
}

func (r *entryRow) destinations() []any {
	return []any{&r.Number, &r.kind, &r.OperationKey, &r.InvoiceVersion, &r.Actor, &r.Reason, &r.At}
}

// entry returns the row, or nil where the join found none.
func (r *entryRow) entry(tenant string, entitlement uuid.UUID) *Entry {
	if r.Number == 0 {
		return nil
	}
	n := r.Entry
	n.TenantID, n.EntitlementID, n.Kind = tenant, entitlement, entitlementv1.EntryKind(r.kind)
	return &n
}
