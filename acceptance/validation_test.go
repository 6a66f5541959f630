package acceptance_test

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// wantViolations checks for INVALID_ARGUMENT with exactly these fields, each with the rule that it breaks.
func wantViolations(t testing.TB, what string, err error, fields ...string) {
	t.Helper()
	wantCode(t, what, err, codes.InvalidArgument)
	st := status.Convert(err)
	var got []string
	for _, v := range violationsOf(err) {
		got = append(got, v.GetField())
		if v.GetDescription() == "" {
			t.Errorf("%s: no rule for %s", what, v.GetField())
		}
	}
	if !slices.Equal(got, fields) {
		t.Errorf("%s: violations of %q, want %q", what, got, fields)
	}
	if !strings.HasPrefix(st.Message(), fields[0]) {
		t.Errorf("%s: the message does not name the field: %q", what, st.Message())
	}
	if n := proto.Size(st.Proto()); n > 4<<10 {
		t.Errorf("%s: a status of %d bytes", what, n)
	}
}

// violationsOf are those of a status whose only detail is a BadRequest.
func violationsOf(err error) []*errdetails.BadRequest_FieldViolation {
	details := status.Convert(err).Details()
	if len(details) != 1 {
		return nil
	}
	bad, _ := details[0].(*errdetails.BadRequest)
	return bad.GetFieldViolations()
}

func wantNoDetails(t testing.TB, err error) {
	t.Helper()
	if d := status.Convert(err).Details(); len(d) != 0 {
		t.Errorf("details: %v", d)
	}
}

// unknownField is a field of the number 15, as a newer caller would send it.
func unknownField(m proto.Message) {
	m.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 15, protowire.BytesType), "new"))
}

