package outbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// eventMediaType is that of one CloudEvent in structured mode.
const eventMediaType = event.ApplicationCloudEventsJSON

// Extensions of the CloudEvent, whose names may hold lower-case letters and digits only.
const (
	extensionDeliveryKey    = "deliverykey"
	extensionIdempotencyKey = "idempotencykey"
	extensionTenant         = "tenantid"
	extensionSequence       = "sequence"
)

// eventBytes is what most events have less than, so that room for them is made once.
const eventBytes = 1 << 10

// renderEvent makes the CloudEvent of a ledger entry:
//
//   - id is `<entitlement id>/<entry number>`, and source `/grantd/tenants/<tenant>`: the same for every destination;
//   - type is entitlement.granted, entitlement.reversed or entitlement.reinstated, subject the entitlement type, time the entry's;
//   - deliverykey is the delivery's key, idempotencykey that of the operation behind the entry, tenantid the tenant, and
//     sequence the entry's number in 19 digits, so that versions order as text too;
//   - data holds `entry` and `entitlement` as of it, in the JSON of the contract's messages: int64 as text.
//
// Who asked for a reversal, and the reason given, stay at home: they are written by people, about people.
func renderEvent(d *store.Delivery) (body []byte, contentType string, err error) {
	entry, entitlement := &d.Event.Entry, &d.Event.Entitlement
	data, err := eventData(entry, entitlement)
	if err != nil {
		return nil, "", err
	}
	e := event.New()
	e.SetID(fmt.Sprintf("%s/%d", entry.EntitlementID, entry.Number))
	e.SetSource("/grantd/tenants/" + url.PathEscape(entry.TenantID))
	e.SetType("entitlement." + strings.ToLower(plainEvent(entry.Kind)))
	e.SetSubject(entitlement.Grant.EntitlementType)
	e.SetTime(entry.At)
	e.SetExtension(extensionDeliveryKey, d.Key)
	e.SetExtension(extensionIdempotencyKey, entry.OperationKey)
	e.SetExtension(extensionTenant, entry.TenantID)
	e.SetExtension(extensionSequence, fmt.Sprintf("%019d", entry.Number))
	// SetData would have it parsed and written once more.
	e.SetDataContentType(event.ApplicationJSON)
	e.DataEncoded = data
	if err := e.Validate(); err != nil {
		return nil, "", fmt.Errorf("the event: %w", err)
	}
	b := bytes.NewBuffer(make([]byte, 0, len(data)+eventBytes))
	if err := event.WriteJson(&e, b); err != nil {
		return nil, "", fmt.Errorf("the event: %w", err)
	}
	return b.Bytes(), eventMediaType, nil
}

func eventData(entry *store.Entry, entitlement *store.Entitlement) (json.RawMessage, error) {
	g := &entitlement.Grant
	parts := []struct {
		name    string
		message proto.Message
	}{
		{"entry", &entitlementv1.Entry{
			EntitlementId: entry.EntitlementID.String(), EntryNumber: entry.Number, Kind: entry.Kind, IdempotencyKey: entry.OperationKey,
			InvoiceVersion: entry.InvoiceVersion, At: timestamppb.New(entry.At),
		}},
		{"entitlement", &entitlementv1.Entitlement{
			EntitlementId: entitlement.ID.String(), GrantedByKey: entitlement.OperationKey,
			GrantedAt: timestamppb.New(entitlement.GrantedAt), State: entitlement.State, Version: entitlement.Version,
			ChangedAt: timestamppb.New(entitlement.ChangedAt), EndsAt: timestamp(entitlement.EndsAt),
			Grant: &entitlementv1.Grant{
				TenantId: g.TenantID, InvoiceId: g.InvoiceID, EntitlementType: g.EntitlementType, OperationVersion: g.OperationVersion,
				Scope: g.Scope, Quantity: g.Quantity, StartsAt: timestamp(g.StartsAt), ExpiresAt: timestamp(g.ExpiresAt),
			},
		}},
	}
	raw := make([]byte, 0, eventBytes)
	var err error
	for i, p := range parts {
		raw = append(append(append(raw, "{,"[min(i, 1)], '"'), p.name...), '"', ':')
		if raw, err = (protojson.MarshalOptions{}).MarshalAppend(raw, p.message); err != nil {
			return nil, fmt.Errorf("the event's %s: %w", p.name, err)
		}
	}
	// protojson puts in white space at random, so that nobody relies on its bytes.
	b := bytes.NewBuffer(make([]byte, 0, len(raw)+1))
	if err := json.Compact(b, append(raw, '}')); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func timestamp(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}
