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
	if err == nil && len(body) > 0 {
		r.body, r.contentType = body, contentType
	}
}

// insertDeliveriesSQL makes deliveries that are due at once. What an earlier entry holds back is found out by the claim, so that no
// grant pays for a look at it.
const insertDeliveriesSQL = `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at,
       delivery_key, kind, operation_key, event_id, trace_id, span_id, trace_sampled, content_type, body)
SELECT * FROM unnest($1::delivery_row[])`

func byDelivery(a, b *newDelivery) int {
	return cmp.Or(strings.Compare(a.entry.TenantID, b.entry.TenantID),
		bytes.Compare(a.entry.EntitlementID[:], b.entry.EntitlementID[:]), cmp.Compare(a.entry.Number, b.entry.Number),
		strings.Compare(a.destination, b.destination))
}
