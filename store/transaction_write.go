package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// output holds the rows that a batch writes. Each table's rows are sent in the order of the table's own unique key,
// bytewise: the order in which every transaction of every replica takes them. It is kept from batch to batch.
type output struct {
	operations []*Operation
	granted    []*Entitlement
	turned     []*Entitlement
	entries    []*Entry
	attempts   []*Attempt
	deliveries []*newDelivery
	// notifications are the deliveries that send a mail.
	notifications []*newDelivery

	operationColumns   operationColumns
	entitlementColumns entitlementColumns
	turnColumns        turnColumns
	entryColumns       entryColumns
	notifyColumns      notificationColumns
	deliveryColumns    deliveryColumns
	attemptColumns     attemptColumns
}

func (o *output) reset() {
	o.operations, o.granted, o.turned = o.operations[:0], o.granted[:0], o.turned[:0]
	o.entries, o.attempts = o.entries[:0], o.attempts[:0]
	o.deliveries, o.notifications = o.deliveries[:0], o.notifications[:0]
}

func (o *output) add(c *Command, a *Answer, ch *change, attempt uuid.UUID, now time.Time, to []Destination) {
	if ch.operation != nil {
		o.operations = append(o.operations, ch.operation)
	}
	if ch.granted != nil {
		o.granted = append(o.granted, ch.granted)
	}
	o.turned = append(o.turned, ch.turned...)
	o.entries = append(o.entries, ch.entries...)
	if len(to) > 0 && len(ch.entries) > 0 {
		o.addDeliveries(c, ch, now, to)
	}

	b := c.businessKey()
	row := &Attempt{
		TenantID: c.TenantID, At: now, ID: attempt, IdempotencyKey: c.IdempotencyKey, Kind: c.Kind,
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, DifferingFields: a.Conflict.fields(),
		InvoiceID: b.InvoiceID, EntitlementType: b.EntitlementType, OperationVersion: b.OperationVersion, Origin: c.Origin,
	}
	if a.Rejection != nil {
		row.Reason = a.Rejection.Reason
	}
	o.attempts = append(o.attempts, row)
}

// queue appends the statements in their fixed order; those without rows are left out.
func (o *output) queue(b *pgx.Batch) {
	if len(o.operations) > 0 {
		b.Queue(insertOperationsSQL, o.operationColumns.of(o.operations)...)
	}
	if len(o.granted) > 0 {
		b.Queue(insertEntitlementsSQL, o.entitlementColumns.of(o.granted)...)
	}
	if len(o.turned) > 0 {
		b.Queue(turnEntitlementsSQL, o.turnColumns.of(o.turned)...)
	}
	if len(o.entries) > 0 {
		b.Queue(insertEntriesSQL, o.entryColumns.of(o.entries)...)
	}
	if len(o.notifications) > 0 {
		b.Queue(insertNotificationsSQL, o.notifyColumns.of(o.notifications)...)
	}
	if len(o.deliveries) > 0 {
		b.Queue(insertDeliveriesSQL, o.deliveryColumns.of(o.deliveries)...)
	}
	if len(o.attempts) > 0 {
		b.Queue(insertAttemptsSQL, o.attemptColumns.of(o.attempts)...)
	}
}

// There is no ON CONFLICT in the inserts: what the facts said was free is taken only if a race was lost, and then the
// violation stops the transaction, and with it the COMMIT behind it.

const insertOperationsSQL = `
INSERT INTO operations (tenant_id, idempotency_key, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       invoice_state, invoice_version, actor, reason, attempt_id, event_id, source, caller, trace_id, span_id, applied_at)
SELECT tenant_id, idempotency_key, kind, NULLIF(owner_key, ''), fingerprint, recipe, invoice_id,
       NULLIF(entitlement_id, '00000000-0000-0000-0000-000000000000'), NULLIF(entry_number, 0),
       NULLIF(invoice_state, 0), CASE kind WHEN 2 THEN invoice_version END, NULLIF(actor, ''), NULLIF(reason, ''),
       attempt_id, event_id, source, caller, NULLIF(trace_id, ''), NULLIF(span_id, ''), applied_at
  FROM unnest($1::text[], $2::text[], $3::smallint[], $4::text[], $5::bytea[], $6::smallint[], $7::text[], $8::uuid[], $9::bigint[],
       $10::smallint[], $11::bigint[], $12::text[], $13::text[], $14::uuid[], $15::text[], $16::text[], $17::text[], $18::bytea[],
       $19::bytea[], $20::timestamptz[])
       AS c (tenant_id, idempotency_key, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       invoice_state, invoice_version, actor, reason, attempt_id, event_id, source, caller, trace_id, span_id, applied_at)`

