package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// validGrantRequest has every field set.
func validGrantRequest() *entitlementv1.GrantEntitlementRequest {
	return &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: "billing:grant:INV-A:team_access",
		Grant: &entitlementv1.Grant{
			TenantId:         "acme",
			InvoiceId:        "INV-A",
			EntitlementType:  "team_access",
			OperationVersion: 1,
			Scope:            map[string]string{"seats": "10", "region": "eu", "label": "Équipe n° 7"},
			Quantity:         proto.Int64(5),
			StartsAt:         &timestamppb.Timestamp{Seconds: 1_700_000_000, Nanos: 1000},
			ExpiresAt:        &timestamppb.Timestamp{Seconds: 1_800_000_000},
		},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 3},
		EventId: "evt_1",
		Source:  "stripe",
		Notify:  &entitlementv1.Notify{Recipient: "ada@example.com", Locale: "de-CH"},
	}
}

func validGetOperationRequest() *entitlementv1.GetOperationRequest {
	return &entitlementv1.GetOperationRequest{
		TenantId: "acme",
		Name: &entitlementv1.GetOperationRequest_BusinessKey{BusinessKey: &entitlementv1.BusinessKey{
			InvoiceId: "INV-A", EntitlementType: "team_access", OperationVersion: 1,
		}},
		Grant: validGrantRequest().GetGrant(),
		View:  entitlementv1.OperationView_OPERATION_VIEW_FULL,
	}
}

// told lists the violations as "field: rule".
func told(v violations) []string {
	var lines []string
	for _, one := range v.kept {
		lines = append(lines, one.field+": "+one.rule)
	}
	return lines
}

func wantTold(t *testing.T, v violations, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, told(v)); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
}

func withUnknown[M proto.Message](m M, numbers ...protowire.Number) M {
	raw := m.ProtoReflect().GetUnknown()
	for _, number := range numbers {
		raw = protowire.AppendTag(raw, number, protowire.VarintType)
		raw = protowire.AppendVarint(raw, 1)
	}
	m.ProtoReflect().SetUnknown(raw)
	return m
}

// scopeOf makes a number of legal entries.
func scopeOf(entries int) map[string]string {
	scope := map[string]string{}
	for i := range entries {
		scope[fmt.Sprintf("k%02d", i)] = "v"
	}
	return scope
}

// scopeOfBytes makes a scope of eight entries that holds this many bytes, keys included.
func scopeOfBytes(total int) map[string]string {
	scope := map[string]string{}
	for i := range 8 {
		scope[fmt.Sprintf("k%d", i)] = strings.Repeat("v", 254)
	}
	scope["k7"] = scope["k7"][:254-(8*256-total)]
	return scope
}

