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

	turnColumns   turnColumns
	notifyColumns notificationColumns
}

func (o *output) reset() {
	empty(&o.operations)
	empty(&o.granted)
	empty(&o.turned)
	empty(&o.entries)
	empty(&o.attempts)
	empty(&o.deliveries)
	empty(&o.notifications)
	clear(o.turnColumns.changedAt)
	clear(o.notifyColumns.requestedAt)
}

// keptRows bounds what is kept for the next batch: one large refund must not hold its memory for ever.
const keptRows = 4096

// empty keeps the slice's room, but not what its elements point to.
func empty[R any](rows *[]R) {
	clear(*rows)
	*rows = (*rows)[:0]
	if cap(*rows) > keptRows {
		*rows = nil
	}
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
		PreviousTries: c.PreviousTries,
	}
	if w := a.Winner(); w != nil {
		row.WinnerTraceID = w.Origin.TraceID
	}
	if a.Rejection != nil {
		row.Reason = a.Rejection.Reason
	}
	o.attempts = append(o.attempts, row)
}

// queue appends the statements in their fixed order; those without rows are left out.
func (o *output) queue(b *pgx.Batch) {
	if len(o.operations) > 0 {
		slices.SortFunc(o.operations, byOperationKey)
		b.Queue(insertOperationsSQL, o.operations)
	}
	if len(o.granted) > 0 {
		slices.SortFunc(o.granted, byBusinessRule)
		b.Queue(insertEntitlementsSQL, o.granted)
	}
	if len(o.turned) > 0 {
		b.Queue(turnEntitlementsSQL, o.turnColumns.of(o.turned)...)
	}
	if len(o.entries) > 0 {
		slices.SortFunc(o.entries, byEntry)
		b.Queue(insertEntriesSQL, o.entries)
	}
	if len(o.notifications) > 0 {
		b.Queue(insertNotificationsSQL, o.notifyColumns.of(o.notifications)...)
	}
	if len(o.deliveries) > 0 {
		slices.SortFunc(o.deliveries, byDelivery)
		b.Queue(insertDeliveriesSQL, o.deliveries)
	}
	if len(o.attempts) > 0 {
		slices.SortFunc(o.attempts, byAttempt)
		b.Queue(insertAttemptsSQL, o.attempts)
	}
}

// There is no ON CONFLICT in the inserts: what the facts said was free is taken only if a race was lost, and then the
// violation stops the transaction, and with it the COMMIT behind it.

const insertOperationsSQL = `
INSERT INTO operations (tenant_id, idempotency_key, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
       invoice_state, invoice_version, actor, reason, attempt_id, event_id, source, caller, trace_id, span_id, applied_at,
       trace_sampled)
SELECT * FROM unnest($1::operation_row_2[])`

func byOperationKey(a, b *Operation) int {
	return cmp.Or(strings.Compare(a.TenantID, b.TenantID), strings.Compare(a.IdempotencyKey, b.IdempotencyKey))
}

const insertEntitlementsSQL = `
INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity,
       starts_at, expires_at, fingerprint, recipe, operation_key, granted_at, ends_at, state, version, changed_at)
SELECT *, 1, 1, granted_at FROM unnest($1::entitlement_row[])`

// byBusinessRule is the order of the constraint that two transactions may meet in; ids are new.
func byBusinessRule(a, b *Entitlement) int {
	return cmp.Or(strings.Compare(a.Grant.TenantID, b.Grant.TenantID), strings.Compare(a.Grant.InvoiceID, b.Grant.InvoiceID),
		strings.Compare(a.Grant.EntitlementType, b.Grant.EntitlementType),
		cmp.Compare(a.Grant.OperationVersion, b.Grant.OperationVersion))
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
SELECT * FROM unnest($1::entry_row[])`

func byEntry(a, b *Entry) int {
	return cmp.Or(strings.Compare(a.TenantID, b.TenantID), bytes.Compare(a.EntitlementID[:], b.EntitlementID[:]))
}

const insertAttemptsSQL = `
INSERT INTO attempts (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, differing_fields,
       invoice_id, entitlement_type, operation_version, event_id, source, caller, trace_id, span_id, winner_trace_id, previous_tries)
SELECT * FROM unnest($1::attempt_row_2[])`

func byAttempt(a, b *Attempt) int {
	return cmp.Or(strings.Compare(a.TenantID, b.TenantID), bytes.Compare(a.ID[:], b.ID[:]))
}

// column fills the column with one value for each row.
func column[R, V any](c *[]V, rows []R, value func(R) V) {
	*c = (*c)[:0]
	for _, r := range rows {
		*c = append(*c, value(r))
	}
}