// Every rule about a grant, broken alone, and the limit that still passes beside it. Nothing malformed reaches the database: no
// attempt is written, and the key stays free.
func TestValidation_Grant(t *testing.T) {
	t.Parallel()
	b := setup(t)
	type request = pb.GrantEntitlementRequest
	long := func(n int) string { return strings.Repeat("x", n) }
	at := func(seconds int64, nanos int32) *timestamppb.Timestamp {
		return &timestamppb.Timestamp{Seconds: seconds, Nanos: nanos}
	}
	for _, test := range []struct {
		name   string
		fields []string // nil: legal
		change func(*request)
	}{
		{"key missing", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "" }},
		{"key of 201", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = long(201) }},
		{"key of 200", nil, func(r *request) { r.IdempotencyKey = long(200) }},
		{"key of every character", nil, func(r *request) { r.IdempotencyKey = "azAZ09._:/~@+=-" }},
		{"key with space", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "a b" }},
		{"key with trailing newline", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "a\n" }},
		{"key with comma", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "a,b" }},
		{"key with percent", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "a%20" }},
		{"key with umlaut", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "ä" }},
		{"key with NUL", []string{"idempotency_key"}, func(r *request) { r.IdempotencyKey = "a\x00" }},

		{"no grant", []string{"grant"}, func(r *request) { r.Grant = nil }},
		{"empty grant", []string{"grant.tenant_id", "grant.invoice_id", "grant.entitlement_type"}, func(r *request) { r.Grant = &pb.Grant{} }},
		{"no tenant", []string{"grant.tenant_id"}, func(r *request) { r.Grant.TenantId = "" }},
		{"tenant of 129", []string{"grant.tenant_id"}, func(r *request) { r.Grant.TenantId = long(129) }},
		{"tenant of 128", nil, func(r *request) { r.Grant.TenantId = long(128) }},
		{"tenant with space", []string{"grant.tenant_id"}, func(r *request) { r.Grant.TenantId = " t1" }},
		{"tenant of every visible character", nil, func(r *request) {
			r.Grant.TenantId = `!"#$%&'()*+,-./0123456789:;<=>?@AZ[\]^_` + "`az{|}~"
		}},
		{"no invoice id", []string{"grant.invoice_id"}, func(r *request) { r.Grant.InvoiceId = "" }},
		{"invoice id of 129", []string{"grant.invoice_id"}, func(r *request) { r.Grant.InvoiceId = long(129) }},
		{"invoice id with DEL", []string{"grant.invoice_id"}, func(r *request) { r.Grant.InvoiceId = "INV\x7f" }},
		{"no type", []string{"grant.entitlement_type"}, func(r *request) { r.Grant.EntitlementType = "" }},
		{"type of 129", []string{"grant.entitlement_type"}, func(r *request) { r.Grant.EntitlementType = long(129) }},
		{"type with tab", []string{"grant.entitlement_type"}, func(r *request) { r.Grant.EntitlementType = "team\taccess" }},
		{"negative operation version", []string{"grant.operation_version"}, func(r *request) { r.Grant.OperationVersion = -1 }},

		{"33 scope entries", []string{"grant.scope"}, func(r *request) {
			largestScope('a')(r)
			clear(r.Grant.Scope)
			for i := range 33 {
				r.Grant.Scope["k"+strings.Repeat("a", i)] = ""
			}
		}},
		{"largest scope", nil, largestScope('a')},
		{"scope of 2 KiB and a byte", []string{"grant.scope"}, func(r *request) {
			largestScope('a')(r)
			r.Grant.Scope["a00"] += "x"
		}},
		{"scope key empty", []string{`grant.scope[""]`}, func(r *request) { r.Grant.Scope[""] = "x" }},
		{"scope key upper-case", []string{`grant.scope["Seats"]`}, func(r *request) { r.Grant.Scope["Seats"] = "x" }},
		{"scope key of 64", []string{`grant.scope["` + long(64) + `"]`}, func(r *request) { r.Grant.Scope[long(64)] = "x" }},
		{"scope key of 63", nil, func(r *request) { r.Grant.Scope[long(63)] = "x" }},
		{"scope value of 257", []string{"grant.scope.region"}, func(r *request) { r.Grant.Scope["region"] = long(257) }},
		{"scope value of 256", nil, func(r *request) { r.Grant.Scope["region"] = long(256) }},
		{"scope value with NUL", []string{"grant.scope.region"}, func(r *request) { r.Grant.Scope["region"] = "e\x00u" }},
		{"scope value empty", nil, func(r *request) { r.Grant.Scope["region"] = "" }},

		{"quantity 0", []string{"grant.quantity"}, func(r *request) { r.Grant.Quantity = pointer[int64](0) }},
		{"quantity below 0", []string{"grant.quantity"}, func(r *request) { r.Grant.Quantity = pointer[int64](-1) }},
		{"quantity 1", nil, func(r *request) { r.Grant.Quantity = pointer[int64](1) }},

		{"start finer than microseconds", []string{"grant.starts_at"}, func(r *request) { r.Grant.StartsAt = at(1, 1) }},
		{"start before the year 1", []string{"grant.starts_at"}, func(r *request) { r.Grant.StartsAt = at(-62135596801, 0) }},
		{"start with negative nanos", []string{"grant.starts_at"}, func(r *request) { r.Grant.StartsAt = at(1, -1000) }},
		{"expiry finer than microseconds", []string{"grant.expires_at"}, func(r *request) { r.Grant.ExpiresAt = at(1, 999) }},
		{"expiry after the year 9999", []string{"grant.expires_at"}, func(r *request) { r.Grant.ExpiresAt = at(253402300800, 0) }},
		{"expiry with too many nanos", []string{"grant.expires_at"}, func(r *request) { r.Grant.ExpiresAt = at(1, 1_000_000_000) }},
		{"expiry at the start", []string{"grant.expires_at"}, func(r *request) { r.Grant.StartsAt, r.Grant.ExpiresAt = at(9, 1000), at(9, 1000) }},
		{"expiry before the start", []string{"grant.expires_at"}, func(r *request) { r.Grant.StartsAt, r.Grant.ExpiresAt = at(9, 0), at(8, 999_999_000) }},
		{"window of a microsecond", nil, func(r *request) { r.Grant.StartsAt, r.Grant.ExpiresAt = at(9, 1000), at(9, 2000) }},
		{"expiry long past", nil, func(r *request) { r.Grant.ExpiresAt = at(0, 0) }},

		{"no evidence", []string{"invoice"}, func(r *request) { r.Invoice = nil }},
		{"evidence without state", []string{"invoice.state"}, func(r *request) { r.Invoice.State = 0 }},
		{"evidence of unknown state", []string{"invoice.state"}, func(r *request) { r.Invoice.State = 9 }},
		{"negative evidence version", []string{"invoice.version"}, func(r *request) { r.Invoice.Version = -1 }},

		{"event id of 201", []string{"event_id"}, func(r *request) { r.EventId = long(201) }},
		{"event id with NUL", []string{"event_id"}, func(r *request) { r.EventId = "\x00" }},
		{"source of 201", []string{"source"}, func(r *request) { r.Source = long(201) }},
		{"source with NUL", []string{"source"}, func(r *request) { r.Source = "\x00" }},
		{"event id and source of 200", nil, func(r *request) { r.EventId, r.Source = long(200), strings.Repeat("é", 100) }},

		{"unknown field of the request", []string{"15"}, func(r *request) { unknownField(r) }},
		{"unknown field of the grant", []string{"grant.15"}, func(r *request) { unknownField(r.Grant) }},
		{"unknown field of the evidence", []string{"invoice.15"}, func(r *request) { unknownField(r.Invoice) }},
		{"unknown field of a time", []string{"grant.starts_at.15"}, func(r *request) {
			r.Grant.StartsAt = at(1, 0)
			unknownField(r.Grant.StartsAt)
		}},
		{"several at once", []string{"idempotency_key", "grant.quantity", "invoice.version"}, func(r *request) {
			r.IdempotencyKey, r.Grant.Quantity, r.Invoice.Version = "", pointer[int64](0), -1
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := grant("t1", "K", "INV-1", test.change)
			if test.fields == nil {
				tenant := r.GetGrant().GetTenantId()
				b.want(t, newly, byNothing, r)
				for _, table := range []string{"operations", "entitlements", "entries", "invoices"} {
					b.exec(t, `DELETE FROM `+table+` WHERE tenant_id = $1`, tenant)
				}
				return
			}
			before := value[int](t, b, `SELECT count(*) FROM attempts`)
			_, err := b.GrantEntitlement(t.Context(), r)
			wantViolations(t, test.name, err, test.fields...)
			item := b.batch(t, r)[0]
			var fields []string
			for _, v := range item.GetRejection().GetViolations() {
				fields = append(fields, v.GetField())
			}
			if item.GetRejection().GetReason() != pb.RejectionReason_REJECTION_REASON_INVALID_REQUEST || !slices.Equal(fields, test.fields) {
				t.Errorf("as a batch item: %v", item)
			}
			if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != before || len(b.written(t)) != 0 {
				t.Errorf("a malformed request was written")
			}
		})
	}
}