type operationColumns struct {
	tenant, key, owner, invoice, actor, reason []string
	origin                                     originColumns
	kind, recipe, invoiceState                 []int16
	entryNumber, invoiceVersion                []int64
	fingerprint                                [][]byte
	entitlement, attempt                       [][16]byte
	appliedAt                                  []*time.Time
}

func (c *operationColumns) of(rows []*Operation) []any {
	slices.SortFunc(rows, func(a, b *Operation) int {
		return cmp.Or(strings.Compare(a.TenantID, b.TenantID), strings.Compare(a.IdempotencyKey, b.IdempotencyKey))
	})
	column(&c.tenant, rows, func(r *Operation) string { return r.TenantID })
	column(&c.key, rows, func(r *Operation) string { return r.IdempotencyKey })
	column(&c.kind, rows, func(r *Operation) int16 { return int16(r.Kind) })
	column(&c.owner, rows, func(r *Operation) string { return r.OwnerKey })
	column(&c.fingerprint, rows, func(r *Operation) []byte { return r.Fingerprint[:] })
	column(&c.recipe, rows, func(r *Operation) int16 { return r.Recipe })
	column(&c.invoice, rows, func(r *Operation) string { return r.InvoiceID })
	column(&c.entitlement, rows, func(r *Operation) [16]byte { return r.EntitlementID })
	column(&c.entryNumber, rows, func(r *Operation) int64 { return r.EntryNumber })
	column(&c.invoiceState, rows, func(r *Operation) int16 { return int16(r.Invoice.State) })
	column(&c.invoiceVersion, rows, func(r *Operation) int64 { return r.Invoice.Version })
	column(&c.actor, rows, func(r *Operation) string { return r.Actor })
	column(&c.reason, rows, func(r *Operation) string { return r.Reason })
	column(&c.attempt, rows, func(r *Operation) [16]byte { return r.AttemptID })
	column(&c.appliedAt, rows, func(r *Operation) *time.Time { return &r.AppliedAt })
	fillOrigins(&c.origin, rows, func(r *Operation) *Origin { return &r.Origin })
	return []any{c.tenant, c.key, c.kind, c.owner, c.fingerprint, c.recipe, c.invoice, c.entitlement, c.entryNumber,
		c.invoiceState, c.invoiceVersion, c.actor, c.reason, c.attempt, c.origin.event, c.origin.source, c.origin.caller,
		c.origin.trace, c.origin.span, c.appliedAt}
}

const insertEntitlementsSQL = `
INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity,
       starts_at, expires_at, fingerprint, recipe, operation_key, granted_at, ends_at, state, version, changed_at)
SELECT tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope::jsonb, NULLIF(quantity, 0),
       starts_at, expires_at, fingerprint, recipe, operation_key, granted_at, ends_at, 1, 1, granted_at
  FROM unnest($1::text[], $2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[],
       $8::timestamptz[], $9::timestamptz[], $10::bytea[], $11::smallint[], $12::text[], $13::timestamptz[], $14::timestamptz[])
       AS c (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity,
       starts_at, expires_at, fingerprint, recipe, operation_key, granted_at, ends_at)`

type entitlementColumns struct {
	tenant, invoice, typeName, scope, operationKey []string
	id                                             [][16]byte
	operationVersion, quantity                     []int64
	startsAt, expiresAt, endsAt                    []*time.Time
	fingerprint                                    [][]byte
	recipe                                         []int16
	grantedAt                                      []*time.Time
}

