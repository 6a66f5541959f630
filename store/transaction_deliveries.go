package store

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"time"
)

// newDelivery is an entry that the transaction appends, bound for a destination.
type newDelivery struct {
	entry       *Entry
	destination string
	key         [sha256.Size]byte
	origin      *Origin
	// body and contentType are empty where the claim is to make them.
	body        []byte
	contentType string
	// template and notify are set where it sends a mail.
	template string
	notify   *Notify
	at       time.Time
}

// renderedEntries is how many entries of one command have their bodies made with them. A refund of a hundred thousand entitlements is one
// transaction, which must hold neither its locks nor their bodies for that long.
const renderedEntries = 100

// addDeliveries binds the entries of a change for the destinations that want them.
func (o *output) addDeliveries(c *Command, ch *change, now time.Time, to []Destination) {
	for i, n := range ch.entries {
		e := ch.granted
		if e == nil {
			e = ch.turned[i]
		}
		first := len(o.notifications)
		for j := range to {
			d := &to[j]
			if !d.wants(n.Kind, e.Grant.EntitlementType, c.Notify) {
				continue
			}
			row := &newDelivery{
				entry: n, destination: d.Name, at: now, origin: &c.Origin,
				key: deliveryKey(n.TenantID, e.Grant.BusinessKey(), n.Number, d.Name),
			}
			if d.Template != "" {
				// One mail of a template for each entry, whoever sends it.
				if slices.ContainsFunc(o.notifications[first:], func(other *newDelivery) bool { return other.template == d.Template }) {
					continue
				}
				row.template, row.notify = d.Template, c.Notify
				o.notifications = append(o.notifications, row)
			}
			if d.Render != nil && len(ch.entries) <= renderedEntries {
				row.render(d, e, c)
			}
			o.deliveries = append(o.deliveries, row)
		}
	}
}

// traced is an id of the origin's trace, nil where it has none.
func traced(o *Origin, id []byte) []byte {
	if o.TraceID == ([16]byte{}) {
		return nil
	}
	return id
}

// render makes the body. Where that fails, the claim will find out why, and no grant must fail for it.
func (r *newDelivery) render(to *Destination, e *Entitlement, c *Command) {
	defer func() {
		if recover() != nil {
			r.body = nil
		}
	}()
	n := r.entry
	body, contentType, err := to.Render(&Delivery{
		TenantID: n.TenantID, ID: deliveryID(r.key), Key: hex.EncodeToString(r.key[:]), Destination: to.Name, State: pendingState, CreatedAt: r.at,
		Event: &Event{
			Entry: *n, Entitlement: *e.asOf(n),
			Operation: Operation{TenantID: n.TenantID, IdempotencyKey: n.OperationKey, Kind: c.Kind, Origin: *r.origin},
		},
	})
	if err == nil {
		r.body, r.contentType = body, contentType
	}
}

// insertDeliveriesSQL makes deliveries that are due at once. What an earlier entry holds back is found out by the claim, so that no
// grant pays for a look at it.
const insertDeliveriesSQL = `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at,
       delivery_key, kind, operation_key, event_id, trace_id, span_id, trace_sampled, content_type, body)
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, at, at,
       delivery_key, kind, operation_key, event_id, NULLIF(trace_id, ''), NULLIF(span_id, ''), trace_sampled, content_type, NULLIF(body, '')
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::uuid[], $6::timestamptz[], $7::bytea[], $8::smallint[], $9::text[],
              $10::text[], $11::bytea[], $12::bytea[], $13::boolean[], $14::text[], $15::bytea[])
       AS c (tenant_id, entitlement_id, entry_number, destination, delivery_id, at, delivery_key, kind, operation_key,
             event_id, trace_id, span_id, trace_sampled, content_type, body)`

type deliveryColumns struct {
	tenant, destination                []string
	entitlement, id                    [][16]byte
	number                             []int64
	at                                 []*time.Time
	key, trace, span, body             [][]byte
	kind                               []int16
	operationKey, eventID, contentType []string
	sampled                            []bool
}

func (c *deliveryColumns) of(rows []*newDelivery) []any {
	slices.SortFunc(rows, func(a, b *newDelivery) int {
		return cmp.Or(strings.Compare(a.entry.TenantID, b.entry.TenantID),
			bytes.Compare(a.entry.EntitlementID[:], b.entry.EntitlementID[:]), cmp.Compare(a.entry.Number, b.entry.Number),
			strings.Compare(a.destination, b.destination))
	})
	column(&c.tenant, rows, func(r *newDelivery) string { return r.entry.TenantID })
	column(&c.entitlement, rows, func(r *newDelivery) [16]byte { return r.entry.EntitlementID })
	column(&c.number, rows, func(r *newDelivery) int64 { return r.entry.Number })
	column(&c.destination, rows, func(r *newDelivery) string { return r.destination })
	column(&c.id, rows, func(r *newDelivery) [16]byte { return deliveryID(r.key) })
	column(&c.at, rows, func(r *newDelivery) *time.Time { return &r.at })
	column(&c.key, rows, func(r *newDelivery) []byte { return r.key[:] })
	column(&c.kind, rows, func(r *newDelivery) int16 { return int16(r.entry.Kind) })
	column(&c.operationKey, rows, func(r *newDelivery) string { return r.entry.OperationKey })
	column(&c.eventID, rows, func(r *newDelivery) string { return r.origin.EventID })
	column(&c.trace, rows, func(r *newDelivery) []byte { return traced(r.origin, r.origin.TraceID[:]) })
	column(&c.span, rows, func(r *newDelivery) []byte { return traced(r.origin, r.origin.SpanID[:]) })
	column(&c.sampled, rows, func(r *newDelivery) bool { return r.origin.Sampled })
	column(&c.contentType, rows, func(r *newDelivery) string { return r.contentType })
	column(&c.body, rows, func(r *newDelivery) []byte { return r.body })
	return []any{c.tenant, c.entitlement, c.number, c.destination, c.id, c.at, c.key, c.kind, c.operationKey, c.eventID, c.trace, c.span,
		c.sampled, c.contentType, c.body}
}