func TestValidation_Batch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := &pb.BatchGrantEntitlementsRequest{Requests: []*pb.GrantEntitlementRequest{grant("t1", "K", "INV-1")}}
	unknownField(r)
	_, err := b.BatchGrantEntitlements(t.Context(), r)
	wantViolations(t, "unknown field of the batch", err, "15")
}

func TestValidation_GetOperation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	type request = pb.GetOperationRequest
	name := func(key string) *pb.GetOperationRequest_IdempotencyKey {
		return &pb.GetOperationRequest_IdempotencyKey{IdempotencyKey: key}
	}
	effect := func(invoice, typeName string, version int64) *pb.GetOperationRequest_BusinessKey {
		return &pb.GetOperationRequest_BusinessKey{BusinessKey: &pb.BusinessKey{
			InvoiceId: invoice, EntitlementType: typeName, OperationVersion: version,
		}}
	}
	payload := func() *pb.Grant { return grant("t1", "K", "INV-1").GetGrant() }
	for _, test := range []struct {
		name    string
		fields  []string
		request *request
	}{
		{"nothing", []string{"tenant_id", "name"}, &request{}},
		{"no tenant", []string{"tenant_id"}, &request{Name: name("K")}},
		{"malformed tenant", []string{"tenant_id"}, &request{TenantId: "t 1", Name: name("K")}},
		{"no name", []string{"name"}, &request{TenantId: "t1"}},
		{"empty key", []string{"idempotency_key"}, &request{TenantId: "t1", Name: name("")}},
		{"malformed key", []string{"idempotency_key"}, &request{TenantId: "t1", Name: name("K K")}},
		{"empty effect", []string{"business_key.invoice_id", "business_key.entitlement_type"}, &request{TenantId: "t1", Name: effect("", "", 0)}},
		{"malformed invoice", []string{"business_key.invoice_id"}, &request{TenantId: "t1", Name: effect("é", "a", 0)}},
		{"malformed type", []string{"business_key.entitlement_type"}, &request{TenantId: "t1", Name: effect("a", " ", 0)}},
		{"negative version", []string{"business_key.operation_version"}, &request{TenantId: "t1", Name: effect("a", "a", -1)}},
		{"unknown view", []string{"view"}, &request{TenantId: "t1", Name: name("K"), View: 9}},
		{"another tenant's grant", []string{"grant.tenant_id"}, &request{TenantId: "t2", Name: name("K"), Grant: payload()}},
		{"a grant of another invoice", []string{"grant.invoice_id"}, &request{TenantId: "t1", Name: effect("INV-2", "team_access", 0), Grant: payload()}},
		{"a grant of another type", []string{"grant.entitlement_type"}, &request{TenantId: "t1", Name: effect("INV-1", "sso", 0), Grant: payload()}},
		{"a grant of another version", []string{"grant.operation_version"}, &request{TenantId: "t1", Name: effect("INV-1", "team_access", 1), Grant: payload()}},
		{"a malformed grant", []string{"grant.quantity"}, &request{TenantId: "t1", Name: name("K"), Grant: func() *pb.Grant {
			g := payload()
			g.Quantity = pointer[int64](0)
			return g
		}()}},
		{"a grant with an unknown field", []string{"grant.15"}, &request{TenantId: "t1", Name: name("K"), Grant: func() *pb.Grant {
			g := payload()
			unknownField(g)
			return g
		}()}},
	} {
		_, err := b.GetOperation(t.Context(), test.request)
		wantViolations(t, test.name, err, test.fields...)
	}
}

