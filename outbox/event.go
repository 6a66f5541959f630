package outbox

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// eventMediaType is that of one CloudEvent in structured mode.
const eventMediaType = "application/cloudevents+json"

// eventBytes is what most events have less than, so that room for them is made once.
const eventBytes = 1280

// renderEvent makes the CloudEvent of a ledger entry:
//
//   - id is `<entitlement id>/<entry number>`, and source `/grantd/tenants/<tenant>`: the same for every destination;
//   - type is entitlement.granted, entitlement.reversed or entitlement.reinstated, subject the entitlement type, time the entry's;
//   - deliverykey is the delivery's key, idempotencykey that of the operation behind the entry, tenantid the tenant, and
//     sequence the entry's number in 19 digits, so that versions order as text too;
//   - data holds `entry` and `entitlement` as of it, in the JSON of the contract's messages: int64 as text.
//
// Who asked for a reversal, and the reason given, stay at home: they are written by people, about people.
//
// It is written out member by member because every grant waits for it: the CloudEvents SDK and protojson take ten times as long. Tests hold
// it to what they make.
func renderEvent(d *store.Delivery) (body []byte, contentType string, err error) {
	entry, entitlement := &d.Event.Entry, &d.Event.Entitlement
	g := &entitlement.Grant
	entryID, number := entry.EntitlementID.String(), strconv.FormatInt(entry.Number, 10)

	w := jsonWriter{b: make([]byte, 0, eventBytes)}
	w.open("")
	w.text("specversion", "1.0")
	w.text("id", entryID+"/"+number)
	w.text("source", "/grantd/tenants/"+url.PathEscape(entry.TenantID))
	w.text("type", "entitlement."+strings.ToLower(plainEvent(entry.Kind)))
	w.text("subject", g.EntitlementType)
	w.text("datacontenttype", "application/json")
	w.time("time", &entry.At)

	w.open("data")
	w.open("entry")
	w.text("entitlementId", entryID)
	w.int64("entryNumber", entry.Number)
	w.enum("kind", int32(entry.Kind), entitlementv1.EntryKind_name)
	w.text("idempotencyKey", entry.OperationKey)
	w.int64("invoiceVersion", entry.InvoiceVersion)
	w.time("at", &entry.At)
	w.close()

	w.open("entitlement")
	w.text("entitlementId", entitlement.ID.String())
	w.open("grant")
	w.text("tenantId", g.TenantID)
	w.text("invoiceId", g.InvoiceID)
	w.text("entitlementType", g.EntitlementType)
	w.int64("operationVersion", g.OperationVersion)
	w.texts("scope", g.Scope)
	if g.Quantity != nil {
		w.member("quantity")
		w.string(strconv.FormatInt(*g.Quantity, 10))
	}
	w.time("startsAt", g.StartsAt)
	w.time("expiresAt", g.ExpiresAt)
	w.close()
	w.text("grantedByKey", entitlement.OperationKey)
	w.time("grantedAt", &entitlement.GrantedAt)
	w.enum("state", int32(entitlement.State), entitlementv1.EntitlementState_name)
	w.int64("version", entitlement.Version)
	w.time("changedAt", &entitlement.ChangedAt)
	w.time("endsAt", entitlement.EndsAt)
	w.close()
	w.close()

	// Names of extensions may hold lower-case letters and digits only.
	w.text("deliverykey", d.Key)
	w.text("idempotencykey", entry.OperationKey)
	w.text("sequence", fmt.Sprintf("%019d", entry.Number))
	w.text("tenantid", entry.TenantID)
	w.close()
	if body, err = w.bytes(); err != nil {
		return nil, "", fmt.Errorf("the event: %w", err)
	}
	return body, eventMediaType, nil
}
