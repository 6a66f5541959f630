package store

import (
	"bytes"
	"cmp"
	"slices"
	"strings"
	"time"
)

// newDelivery is an entry that the transaction appends, bound for a destination.
type newDelivery struct {
	entry       *Entry
	destination string
	id          [16]byte
	// template and notify are set where it sends a mail.
	template string
	notify   *Notify
	at       time.Time
}

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
				entry: n, destination: d.Name, at: now,
				id: deliveryID(deliveryKey(n.TenantID, e.Grant.BusinessKey(), n.Number, d.Name)),
			}
			if d.Template != "" {
				// One mail of a template for each entry, whoever sends it.
				if slices.ContainsFunc(o.notifications[first:], func(other *newDelivery) bool { return other.template == d.Template }) {
					continue
				}
				row.template, row.notify = d.Template, c.Notify
				o.notifications = append(o.notifications, row)
			}
			o.deliveries = append(o.deliveries, row)
		}
	}
}

// insertDeliveriesSQL makes deliveries that are due at once. What an earlier entry holds back is found out by the claim, so that no
// grant pays for a look at it.
const insertDeliveriesSQL = `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at)
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, at, at
  FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::uuid[], $6::timestamptz[])
       AS c (tenant_id, entitlement_id, entry_number, destination, delivery_id, at)`

type deliveryColumns struct {
	tenant, destination []string
	entitlement, id     [][16]byte
	number              []int64
	at                  []*time.Time
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
	column(&c.id, rows, func(r *newDelivery) [16]byte { return r.id })
	column(&c.at, rows, func(r *newDelivery) *time.Time { return &r.at })
	return []any{c.tenant, c.entitlement, c.number, c.destination, c.id, c.at}
}