func TestValidation_GetEntitlement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	type request = pb.GetEntitlementRequest
	id := func(s string) *pb.GetEntitlementRequest_EntitlementId {
		return &pb.GetEntitlementRequest_EntitlementId{EntitlementId: s}
	}
	const one = "0199e1a7-9a3c-7cc4-8f1e-2a64d4a3b1c0"
	for _, test := range []struct {
		name    string
		fields  []string
		request *request
	}{
		{"nothing", []string{"tenant_id", "name"}, &request{}},
		{"no tenant", []string{"tenant_id"}, &request{Name: id(one)}},
		{"no name", []string{"name"}, &request{TenantId: "t1"}},
		{"empty id", []string{"entitlement_id"}, &request{TenantId: "t1", Name: id("")}},
		{"upper-case id", []string{"entitlement_id"}, &request{TenantId: "t1", Name: id(strings.ToUpper(one))}},
		{"id in braces", []string{"entitlement_id"}, &request{TenantId: "t1", Name: id("{" + one + "}")}},
		{"id without hyphens", []string{"entitlement_id"}, &request{TenantId: "t1", Name: id(strings.ReplaceAll(one, "-", ""))}},
		{"malformed effect", []string{"business_key.invoice_id", "business_key.entitlement_type", "business_key.operation_version"},
			&request{TenantId: "t1", Name: &pb.GetEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{OperationVersion: -1}}}},
	} {
		_, err := b.GetEntitlement(t.Context(), test.request)
		wantViolations(t, test.name, err, test.fields...)
	}
	_, err := b.GetEntitlement(t.Context(), &request{TenantId: "t1", Name: id(one)})
	wantCode(t, "an id that was never granted", err, codes.NotFound)
}

// Validation stands before the database: what is malformed is told so also when no database answers.
func TestValidation_BeforeSQL(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.closeStore()
	_, err := b.GrantEntitlement(t.Context(), grant("t1", "", "INV-1"))
	wantViolations(t, "a malformed grant without a database", err, "idempotency_key")
}

// A client in another language may send a string that is not UTF-8; gRPC's own word for that is INTERNAL, as for a bug of the service.
func TestValidation_NotAMessage(t *testing.T) {
	b := setup(t)
	for _, method := range []string{
		pb.EntitlementService_GrantEntitlement_FullMethodName,
		pb.EntitlementService_GetOperation_FullMethodName,
		pb.OperatorService_ListDeliveries_FullMethodName,
	} {
		for what, request := range map[string]string{
			"a string that is not UTF-8": "\x0a\x01\xff",
			"a field that is cut off":    "\x0a\x09bill",
			"no fields at all":           strings.Repeat("\xff", 16),
		} {
			err := b.conn.Invoke(t.Context(), method, []byte(request), nil, grpc.ForceCodec(asBytes{}))
			wantViolations(t, method+" with "+what, err, "")
		}
	}
}

// asBytes sends requests as they are, and reads no answers.
type asBytes struct{}

func (asBytes) Marshal(request any) ([]byte, error) { return request.([]byte), nil }
func (asBytes) Unmarshal([]byte, any) error         { return nil }
func (asBytes) Name() string                        { return "proto" }
