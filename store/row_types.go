package store

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// record appends one value of a row type in PostgreSQL's binary form: the number of columns, then for each its type's OID, its length and
// its bytes. The columns must come in the order of the type.
type record struct {
	buf []byte
}

func newRecord(buf []byte, columns int) *record {
	return &record{binary.BigEndian.AppendUint32(buf, uint32(columns))}
}

func (r *record) null(oid uint32) {
	r.buf = binary.BigEndian.AppendUint32(r.buf, oid)
	r.buf = append(r.buf, 0xff, 0xff, 0xff, 0xff)
}

func (r *record) head(oid uint32, length int) {
	r.buf = binary.BigEndian.AppendUint32(r.buf, oid)
	r.buf = binary.BigEndian.AppendUint32(r.buf, uint32(length))
}

func (r *record) text(s string) {
	r.head(pgtype.TextOID, len(s))
	r.buf = append(r.buf, s...)
}

// optionalText writes NULL for the empty text.
func (r *record) optionalText(s string) {
	if s == "" {
		r.null(pgtype.TextOID)
		return
	}
	r.text(s)
}

func (r *record) smallint(n int16) {
	r.head(pgtype.Int2OID, 2)
	r.buf = binary.BigEndian.AppendUint16(r.buf, uint16(n))
}

// optionalInteger writes NULL for zero.
func (r *record) optionalInteger(n int32) {
	if n == 0 {
		r.null(pgtype.Int4OID)
		return
	}
	r.head(pgtype.Int4OID, 4)
	r.buf = binary.BigEndian.AppendUint32(r.buf, uint32(n))
}

// optionalTrue writes NULL for false.
func (r *record) optionalTrue(b bool) {
	if !b {
		r.null(pgtype.BoolOID)
		return
	}
	r.head(pgtype.BoolOID, 1)
	r.buf = append(r.buf, 1)
}

func (r *record) bigint(n int64) { r.eightBytes(pgtype.Int8OID, n) }

func (r *record) eightBytes(oid uint32, n int64) {
	r.head(oid, 8)
	r.buf = binary.BigEndian.AppendUint64(r.buf, uint64(n))
}

func (r *record) bytes(b []byte) {
	r.head(pgtype.ByteaOID, len(b))
	r.buf = append(r.buf, b...)
}

// optionalID writes NULL for an id of zeros.
func (r *record) optionalID(id []byte) {
	if isZero(id) {
		r.null(pgtype.ByteaOID)
		return
	}
	r.bytes(id)
}

// isZero says that an id is all zeros, which is none.
func isZero(id []byte) bool {
	for _, b := range id {
		if b != 0 {
			return false
		}
	}
	return true
}

func (r *record) uuid(id [16]byte) {
	r.head(pgtype.UUIDOID, 16)
	r.buf = append(r.buf, id[:]...)
}

func (r *record) time(t time.Time) {
	r.eightBytes(pgtype.TimestamptzOID, t.UnixMicro()-postgresEpoch)
}

func (r *record) optionalTime(t *time.Time) {
	if t == nil {
		r.null(pgtype.TimestamptzOID)
		return
	}
	r.time(*t)
}

// jsonb writes JSON text, behind the version of the type's binary form.
func (r *record) jsonb(text string) {
	r.head(pgtype.JSONBOID, 1+len(text))
	r.buf = append(append(r.buf, 1), text...)
}

// optionalTexts writes an array, or NULL for none.
func (r *record) optionalTexts(texts []string) {
	if len(texts) == 0 {
		r.null(pgtype.TextArrayOID)
		return
	}
	length := 5 * 4
	for _, s := range texts {
		length += 4 + len(s)
	}
	r.head(pgtype.TextArrayOID, length)
	for _, n := range []int{1, 0, pgtype.TextOID, len(texts), 1} {
		r.buf = binary.BigEndian.AppendUint32(r.buf, uint32(n))
	}
	for _, s := range texts {
		r.buf = binary.BigEndian.AppendUint32(r.buf, uint32(len(s)))
		r.buf = append(r.buf, s...)
	}
}

// rowType lets a session send a []T as an array of a row type.
type rowType struct {
	name     string
	register func(m *pgtype.Map, arrayOID, rowOID uint32)
}

func rowTypeOf[T any](name string, put func(buf []byte, v T) []byte) rowType {
	return rowType{name, func(m *pgtype.Map, arrayOID, rowOID uint32) {
		element := &pgtype.Type{Name: name, OID: rowOID, Codec: &pgtype.CompositeCodec{}}
		m.RegisterType(&pgtype.Type{
			Name: "_" + name, OID: arrayOID,
			Codec: arrayCodec[T]{
				ArrayCodec: &pgtype.ArrayCodec{ElementType: element}, elementOID: rowOID,
				put: func(buf []byte, v T) ([]byte, bool) { return put(buf, v), false },
			},
		})
	}}
}

const rowTypeSQL = `SELECT oid, typarray FROM pg_type WHERE typnamespace = 'grantd'::regnamespace AND typname = $1`

func registerRowTypes(ctx context.Context, conn *pgx.Conn) error {
	for _, t := range rowTypes {
		var row, array uint32
		if err := conn.QueryRow(ctx, rowTypeSQL, t.name).Scan(&row, &array); err != nil {
			return fmt.Errorf("row type %s: %w", t.name, err)
		}
		t.register(conn.TypeMap(), array, row)
	}
	return nil
}