func TestValidateGrantRequest(t *testing.T) {
	type request = entitlementv1.GrantEntitlementRequest
	notify := func(recipient, locale string) func(*request) {
		return func(r *request) { r.Notify = &entitlementv1.Notify{Recipient: recipient, Locale: locale} }
	}
	state := func(s entitlementv1.InvoiceState) func(*request) {
		return func(r *request) { r.Invoice.State = s }
	}
	key := func(s string) func(*request) { return func(r *request) { r.IdempotencyKey = s } }
	tenant := func(s string) func(*request) { return func(r *request) { r.Grant.TenantId = s } }
	scope := func(kv ...string) func(*request) {
		return func(r *request) {
			r.Grant.Scope = map[string]string{}
			for pair := range slices.Chunk(kv, 2) {
				r.Grant.Scope[pair[0]] = pair[1]
			}
		}
	}
	window := func(starts, expires *timestamppb.Timestamp) func(*request) {
		return func(r *request) { r.Grant.StartsAt, r.Grant.ExpiresAt = starts, expires }
	}
	at := func(seconds int64, nanos int32) *timestamppb.Timestamp {
		return &timestamppb.Timestamp{Seconds: seconds, Nanos: nanos}
	}
	const year1, year9999 = -62135596800, 253402300799

	for name, c := range map[string]struct {
		edit func(*request)
		want []string
	}{
		"every field set":   {func(*request) {}, nil},
		"optional ones not": {func(r *request) { r.Grant = minimalGrant(); r.EventId, r.Source = "", "" }, nil},

		"key: every legal character": {key("AZaz09._:/~@+=-"), nil},
		"key: longest":               {key(strings.Repeat("k", 200)), nil},
		"key: one longer":            {key(strings.Repeat("k", 201)), []string{"idempotency_key: " + ruleIdempotencyKey}},
		"key: missing":               {key(""), []string{"idempotency_key: " + ruleIdempotencyKey}},
		"key: space around":          {key(" k "), []string{"idempotency_key: " + ruleIdempotencyKey}},
		"key: not ASCII":             {key("ké"), []string{"idempotency_key: " + ruleIdempotencyKey}},

		"tenant: longest":        {tenant(strings.Repeat("t", 128)), nil},
		"tenant: first and last": {tenant("!~"), nil},
		"tenant: one longer":     {tenant(strings.Repeat("t", 129)), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: missing":        {tenant(""), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: space":          {tenant("a b"), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: trailing line":  {tenant("a\n"), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: DEL":            {tenant("a\x7f"), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: NUL":            {tenant("a\x00"), []string{"grant.tenant_id: " + ruleIdentifier}},
		"tenant: not UTF-8":      {tenant("a\xff"), []string{"grant.tenant_id: " + ruleIdentifier}},
		"invoice: missing":       {func(r *request) { r.Grant.InvoiceId = "" }, []string{"grant.invoice_id: " + ruleIdentifier}},
		"type: missing":          {func(r *request) { r.Grant.EntitlementType = "" }, []string{"grant.entitlement_type: " + ruleIdentifier}},

		"operation version: 0":        {func(r *request) { r.Grant.OperationVersion = 0 }, nil},
		"operation version: negative": {func(r *request) { r.Grant.OperationVersion = -1 }, []string{"grant.operation_version: " + ruleVersion}},

		"scope: 32 entries":        {func(r *request) { r.Grant.Scope = scopeOf(32) }, nil},
		"scope: 33 entries":        {func(r *request) { r.Grant.Scope = scopeOf(33) }, []string{"grant.scope: " + ruleScopeEntries}},
		"scope: 2048 bytes":        {func(r *request) { r.Grant.Scope = scopeOfBytes(2048) }, nil},
		"scope: 2049 bytes":        {func(r *request) { r.Grant.Scope = scopeOfBytes(2048); r.Grant.Scope["k0"] += "v" }, []string{"grant.scope: " + ruleScopeBytes}},
		"scope: empty value":       {scope("seats", ""), nil},
		"scope: longest value":     {scope("seats", strings.Repeat("é", 128)), nil},
		"scope: longer value":      {scope("seats", strings.Repeat("é", 128)+"x"), []string{"grant.scope.seats: " + ruleScopeValue}},
		"scope: value with NUL":    {scope("seats", "1\x000"), []string{"grant.scope.seats: " + ruleScopeValue}},
		"scope: value not UTF-8":   {scope("seats", "\xff"), []string{"grant.scope.seats: " + ruleScopeValue}},
		"scope: legal keys":        {scope("a", "", "a.b_c9", "", "z__..", ""), nil},
		"scope: longest key":       {scope(strings.Repeat("k", 63), "v"), nil},
		"scope: longer key":        {scope(strings.Repeat("k", 64), "v"), []string{`grant.scope["` + strings.Repeat("k", 64) + `"]: ` + ruleScopeKey}},
		"scope: much longer key":   {scope(strings.Repeat("k", 300), "v"), []string{`grant.scope["` + strings.Repeat("k", 64) + `"...]: ` + ruleScopeKey}},
		"scope: key cut in a rune": {scope(strings.Repeat("k", 63)+"é", "v"), []string{`grant.scope["` + strings.Repeat("k", 63) + `"...]: ` + ruleScopeKey}},
		"scope: key not UTF-8":     {scope(strings.Repeat("\xbf", 70), "v"), []string{`grant.scope["` + strings.Repeat(`\xbf`, 60) + `"...]: ` + ruleScopeKey}},
		"scope: illegal keys, in order": {scope("", "v", "Bad Key", "v", "1st", "v", "_a", "v", "é", "v", "ok", "v", "a-b", "v"), []string{
			`grant.scope[""]: ` + ruleScopeKey,
			`grant.scope["1st"]: ` + ruleScopeKey,
			`grant.scope["Bad Key"]: ` + ruleScopeKey,
			`grant.scope["_a"]: ` + ruleScopeKey,
			`grant.scope["a-b"]: ` + ruleScopeKey,
			`grant.scope["\u00e9"]: ` + ruleScopeKey,
		}},

		"quantity: unset":    {func(r *request) { r.Grant.Quantity = nil }, nil},
		"quantity: 1":        {func(r *request) { r.Grant.Quantity = proto.Int64(1) }, nil},
		"quantity: 0":        {func(r *request) { r.Grant.Quantity = proto.Int64(0) }, []string{"grant.quantity: " + ruleQuantity}},
		"quantity: negative": {func(r *request) { r.Grant.Quantity = proto.Int64(-1) }, []string{"grant.quantity: " + ruleQuantity}},

		"window: earliest and latest": {window(at(year1, 0), at(year9999, 999_999_000)), nil},
		"window: too early":           {window(at(year1-1, 0), nil), []string{"grant.starts_at: " + ruleTimestamp}},
		"window: too late":            {window(nil, at(year9999+1, 0)), []string{"grant.expires_at: " + ruleTimestamp}},
		"window: nanos negative":      {window(at(5, -1000), nil), []string{"grant.starts_at: " + ruleTimestamp}},
		"window: nanos of a second":   {window(at(5, 1_000_000_000), nil), []string{"grant.starts_at: " + ruleTimestamp}},
		"window: nanosecond":          {window(at(5, 1001), at(6, 999)), []string{"grant.starts_at: " + ruleMicroseconds, "grant.expires_at: " + ruleMicroseconds}},
		"window: a microsecond long":  {window(at(5, 999_999_000), at(6, 0)), nil},
		"window: within a second":     {window(at(5, 1000), at(5, 2000)), nil},
		"window: empty":               {window(at(5, 1000), at(5, 1000)), []string{"grant.expires_at: " + ruleWindow}},
		"window: backwards":           {window(at(6, 0), at(5, 999_999_000)), []string{"grant.expires_at: " + ruleWindow}},
		"window: long past":           {window(nil, at(-1, 0)), nil},

		"invoice: absent":           {func(r *request) { r.Invoice = nil }, []string{"invoice: " + ruleRequired}},
		"invoice: state unset":      {state(0), []string{"invoice.state: " + ruleInvoiceState}},
		"invoice: state unknown":    {state(5), []string{"invoice.state: " + ruleInvoiceState}},
		"invoice: OPEN":             {state(entitlementv1.InvoiceState_INVOICE_STATE_OPEN), nil},
		"invoice: VOIDED":           {state(entitlementv1.InvoiceState_INVOICE_STATE_VOIDED), nil},
		"invoice: REFUNDED":         {state(entitlementv1.InvoiceState_INVOICE_STATE_REFUNDED), nil},
		"invoice: version 0":        {func(r *request) { r.Invoice.Version = 0 }, nil},
		"invoice: version negative": {func(r *request) { r.Invoice.Version = -1 }, []string{"invoice.version: " + ruleVersion}},

		"event: longest":    {func(r *request) { r.EventId, r.Source = strings.Repeat("é", 100), strings.Repeat("s", 200) }, nil},
		"event: longer":     {func(r *request) { r.EventId = strings.Repeat("é", 100) + "x" }, []string{"event_id: " + ruleDiagnostic}},
		"event: with NUL":   {func(r *request) { r.EventId = "\x00" }, []string{"event_id: " + ruleDiagnostic}},
		"source: longer":    {func(r *request) { r.Source = strings.Repeat("s", 201) }, []string{"source: " + ruleDiagnostic}},
		"source: not UTF-8": {func(r *request) { r.Source = "\xc3" }, []string{"source: " + ruleDiagnostic}},

		"notify: absent":            {func(r *request) { r.Notify = nil }, nil},
		"notify: empty":             {notify("", ""), []string{"notify.recipient: " + ruleRecipient, "notify.locale: " + ruleLocale}},
		"recipient: shortest":       {notify("a@b", "de"), nil},
		"recipient: longest":        {notify(strings.Repeat("a", 252)+"@b", strings.Repeat("x", 35)), nil},
		"recipient: longer":         {notify(strings.Repeat("a", 253)+"@b", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: no local part":  {notify("@example.com", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: no domain":      {notify("ada@", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: two of @":       {notify("ada@x@example.com", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: display name":   {notify("Ada <ada@example.com>", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: another header": {notify("ada@example.com\r\nBcc: eve@example.com", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: wide space":     {notify("ada@exam\u3000ple.com", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: not UTF-8":      {notify("ada@\xff", "de"), []string{"notify.recipient: " + ruleRecipient}},
		"recipient: not ASCII":      {notify("åda@exämple.com", "de"), nil},
		"locale: shorter":           {notify("a@b", "d"), []string{"notify.locale: " + ruleLocale}},
		"locale: longer":            {notify("a@b", strings.Repeat("x", 36)), []string{"notify.locale: " + ruleLocale}},
		"locale: of a path":         {notify("a@b", "../en"), []string{"notify.locale: " + ruleLocale}},
		"unknown: in notify":        {func(r *request) { withUnknown(r.Notify, 3) }, []string{"notify.3: " + ruleUnknownField}},

		"unknown: at the top": {func(r *request) { withUnknown(r, 99, 15, 99) }, []string{"15: " + ruleUnknownField, "99: " + ruleUnknownField}},
		"unknown: everywhere": {func(r *request) {
			withUnknown(r.Grant, 15)
			withUnknown(r.Grant.StartsAt, 3)
			withUnknown(r.Grant.ExpiresAt, 4)
			withUnknown(r.Invoice, 5)
		}, []string{
			"grant.15: " + ruleUnknownField,
			"grant.starts_at.3: " + ruleUnknownField,
			"grant.expires_at.4: " + ruleUnknownField,
			"invoice.5: " + ruleUnknownField,
		}},
		"unknown: no field at all": {func(r *request) { r.Grant.ProtoReflect().SetUnknown([]byte{0xff}) }, []string{"grant: " + ruleUnknownField}},

		"everything missing": {func(r *request) { proto.Reset(r) }, []string{
			"idempotency_key: " + ruleIdempotencyKey, "grant: " + ruleRequired, "invoice: " + ruleRequired,
		}},
		"everything empty": {func(r *request) {
			proto.Reset(r)
			r.Grant, r.Invoice = &entitlementv1.Grant{}, &entitlementv1.InvoiceEvidence{}
		}, []string{
			"idempotency_key: " + ruleIdempotencyKey,
			"grant.tenant_id: " + ruleIdentifier,
			"grant.invoice_id: " + ruleIdentifier,
			"grant.entitlement_type: " + ruleIdentifier,
			"invoice.state: " + ruleInvoiceState,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := validGrantRequest()
			c.edit(r)
			wantTold(t, validateGrantRequest(r), c.want...)
		})
	}
}

func minimalGrant() *entitlementv1.Grant {
	return &entitlementv1.Grant{TenantId: "acme", InvoiceId: "INV-A", EntitlementType: "team_access"}
}

// Two spellings that a reader, a collation or a normalising library takes for the same name must never meet: each is refused, or stays
// what it is.
func TestValidate_LookAlikeNames(t *testing.T) {
	for _, name := range []string{
		"\u00c5", "\u212b", "A\u030a", // Å: composed, the unit of length, decomposed
		"\u00e9", "e\u0301", // é
		"\u0430cme",           // a Cyrillic a
		"acme\u200b",          // a space of no width
		"\ufeffacme",          // a byte order mark
		"acme\u00a0", "acme ", // a space that does not break, and one that does
		"\uff41cme", // a wide a
	} {
		if isIdentifier(name) || isIdempotencyKey(name) || isScopeKey(name) {
			t.Errorf("%+q is accepted", name)
		}
	}
	// These are accepted, and are different bytes, which is how they are compared.
	for _, name := range []string{"INV-a", "inv-A", "INV-A", "inv-a"} {
		if !isIdentifier(name) || !isIdempotencyKey(name) {
			t.Errorf("%+q is refused", name)
		}
	}
	// A scope's values are free text: all spellings are accepted as they are.
	for _, value := range []string{"\u00c5", "\u212b", "A\u030a"} {
		if !isText(value, maxScopeValueBytes) {
			t.Errorf("%+q is refused", value)
		}
	}
}

func TestIsIdempotencyKey_EveryByte(t *testing.T) {
	const legal = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/~@+=-"
	for c := range 256 {
		s := string([]byte{byte(c)})
		if got, want := isIdempotencyKey(s), strings.Contains(legal, s); got != want {
			t.Errorf("%q: %v, want %v", s, got, want)
		}
		if got, want := isIdentifier(s), c >= 0x21 && c <= 0x7e; got != want {
			t.Errorf("identifier %q: %v, want %v", s, got, want)
		}
	}
}

func TestIsUUID(t *testing.T) {
	for s, want := range map[string]bool{
		"0198f3a2-7c1e-7abc-8def-0123456789ab":          true,
		"0198F3A2-7C1E-7ABC-8DEF-0123456789AB":          false,
		"0198f3a27c1e7abc8def0123456789ab":              false,
		"{0198f3a2-7c1e-7abc-8def-0123456789ab}":        false,
		"urn:uuid:0198f3a2-7c1e-7abc-8def-0123456789ab": false,
		"0198f3a2-7c1e-7abc-8def-0123456789a":           false,
		"0198f3a2-7c1e-7abc-8def-0123456789ag":          false,
		"0198f3a2-7c1e-7abc-8def00123456789ab":          false,
		"0198f3a-27c1e-7abc-8def-0123456789ab":          false,
		"":                                              false,
	} {
		if got := isUUID(s); got != want {
			t.Errorf("%q: %v, want %v", s, got, want)
		}
	}
}

func TestValidateBatchRequest(t *testing.T) {
	items := func(n int) *entitlementv1.BatchGrantEntitlementsRequest {
		return &entitlementv1.BatchGrantEntitlementsRequest{
			Requests: slices.Repeat([]*entitlementv1.GrantEntitlementRequest{validGrantRequest()}, n),
		}
	}
	// sized makes a batch of exactly this many bytes.
	sized := func(bytes int) *entitlementv1.BatchGrantEntitlementsRequest {
		r := items(1)
		r.Requests[0].Source = strings.Repeat("s", bytes)
		r.Requests[0].Source = r.Requests[0].Source[:2*bytes-proto.Size(r)]
		if got := proto.Size(r); got != bytes {
			t.Fatalf("made a batch of %d bytes instead of %d", got, bytes)
		}
		return r
	}
	malformed := items(2)
	malformed.Requests[1] = &entitlementv1.GrantEntitlementRequest{}
	newerItem := items(2)
	withUnknown(newerItem.Requests[1], 99)

	for name, c := range map[string]struct {
		request *entitlementv1.BatchGrantEntitlementsRequest
		want    []string
	}{
		"one":                      {items(1), nil},
		"a thousand":               {items(1000), nil},
		"none":                     {items(0), []string{"requests: " + ruleBatchItems}},
		"one more":                 {items(1001), []string{"requests: " + ruleBatchItems}},
		"1 MiB":                    {sized(1 << 20), nil},
		"a byte more":              {sized(1<<20 + 1), []string{"requests: " + ruleBatchBytes}},
		"unknown field":            {withUnknown(items(1), 99), []string{"99: " + ruleUnknownField}},
		"a malformed item":         {malformed, nil},
		"unknown field in an item": {newerItem, nil},
	} {
		t.Run(name, func(t *testing.T) { wantTold(t, validateBatchRequest(c.request), c.want...) })
	}
	wantTold(t, validateGrantRequest(newerItem.Requests[1]), "99: "+ruleUnknownField)
}

func TestValidateGetOperationRequest(t *testing.T) {
	type request = entitlementv1.GetOperationRequest
	byKey := func(key string) func(*request) {
		return func(r *request) { r.Name = &entitlementv1.GetOperationRequest_IdempotencyKey{IdempotencyKey: key} }
	}
	for name, c := range map[string]struct {
		edit func(*request)
		want []string
	}{
		"business key and grant":  {func(*request) {}, nil},
		"business key alone":      {func(r *request) { r.Grant = nil }, nil},
		"key and grant":           {byKey("k"), nil},
		"grant alone":             {func(r *request) { r.Name = nil }, nil},
		"nothing":                 {func(r *request) { r.Name, r.Grant = nil, nil }, []string{"name: " + ruleOperationName}},
		"empty key":               {byKey(""), []string{"idempotency_key: " + ruleIdempotencyKey}},
		"empty key, with a grant": {byKey(""), []string{"idempotency_key: " + ruleIdempotencyKey}},
		"no tenant":               {func(r *request) { r.TenantId, r.Grant = "", nil }, []string{"tenant_id: " + ruleIdentifier}},
		"empty business key": {func(r *request) {
			r.Grant, r.Name = nil, &entitlementv1.GetOperationRequest_BusinessKey{}
		}, []string{"business_key.invoice_id: " + ruleIdentifier, "business_key.entitlement_type: " + ruleIdentifier}},
		"negative version": {func(r *request) { r.Grant, r.GetBusinessKey().OperationVersion = nil, -1 },
			[]string{"business_key.operation_version: " + ruleVersion}},
		"grant of another tenant":  {func(r *request) { r.Grant.TenantId = "Acme" }, []string{"grant.tenant_id: " + ruleSameTenant}},
		"grant of another invoice": {func(r *request) { r.Grant.InvoiceId = "INV-B" }, []string{"grant.invoice_id: " + ruleSameEffect}},
		"grant of another type":    {func(r *request) { r.Grant.EntitlementType = "x" }, []string{"grant.entitlement_type: " + ruleSameEffect}},
		"grant of another version": {func(r *request) { r.Grant.OperationVersion = 2 }, []string{"grant.operation_version: " + ruleSameEffect}},
		"another invoice, by key":  {func(r *request) { byKey("k")(r); r.Grant.InvoiceId = "INV-B" }, nil},
		"grant without a tenant":   {func(r *request) { r.Grant.TenantId = "" }, []string{"grant.tenant_id: " + ruleIdentifier}},
		"grant that is malformed":  {func(r *request) { r.Grant.Quantity = proto.Int64(0) }, []string{"grant.quantity: " + ruleQuantity}},
		"unknown in the grant":     {func(r *request) { withUnknown(r.Grant.StartsAt, 9) }, []string{"grant.starts_at.9: " + ruleUnknownField}},
		"unknown elsewhere":        {func(r *request) { withUnknown(r, 9); withUnknown(r.GetBusinessKey(), 9) }, nil},
		"view unset":               {func(r *request) { r.View = 0 }, nil},
		"view unknown":             {func(r *request) { r.View = 3 }, []string{"view: " + ruleView}},
	} {
		t.Run(name, func(t *testing.T) {
			r := validGetOperationRequest()
			c.edit(r)
			wantTold(t, validateGetOperationRequest(r), c.want...)
		})
	}
}

func TestValidateGetEntitlementRequest(t *testing.T) {
	byID := func(id string) *entitlementv1.GetEntitlementRequest {
		return &entitlementv1.GetEntitlementRequest{TenantId: "acme", Name: &entitlementv1.GetEntitlementRequest_EntitlementId{EntitlementId: id}}
	}
	byEffect := func(invoice string) *entitlementv1.GetEntitlementRequest {
		return &entitlementv1.GetEntitlementRequest{TenantId: "acme", Name: &entitlementv1.GetEntitlementRequest_BusinessKey{
			BusinessKey: &entitlementv1.BusinessKey{InvoiceId: invoice, EntitlementType: "team_access"},
		}}
	}
	wantTold(t, validateGetEntitlementRequest(byID("0198f3a2-7c1e-7abc-8def-0123456789ab")))
	wantTold(t, validateGetEntitlementRequest(byID("7")), "entitlement_id: "+ruleUUID)
	wantTold(t, validateGetEntitlementRequest(byEffect("INV-A")))
	wantTold(t, validateGetEntitlementRequest(byEffect("")), "business_key.invoice_id: "+ruleIdentifier)
	wantTold(t, validateGetEntitlementRequest(withUnknown(byEffect("INV-A"), 9)))
	wantTold(t, validateGetEntitlementRequest(&entitlementv1.GetEntitlementRequest{}),
		"tenant_id: "+ruleIdentifier, "name: "+ruleEntitlementName)
}

// Validation of valid requests stands on the path of every write, so it leaves nothing for the garbage collector.
func TestValidate_AllocatesNothing(t *testing.T) {
	grant, lookup := validGrantRequest(), validGetOperationRequest()
	if n := testing.AllocsPerRun(100, func() { validateGrantRequest(grant) }); n != 0 {
		t.Errorf("a grant: %v allocations", n)
	}
	if n := testing.AllocsPerRun(100, func() { validateGetOperationRequest(lookup) }); n != 0 {
		t.Errorf("a look-up: %v allocations", n)
	}
}

func BenchmarkValidateGrantRequest(b *testing.B) {
	r := validGrantRequest()
	b.ReportAllocs()
	for b.Loop() {
		validateGrantRequest(r)
	}
}

func BenchmarkValidateBatchRequest(b *testing.B) {
	r := &entitlementv1.BatchGrantEntitlementsRequest{
		Requests: slices.Repeat([]*entitlementv1.GrantEntitlementRequest{validGrantRequest()}, maxBatchItems),
	}
	b.ReportAllocs()
	for b.Loop() {
		validateBatchRequest(r)
	}
}

func TestCheckUnknownFields_InLists(t *testing.T) {
	batch := &entitlementv1.BatchGrantEntitlementsRequest{
		Requests: []*entitlementv1.GrantEntitlementRequest{validGrantRequest(), validGrantRequest()},
	}
	var v violations
	checkUnknownFields(&v, "", batch)
	wantTold(t, v)
	withUnknown(batch.Requests[1].Invoice, 7)
	checkUnknownFields(&v, "", batch)
	wantTold(t, v, "requests[1].invoice.7: "+ruleUnknownField)
}
