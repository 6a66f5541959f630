package store

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Notify names who is to be told of what a command appends. It stands outside the payload: the first request that does something
// wins.
type Notify struct {
	// Recipient is an e-mail address of 3 to 254 bytes, compared as bytes.
	Recipient string
	// Locale is a BCP 47 tag of 2 to 35 characters.
	Locale string
}

// Notification is the lasting fact that somebody was to be told of an entry and, beside it, that they were.
//
// There is one for each tenant, recipient, template and business event, by the primary key. The business event is the entry: what
// the delivery key is made of, without the destination. (An entitlement's id stands for its business key, since the two are bound to
// each other for ever.) So neither a second event for the same grant, nor a second destination with the same template, nor a redelivery
// makes another; but each of three entitlements that one refund takes back has its own.
type Notification struct {
	EntitlementID uuid.UUID
	EntryNumber   int64
	Template      string
	Notify        Notify
	Destination   string
	RequestedAt   time.Time
	// SentAt is nil as long as nobody knows that the mail was sent.
	SentAt *time.Time
}

// insertNotificationsSQL has no ON CONFLICT, as the other inserts of the writer have none: an entry that is new has no notification.
const insertNotificationsSQL = `
INSERT INTO notifications (tenant_id, entitlement_id, entry_number, template, recipient, locale, destination, requested_at)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::timestamptz[])`

type notificationColumns struct {
	tenant, template, recipient, locale, destination []string
	entitlement                                      [][16]byte
	number                                           []int64
	requestedAt                                      []*time.Time
}

func (c *notificationColumns) of(rows []*newDelivery) []any {
	slices.SortFunc(rows, func(a, b *newDelivery) int {
		return cmp.Or(strings.Compare(a.entry.TenantID, b.entry.TenantID),
			bytes.Compare(a.entry.EntitlementID[:], b.entry.EntitlementID[:]), cmp.Compare(a.entry.Number, b.entry.Number),
			strings.Compare(a.template, b.template), strings.Compare(a.notify.Recipient, b.notify.Recipient))
	})
	column(&c.tenant, rows, func(r *newDelivery) string { return r.entry.TenantID })
	column(&c.entitlement, rows, func(r *newDelivery) [16]byte { return r.entry.EntitlementID })
	column(&c.number, rows, func(r *newDelivery) int64 { return r.entry.Number })
	column(&c.template, rows, func(r *newDelivery) string { return r.template })
	column(&c.recipient, rows, func(r *newDelivery) string { return r.notify.Recipient })
	column(&c.locale, rows, func(r *newDelivery) string { return r.notify.Locale })
	column(&c.destination, rows, func(r *newDelivery) string { return r.destination })
	column(&c.requestedAt, rows, func(r *newDelivery) *time.Time { return &r.at })
	return []any{c.tenant, c.entitlement, c.number, c.template, c.recipient, c.locale, c.destination, c.requestedAt}
}

// recordSentSQL keeps the first time at which somebody is known to have been told.
const recordSentSQL = `
INSERT INTO notifications_sent (tenant_id, entitlement_id, entry_number, template, recipient, sent_at)
SELECT *, clock_timestamp() FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::text[], $5::text[])
    ON CONFLICT DO NOTHING`

// queueSent appends the statement that records the recipients of these deliveries, in their order, as told.
func queueSent(b *pgx.Batch, told []*Delivery) {
	var k deliveryKeys
	var templates, recipients []string
	for _, d := range told {
		k.addDelivery(d)
		templates, recipients = append(templates, d.Template), append(recipients, d.Notify.Recipient)
	}
	b.Queue(recordSentSQL, k.tenant, k.entitlement, k.number, templates, recipients)
}

// notificationsOfSQL reads those of some entries of a tenant.
const notificationsOfSQL = `
SELECT m.entitlement_id, m.entry_number, m.template, m.recipient, m.locale, m.destination, m.requested_at, x.sent_at
  FROM unnest($2::uuid[], $3::bigint[]) AS c (entitlement_id, entry_number)
  JOIN notifications m ON m.tenant_id = $1 AND m.entitlement_id = c.entitlement_id AND m.entry_number = c.entry_number
  LEFT JOIN notifications_sent x ON x.tenant_id = $1 AND x.entitlement_id = m.entitlement_id
        AND x.entry_number = m.entry_number AND x.template = m.template AND x.recipient = m.recipient
 ORDER BY m.entitlement_id DESC, m.entry_number DESC, m.template DESC, m.recipient DESC LIMIT $4`

func (s *Store) notificationsOf(ctx context.Context, tenant string, entries []Entry) ([]Notification, error) {
	k := entryKeys(entries)
	rows, err := s.reads.Query(ctx, notificationsOfSQL, tenant, k.entitlement, k.number, storyLimit+1)
	if err != nil {
		return nil, readFailure(err)
	}
	var all []Notification
	var id pgtype.UUID
	var n Notification
	if _, err := pgx.ForEachRow(rows, []any{&id, &n.EntryNumber, &n.Template, &n.Notify.Recipient, &n.Notify.Locale, &n.Destination,
		&n.RequestedAt, &n.SentAt}, func() error {
		n.EntitlementID = id.Bytes
		all = append(all, n)
		return nil
	}); err != nil {
		return nil, readFailure(err)
	}
	slices.Reverse(all)
	return all, nil
}
