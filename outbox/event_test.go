package outbox_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
)

// renderer is what the store has bodies made by.
func renderer(t testing.TB) func(*store.Delivery) ([]byte, string, error) {
	t.Helper()
	all, err := outbox.ParseDestinations("d.yaml", []byte(`
destinations:
- {name: under_test, kind: nats, nats: {servers: ["nats://127.0.0.1:4222"], subject: events}}
`))
	if err != nil {
		t.Fatal(err)
	}
	return outbox.Stored(all)[0].Render
}

// reference is the event as the SDK and protojson have it.
func reference(d *store.Delivery) ([]byte, error) {
	entry, entitlement := &d.Event.Entry, &d.Event.Entitlement
	g := &entitlement.Grant
	timestamp := func(t *time.Time) *timestamppb.Timestamp {
		if t == nil {
			return nil
		}
		return timestamppb.New(*t)
	}
	data := map[string]json.RawMessage{}
	for name, m := range map[string]proto.Message{
		"entry": &entitlementv1.Entry{
			EntitlementId: entry.EntitlementID.String(), EntryNumber: entry.Number, Kind: entry.Kind, IdempotencyKey: entry.OperationKey,
			InvoiceVersion: entry.InvoiceVersion, At: timestamppb.New(entry.At),
		},
		"entitlement": &entitlementv1.Entitlement{
			EntitlementId: entitlement.ID.String(), GrantedByKey: entitlement.OperationKey,
			GrantedAt: timestamppb.New(entitlement.GrantedAt), State: entitlement.State, Version: entitlement.Version,
			ChangedAt: timestamppb.New(entitlement.ChangedAt), EndsAt: timestamp(entitlement.EndsAt),
			Grant: &entitlementv1.Grant{
				TenantId: g.TenantID, InvoiceId: g.InvoiceID, EntitlementType: g.EntitlementType, OperationVersion: g.OperationVersion,
				Scope: g.Scope, Quantity: g.Quantity, StartsAt: timestamp(g.StartsAt), ExpiresAt: timestamp(g.ExpiresAt),
			},
		},
	} {
		text, err := protojson.Marshal(m)
		if err != nil {
			return nil, err
		}
		data[name] = text
	}
	e := event.New()
	e.SetID(fmt.Sprintf("%s/%d", entry.EntitlementID, entry.Number))
	e.SetSource("/grantd/tenants/" + url.PathEscape(entry.TenantID))
	e.SetType("entitlement." + strings.ToLower(strings.TrimPrefix(entry.Kind.String(), "ENTRY_KIND_")))
	e.SetSubject(g.EntitlementType)
	e.SetTime(entry.At)
	e.SetExtension("deliverykey", d.Key)
	e.SetExtension("idempotencykey", entry.OperationKey)
	e.SetExtension("tenantid", entry.TenantID)
	e.SetExtension("sequence", fmt.Sprintf("%019d", entry.Number))
	if err := e.SetData(event.ApplicationJSON, data); err != nil {
		return nil, err
	}
	if err := e.Validate(); err != nil {
		return nil, err
	}
	return json.Marshal(e)
}