func (c *entitlementColumns) of(rows []*Entitlement) []any {
	slices.SortFunc(rows, func(a, b *Entitlement) int {
		return cmp.Or(strings.Compare(a.Grant.TenantID, b.Grant.TenantID), strings.Compare(a.Grant.InvoiceID, b.Grant.InvoiceID),
			strings.Compare(a.Grant.EntitlementType, b.Grant.EntitlementType),
			cmp.Compare(a.Grant.OperationVersion, b.Grant.OperationVersion))
	})
	column(&c.tenant, rows, func(r *Entitlement) string { return r.Grant.TenantID })
	column(&c.id, rows, func(r *Entitlement) [16]byte { return r.ID })
	column(&c.invoice, rows, func(r *Entitlement) string { return r.Grant.InvoiceID })
	column(&c.typeName, rows, func(r *Entitlement) string { return r.Grant.EntitlementType })
	column(&c.operationVersion, rows, func(r *Entitlement) int64 { return r.Grant.OperationVersion })
	column(&c.scope, rows, func(r *Entitlement) string { return scopeJSON(r.Grant.Scope) })
	column(&c.quantity, rows, func(r *Entitlement) int64 {
		if r.Grant.Quantity == nil {
			return 0
		}
		return *r.Grant.Quantity
	})
	column(&c.startsAt, rows, func(r *Entitlement) *time.Time { return r.Grant.StartsAt })
	column(&c.expiresAt, rows, func(r *Entitlement) *time.Time { return r.Grant.ExpiresAt })
	column(&c.fingerprint, rows, func(r *Entitlement) []byte { return r.Fingerprint[:] })
	column(&c.recipe, rows, func(r *Entitlement) int16 { return r.Recipe })
	column(&c.operationKey, rows, func(r *Entitlement) string { return r.OperationKey })
	column(&c.grantedAt, rows, func(r *Entitlement) *time.Time { return &r.GrantedAt })
	column(&c.endsAt, rows, func(r *Entitlement) *time.Time { return r.EndsAt })
	return []any{c.tenant, c.id, c.invoice, c.typeName, c.operationVersion, c.scope, c.quantity, c.startsAt, c.expiresAt,
		c.fingerprint, c.recipe, c.operationKey, c.grantedAt, c.endsAt}
}

// scopeJSON writes the scope for the jsonb column; it cannot fail, since keys and values are valid UTF-8.
func scopeJSON(scope map[string]string) string {
	if len(scope) == 0 {
		return "{}"
	}
	text, _ := json.Marshal(scope)
	return string(text)
}

// turnEntitlementsSQL follows the last entry with the state that it makes. The version stands in the WHERE clause, and the row
// count speaks.
const turnEntitlementsSQL = `
UPDATE entitlements e
   SET state = c.state, version = c.version, changed_at = c.changed_at
  FROM unnest($1::text[], $2::uuid[], $3::smallint[], $4::bigint[], $5::timestamptz[])
       AS c (tenant_id, entitlement_id, state, version, changed_at)
 WHERE e.tenant_id = c.tenant_id AND e.entitlement_id = c.entitlement_id
   AND e.version = c.version - 1 AND e.state <> c.state`

type turnColumns struct {
	tenant    []string
	id        [][16]byte
	state     []int16
	version   []int64
	changedAt []*time.Time
}

func (c *turnColumns) of(rows []*Entitlement) []any {
	slices.SortFunc(rows, func(a, b *Entitlement) int {
		return cmp.Or(strings.Compare(a.Grant.TenantID, b.Grant.TenantID), bytes.Compare(a.ID[:], b.ID[:]))
	})
	column(&c.tenant, rows, func(r *Entitlement) string { return r.Grant.TenantID })
	column(&c.id, rows, func(r *Entitlement) [16]byte { return r.ID })
	column(&c.state, rows, func(r *Entitlement) int16 { return int16(r.State) })
	column(&c.version, rows, func(r *Entitlement) int64 { return r.Version })
	column(&c.changedAt, rows, func(r *Entitlement) *time.Time { return &r.ChangedAt })
	return []any{c.tenant, c.id, c.state, c.version, c.changedAt}
}

const insertEntriesSQL = `
INSERT INTO entries (tenant_id, entitlement_id, entry_number, kind, operation_key, invoice_version, actor, reason, at)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::smallint[], $5::text[], $6::bigint[], $7::text[], $8::text[],
       $9::timestamptz[])`

type entryColumns struct {
	tenant, operationKey, actor, reason []string
	id                                  [][16]byte
	number, invoiceVersion              []int64
	kind                                []int16
	at                                  []*time.Time
}

func (c *entryColumns) of(rows []*Entry) []any {
	slices.SortFunc(rows, func(a, b *Entry) int {
		return cmp.Or(strings.Compare(a.TenantID, b.TenantID), bytes.Compare(a.EntitlementID[:], b.EntitlementID[:]))
	})
	column(&c.tenant, rows, func(r *Entry) string { return r.TenantID })
	column(&c.id, rows, func(r *Entry) [16]byte { return r.EntitlementID })
	column(&c.number, rows, func(r *Entry) int64 { return r.Number })
	column(&c.kind, rows, func(r *Entry) int16 { return int16(r.Kind) })
	column(&c.operationKey, rows, func(r *Entry) string { return r.OperationKey })
	column(&c.invoiceVersion, rows, func(r *Entry) int64 { return r.InvoiceVersion })
	column(&c.actor, rows, func(r *Entry) string { return r.Actor })
	column(&c.reason, rows, func(r *Entry) string { return r.Reason })
	column(&c.at, rows, func(r *Entry) *time.Time { return &r.At })
	return []any{c.tenant, c.id, c.number, c.kind, c.operationKey, c.invoiceVersion, c.actor, c.reason, c.at}
}