// rowTypes are those of migrations/0006_row_types.sql, 0007_attempt_links.sql and 0009_settled_deliveries.sql; each put follows its type
// column by column.
var rowTypes = []rowType{
	rowTypeOf("command_row", putCommand),
	rowTypeOf("invoice_row", putInvoice),
	rowTypeOf("operation_row_2", putOperation),
	rowTypeOf("entitlement_row", putEntitlement),
	rowTypeOf("entry_row", putEntry),
	rowTypeOf("attempt_row_2", putAttempt),
	rowTypeOf("delivery_row", putDelivery),
}

func putCommand(buf []byte, p *pending) []byte {
	c := &p.command
	b := c.businessKey()
	r := newRecord(buf, 6)
	r.text(c.TenantID)
	r.text(c.IdempotencyKey)
	r.smallint(int16(c.Kind))
	r.text(b.InvoiceID)
	r.text(b.EntitlementType)
	r.bigint(b.OperationVersion)
	return r.buf
}

// putInvoice takes the command that brings the evidence. Placeholders stand for what it does not bring: they must pass the table's checks,
// which come before the conflict, and move nothing.
func putInvoice(buf []byte, p *pending) []byte {
	c := &p.command
	b, evidence := c.businessKey(), c.evidence()
	r := newRecord(buf, 7)
	r.text(c.TenantID)
	r.text(b.InvoiceID)
	r.smallint(int16(evidence.State))
	r.bigint(evidence.Version)
	r.text(c.IdempotencyKey)
	r.text(b.EntitlementType)
	r.bigint(b.OperationVersion)
	return r.buf
}

func putOperation(buf []byte, op *Operation) []byte {
	r := newRecord(buf, 21)
	r.text(op.TenantID)
	r.text(op.IdempotencyKey)
	r.smallint(int16(op.Kind))
	r.optionalText(op.OwnerKey)
	r.bytes(op.Fingerprint[:])
	r.smallint(op.Recipe)
	r.text(op.InvoiceID)
	if op.EntryNumber == 0 {
		r.null(pgtype.UUIDOID)
		r.null(pgtype.Int8OID)
	} else {
		r.uuid(op.EntitlementID)
		r.bigint(op.EntryNumber)
	}
	if op.Invoice.State == noState {
		r.null(pgtype.Int2OID)
		r.null(pgtype.Int8OID)
	} else {
		r.smallint(int16(op.Invoice.State))
		r.bigint(op.Invoice.Version)
	}
	r.optionalText(op.Actor)
	r.optionalText(op.Reason)
	r.uuid(op.AttemptID)
	r.origin(&op.Origin)
	r.time(op.AppliedAt)
	r.optionalTrue(op.Origin.Sampled)
	return r.buf
}

func (r *record) origin(o *Origin) {
	r.text(o.EventID)
	r.text(o.Source)
	r.text(o.Caller)
	r.optionalID(o.TraceID[:])
	r.optionalID(o.SpanID[:])
}

func putEntitlement(buf []byte, e *Entitlement) []byte {
	g := &e.Grant
	r := newRecord(buf, 14)
	r.text(g.TenantID)
	r.uuid(e.ID)
	r.text(g.InvoiceID)
	r.text(g.EntitlementType)
	r.bigint(g.OperationVersion)
	r.jsonb(scopeJSON(g.Scope))
	if g.Quantity == nil {
		r.null(pgtype.Int8OID)
	} else {
		r.bigint(*g.Quantity)
	}
	r.optionalTime(g.StartsAt)
	r.optionalTime(g.ExpiresAt)
	r.bytes(e.Fingerprint[:])
	r.smallint(e.Recipe)
	r.text(e.OperationKey)
	r.time(e.GrantedAt)
	r.optionalTime(e.EndsAt)
	return r.buf
}

func putEntry(buf []byte, n *Entry) []byte {
	r := newRecord(buf, 9)
	r.text(n.TenantID)
	r.uuid(n.EntitlementID)
	r.bigint(n.Number)
	r.smallint(int16(n.Kind))
	r.text(n.OperationKey)
	r.bigint(n.InvoiceVersion)
	r.text(n.Actor)
	r.text(n.Reason)
	r.time(n.At)
	return r.buf
}

func putAttempt(buf []byte, a *Attempt) []byte {
	r := newRecord(buf, 19)
	r.text(a.TenantID)
	r.time(a.At)
	r.uuid(a.ID)
	r.text(a.IdempotencyKey)
	r.smallint(int16(a.Kind))
	r.smallint(int16(a.Outcome))
	r.smallint(int16(a.MatchedBy))
	r.smallint(int16(a.Reason))
	r.optionalTexts(a.DifferingFields)
	r.text(a.InvoiceID)
	r.text(a.EntitlementType)
	r.bigint(a.OperationVersion)
	r.origin(&a.Origin)
	r.optionalID(a.WinnerTraceID[:])
	r.optionalInteger(a.PreviousTries)
	return r.buf
}

func putDelivery(buf []byte, d *newDelivery) []byte {
	n, id := d.entry, deliveryID(d.key)
	r := newRecord(buf, 16)
	r.text(n.TenantID)
	r.uuid(n.EntitlementID)
	r.bigint(n.Number)
	r.text(d.destination)
	r.uuid(id)
	r.time(d.at)
	r.time(d.at)
	r.bytes(d.key[:])
	r.smallint(int16(n.Kind))
	r.text(n.OperationKey)
	r.text(d.origin.EventID)
	r.optionalID(d.origin.TraceID[:])
	r.optionalID(d.origin.SpanID[:])
	r.optionalTrue(d.origin.Sampled)
	r.text(d.contentType)
	if d.body == nil {
		r.null(pgtype.ByteaOID)
	} else {
		r.bytes(d.body)
	}
	return r.buf
}