// compare has the SDK read both, and returns whether there is an event.
func compare(t *testing.T, got []byte, err error, d *store.Delivery) bool {
	t.Helper()
	want, wantErr := reference(d)
	if (err == nil) != (wantErr == nil) {
		t.Fatalf("error %v, want %v", err, wantErr)
	}
	if err != nil {
		return false
	}
	var events [2]event.Event
	var members [2]map[string]any
	for i, text := range [][]byte{got, want} {
		if err := json.Unmarshal(text, &events[i]); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if err := events[i].Validate(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if err := json.Unmarshal(text, &members[i]); err != nil {
			t.Fatal(err)
		}
		// The SDK writes no zeros at the end of a fraction, where protojson fills it to 3, 6 or 9 digits.
		members[i]["time"] = events[i].Time()
	}
	if !reflect.DeepEqual(members[0], members[1]) {
		t.Fatalf("\n%s\n%s", got, want)
	}
	return true
}

func TestEvent_Bytes(t *testing.T) {
	d := newDelivery()
	id := uuid.MustParse("019b7c1e-7f5e-7cc3-98a8-0d4d1c4a2f10")
	d.Key, d.Event.Entry.EntitlementID, d.Event.Entitlement.ID = strings.Repeat("1f", 32), id, id
	d.Event.Entry.At = time.Date(2026, 1, 2, 4, 4, 5, 6000, time.FixedZone("CET", 3600))
	d.Event.Entitlement.Grant.Scope = map[string]string{"seats": "10", "name": "\"Ann\" & <Jürgen>\\\n\u2028"}
	got, contentType, err := renderer(t)(d)
	want := `{"specversion":"1.0","id":"019b7c1e-7f5e-7cc3-98a8-0d4d1c4a2f10/1","source":"/grantd/tenants/acme",` +
		`"type":"entitlement.granted","subject":"team_access","datacontenttype":"application/json","time":"2026-01-02T03:04:05.000006Z",` +
		`"data":{"entry":{"entitlementId":"019b7c1e-7f5e-7cc3-98a8-0d4d1c4a2f10","entryNumber":"1","kind":"ENTRY_KIND_GRANTED",` +
		`"idempotencyKey":"billing:grant:INV-1:team_access","invoiceVersion":"1","at":"2026-01-02T03:04:05.000006Z"},` +
		`"entitlement":{"entitlementId":"019b7c1e-7f5e-7cc3-98a8-0d4d1c4a2f10","grant":{"tenantId":"acme","invoiceId":"INV-1",` +
		`"entitlementType":"team_access","scope":{"name":"\"Ann\" & <Jürgen>\\\u000a` + "\u2028" + `","seats":"10"},"quantity":"10","expiresAt":"2027-03-01T12:30:00Z"},` +
		`"grantedByKey":"billing:grant:INV-1:team_access","grantedAt":"2026-03-01T12:30:00Z","state":"ENTITLEMENT_STATE_ACTIVE",` +
		`"version":"1","changedAt":"2026-03-01T12:30:00Z","endsAt":"2027-03-01T12:30:00Z"}},` +
		`"deliverykey":"` + d.Key + `","idempotencykey":"billing:grant:INV-1:team_access","sequence":"0000000000000000001","tenantid":"acme"}`
	if err != nil || contentType != event.ApplicationCloudEventsJSON || string(got) != want {
		t.Errorf("%s %v\n%s\n%s", contentType, err, got, want)
	}
	compare(t, got, err, d)
}

// FuzzEvent: the bytes say what the SDK and protojson make of the same delivery, or both refuse it.
func FuzzEvent(f *testing.F) {
	render := renderer(f)
	micros := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC).UnixMicro()
	f.Add("acme", "team_access", "billing:grant:INV-1:team_access", "seats", "10", int64(1), int64(1), int32(1), int32(1), micros, micros+1, uint8(0))
	f.Add("a/%?#[]..:@", `"\<&>`, "a", "", "\x00\x1f\b\t\n\f\r\x7f\ufffd\u2028\u2029é😀", int64(1)<<62, int64(9007199254740993), int32(2), int32(2), micros, micros, uint8(255))
	f.Add("a", "b", "c", "d", "not \xff UTF-8", int64(2), int64(0), int32(3), int32(1), int64(120000), int64(1), uint8(255))
	f.Add("a", "b", "c", "d", "cut \xe2\x80", int64(2), int64(0), int32(3), int32(1), int64(120000), int64(1), uint8(255))
	f.Add("a", "b", "c", "d", "", int64(0), int64(-1), int32(-7), int32(99), int64(0), int64(-62135596800000000), uint8(15))
	f.Add("a", "b", "c", "d", "", int64(1), int64(1), int32(1), int32(1), int64(0), int64(-62135596800000001), uint8(15))
	f.Add("a", "b", "c", "d", "", int64(1), int64(1), int32(1), int32(1), int64(0), int64(253402300800000000), uint8(15))
	f.Fuzz(func(t *testing.T, tenant, entitlementType, key, attribute, value string, number, count int64, kind, state int32, at, other int64, set uint8) {
		// The SDK trims, and refuses or writes as they are, what the contract has no room for in these.
		for _, s := range []string{tenant, entitlementType, key} {
			if s == "" || strings.TrimSpace(s) != s || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
				return
			}
		}
		first, second := time.UnixMicro(at).UTC(), time.UnixMicro(other).UTC()
		if first.Year() < 1 || first.Year() > 9999 || first.IsZero() {
			return
		}
		d := newDelivery()
		entry, entitlement := &d.Event.Entry, &d.Event.Entitlement
		*entry = store.Entry{
			TenantID: tenant, EntitlementID: entry.EntitlementID, Number: number, Kind: entitlementv1.EntryKind(kind),
			OperationKey: key, InvoiceVersion: count, At: first,
		}
		entitlement.State, entitlement.Version, entitlement.OperationKey = entitlementv1.EntitlementState(state), number, key
		entitlement.GrantedAt, entitlement.ChangedAt, entitlement.EndsAt = first, second, nil
		entitlement.Grant = store.Grant{TenantID: tenant, InvoiceID: key, EntitlementType: entitlementType, OperationVersion: count}
		g := &entitlement.Grant
		for i, add := range []func(){
			func() { g.StartsAt = &first }, func() { g.ExpiresAt = &second }, func() { entitlement.EndsAt = &second }, func() { g.Quantity = &count },
			func() { g.Scope = map[string]string{} }, func() { g.Scope = map[string]string{attribute: value} },
			func() { g.Scope = map[string]string{attribute: value, value: attribute, "region": "eu"} },
		} {
			if set&(1<<i) != 0 {
				add()
			}
		}
		got, _, err := render(d)
		if !compare(t, got, err, d) {
			return
		}
		if again, _, _ := render(d); string(again) != string(got) {
			t.Fatalf("not the same again:\n%s\n%s", got, again)
		}
	})
}

func BenchmarkEvent(b *testing.B) {
	render, d := renderer(b), newDelivery()
	d.Event.Entry.At = d.Event.Entry.At.Add(123456 * time.Microsecond)
	d.Event.Entitlement.GrantedAt, d.Event.Entitlement.ChangedAt = d.Event.Entry.At, d.Event.Entry.At
	for b.Loop() {
		if _, _, err := render(d); err != nil {
			b.Fatal(err)
		}
	}
}