const insertAttemptsSQL = `
INSERT INTO attempts (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, differing_fields,
       invoice_id, entitlement_type, operation_version, event_id, source, caller, trace_id, span_id)
SELECT tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason,
       -- Arrays cannot be nested in one of other lengths; no field path has a line break.
       string_to_array(NULLIF(differing_fields, ''), E'\n'),
       invoice_id, entitlement_type, operation_version, event_id, source, caller, NULLIF(trace_id, ''), NULLIF(span_id, '')
  FROM unnest($1::text[], $2::timestamptz[], $3::uuid[], $4::text[], $5::smallint[], $6::smallint[], $7::smallint[], $8::smallint[],
       $9::text[], $10::text[], $11::text[], $12::bigint[], $13::text[], $14::text[], $15::text[], $16::bytea[], $17::bytea[])
       AS c (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, differing_fields,
       invoice_id, entitlement_type, operation_version, event_id, source, caller, trace_id, span_id)`

type attemptColumns struct {
	tenant, key, fields, invoice, typeName []string
	origin                                 originColumns
	at                                     []*time.Time
	id                                     [][16]byte
	kind, outcome, matchedBy, reason       []int16
	operationVersion                       []int64
}

func (c *attemptColumns) of(rows []*Attempt) []any {
	slices.SortFunc(rows, func(a, b *Attempt) int {
		return cmp.Or(strings.Compare(a.TenantID, b.TenantID), bytes.Compare(a.ID[:], b.ID[:]))
	})
	column(&c.tenant, rows, func(r *Attempt) string { return r.TenantID })
	column(&c.at, rows, func(r *Attempt) *time.Time { return &r.At })
	column(&c.id, rows, func(r *Attempt) [16]byte { return r.ID })
	column(&c.key, rows, func(r *Attempt) string { return r.IdempotencyKey })
	column(&c.kind, rows, func(r *Attempt) int16 { return int16(r.Kind) })
	column(&c.outcome, rows, func(r *Attempt) int16 { return int16(r.Outcome) })
	column(&c.matchedBy, rows, func(r *Attempt) int16 { return int16(r.MatchedBy) })
	column(&c.reason, rows, func(r *Attempt) int16 { return int16(r.Reason) })
	column(&c.fields, rows, func(r *Attempt) string { return strings.Join(r.DifferingFields, "\n") })
	column(&c.invoice, rows, func(r *Attempt) string { return r.InvoiceID })
	column(&c.typeName, rows, func(r *Attempt) string { return r.EntitlementType })
	column(&c.operationVersion, rows, func(r *Attempt) int64 { return r.OperationVersion })
	fillOrigins(&c.origin, rows, func(r *Attempt) *Origin { return &r.Origin })
	return []any{c.tenant, c.at, c.id, c.key, c.kind, c.outcome, c.matchedBy, c.reason, c.fields, c.invoice, c.typeName,
		c.operationVersion, c.origin.event, c.origin.source, c.origin.caller, c.origin.trace, c.origin.span}
}

// originColumns are shared by operations and attempts.
type originColumns struct {
	event, source, caller []string
	trace, span           [][]byte
}

func fillOrigins[R any](c *originColumns, rows []R, origin func(R) *Origin) {
	column(&c.event, rows, func(r R) string { return origin(r).EventID })
	column(&c.source, rows, func(r R) string { return origin(r).Source })
	column(&c.caller, rows, func(r R) string { return origin(r).Caller })
	column(&c.trace, rows, func(r R) []byte { return presentBytes(origin(r).TraceID[:]) })
	column(&c.span, rows, func(r R) []byte { return presentBytes(origin(r).SpanID[:]) })
}

// presentBytes is empty for an id that is all zeros.
func presentBytes(id []byte) []byte {
	for _, b := range id {
		if b != 0 {
			return id
		}
	}
	return id[:0]
}

// column fills the column with one value for each row.
func column[R, V any](c *[]V, rows []R, value func(R) V) {
	*c = (*c)[:0]
	for _, r := range rows {
		*c = append(*c, value(r))
	}
}
