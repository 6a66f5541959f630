package store

import (
	"encoding/hex"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	// heldBySQL is the lowest earlier entry that is not settled at the destination of d. An earlier entry commits before a later one,
	// and its delivery with it; one that is settled stays so; so what is not found here never holds d back again.
	heldBySQL = `
       COALESCE((SELECT p.entry_number FROM deliveries p
                  WHERE p.tenant_id = d.tenant_id AND p.entitlement_id = d.entitlement_id AND p.entry_number < d.entry_number
                    AND p.destination = d.destination
                  ORDER BY p.entry_number LIMIT 1), 0)`

	// deliveryColumnsSQL are those of all_deliveries. What is claimed is read from deliveries alone, with its body.
	deliveryColumnsSQL = ownColumnsSQL + `
       d.leased_until, d.last_error, d.settled_at, d.body_bytes, NULL::bytea,` + notifyColumnsSQL + heldBySQL + `,` + eventColumnsSQL
	ownColumnsSQL = `
       d.tenant_id, d.delivery_id, d.destination, d.state, d.attempts, d.poison, d.due_at, d.lease, d.created_at, d.content_type,`
	bodyColumnsSQL = `
       d.leased_until, d.last_error, NULL::timestamptz, NULL::bigint, d.body,`
	notifyColumnsSQL = `
       COALESCE(m.template, ''), COALESCE(m.recipient, ''), COALESCE(m.locale, ''), x.sent_at,`
	eventColumnsSQL = operationColumnsSQL + `,
       e.entitlement_id, e.invoice_id, e.entitlement_type, e.operation_version, e.scope, e.quantity, e.starts_at, e.expires_at,
       e.fingerprint, e.recipe, e.operation_key, e.granted_at, e.ends_at, e.state, e.version, e.changed_at,
       n.entry_number, n.kind, n.operation_key, n.invoice_version, n.actor, n.reason, n.at`

	// deliveryJoins follow a source of deliveries d. All of it is there; LEFT says that deliveries come first, and each of the others is
	// then a probe for a whole key.
	deliveryJoins = eventJoins + notifyJoins
	eventJoins    = `
  LEFT JOIN entitlements e ON e.tenant_id = d.tenant_id AND e.entitlement_id = d.entitlement_id
  LEFT JOIN entries n ON n.tenant_id = d.tenant_id AND n.entitlement_id = d.entitlement_id AND n.entry_number = d.entry_number
  LEFT JOIN operations w ON w.tenant_id = n.tenant_id AND w.idempotency_key = n.operation_key`
	notifyJoins = `
  LEFT JOIN notifications m ON m.tenant_id = d.tenant_id AND m.entitlement_id = d.entitlement_id
        AND m.entry_number = d.entry_number AND m.destination = d.destination
  LEFT JOIN notifications_sent x ON x.tenant_id = m.tenant_id AND x.entitlement_id = m.entitlement_id
        AND x.entry_number = m.entry_number AND x.template = m.template AND x.recipient = m.recipient`
)

// deliveryRow receives one row of deliveryColumnsSQL.
type deliveryRow struct {
	Delivery
	id, token   pgtype.UUID
	state       int16
	notify      Notify
	sentAt      *time.Time
	bodyBytes   *int64
	operation   operationRow
	entitlement entitlementRow
	entry       entryRow
}

func (r *deliveryRow) destinations() []any {
	dest := []any{&r.TenantID, &r.id, &r.Destination, &r.state, &r.Attempts, &r.Poison, &r.NextAttemptAt, &r.token, &r.CreatedAt, &r.ContentType,
		&r.LeaseUntil, &r.LastError, &r.SettledAt, &r.bodyBytes, &r.Body,
		&r.Template, &r.notify.Recipient, &r.notify.Locale, &r.sentAt, &r.HeldBy}
	dest = append(dest, r.operation.destinations()...)
	dest = append(dest, r.entitlement.destinations()...)
	return append(dest, r.entry.destinations()...)
}

func (r *deliveryRow) delivery() *Delivery {
	d := r.Delivery
	d.ID, d.LeaseToken = r.id.Bytes, r.token.Bytes
	d.State, d.BodyBytes = entitlementv1.DeliveryState(r.state), int64(len(r.Body))
	if r.bodyBytes != nil {
		d.BodyBytes = *r.bodyBytes
	}
	if r.Template != "" {
		d.Notify = &r.notify
	}
	e := r.entitlement.entitlement(d.TenantID)
	n := r.entry.entry(d.TenantID, e.ID)
	d.Event = &Event{Entry: *n, Entitlement: *e.asOf(n), Operation: *r.operation.operation(d.TenantID)}
	key := deliveryKey(d.TenantID, e.Grant.BusinessKey(), n.Number, d.Destination)
	d.Key = hex.EncodeToString(key[:])
	return &d
}

func scanDeliveries(rows pgx.Rows) ([]*Delivery, error) {
	defer rows.Close()
	var all []*Delivery
	for rows.Next() {
		var r deliveryRow
		if err := rows.Scan(r.destinations()...); err != nil {
			return nil, err
		}
		all = append(all, r.delivery())
	}
	return all, rows.Err()
}

// deliveryKeys name deliveries of one destination, as columns.
type deliveryKeys struct {
	tenant      []string
	entitlement [][16]byte
	number      []int64
}

func (k *deliveryKeys) add(tenant string, entitlement [16]byte, number int64) {
	k.tenant = append(k.tenant, tenant)
	k.entitlement = append(k.entitlement, entitlement)
	k.number = append(k.number, number)
}

func (k *deliveryKeys) addDelivery(d *Delivery) {
	k.add(d.TenantID, d.Event.Entry.EntitlementID, d.Event.Entry.Number)
}

// textLimit is how much of what a destination said is kept.
const textLimit = 1 << 10

// clipped is what may stand in a text column: a destination's words must not be what a statement fails for.
func clipped(text string) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) > textLimit {
		text = strings.ToValidUTF8(text[:textLimit], "")
	}
	return text
}

func nullUUID(id uuid.UUID) pgtype.UUID {
	return pgtype.UUID{Bytes: id, Valid: id != uuid.Nil}
}
