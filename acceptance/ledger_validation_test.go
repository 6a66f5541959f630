package acceptance_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// Every rule about the ledger's requests, broken alone. Nothing malformed reaches the database, and the key stays free.
func TestValidation_Ledger(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.want(t, newly, byNothing, grant("t1", "K", "INV-1")).GetEntitlement().GetEntitlementId()
	attempts := value[int](t, b, `SELECT count(*) FROM attempts`)

	long := strings.Repeat("x", 201)
	type change = func(*pb.RecordInvoiceStateRequest)
	for name, test := range map[string]struct {
		change change
		fields []string
	}{
		"no key":            {func(r *pb.RecordInvoiceStateRequest) { r.IdempotencyKey = "" }, []string{"idempotency_key"}},
		"long key":          {func(r *pb.RecordInvoiceStateRequest) { r.IdempotencyKey = long }, []string{"idempotency_key"}},
		"no tenant":         {func(r *pb.RecordInvoiceStateRequest) { r.TenantId = "" }, []string{"tenant_id"}},
		"space in invoice":  {func(r *pb.RecordInvoiceStateRequest) { r.InvoiceId = "INV 1" }, []string{"invoice_id"}},
		"no state":          {func(r *pb.RecordInvoiceStateRequest) { r.State = 0 }, []string{"state"}},
		"unknown state":     {func(r *pb.RecordInvoiceStateRequest) { r.State = 5 }, []string{"state"}},
		"no version":        {func(r *pb.RecordInvoiceStateRequest) { r.Version = 0 }, []string{"version"}},
		"negative version":  {func(r *pb.RecordInvoiceStateRequest) { r.Version = -1 }, []string{"version"}},
		"long event":        {func(r *pb.RecordInvoiceStateRequest) { r.EventId = long }, []string{"event_id"}},
		"NUL in the source": {func(r *pb.RecordInvoiceStateRequest) { r.Source = "a\x00" }, []string{"source"}},
		"unknown field":     {func(r *pb.RecordInvoiceStateRequest) { unknownField(r) }, []string{"15"}},
		"nothing at all": {func(r *pb.RecordInvoiceStateRequest) { proto.Reset(r) },
			[]string{"idempotency_key", "tenant_id", "invoice_id", "state", "version"}},
	} {
		r := recording("t1", "R", "INV-9", paid, 1)
		test.change(r)
		_, err := b.RecordInvoiceState(t.Context(), r)
		wantViolations(t, "record: "+name, err, test.fields...)
	}

	for name, test := range map[string]struct {
		change func(*pb.ReverseEntitlementRequest)
		fields []string
	}{
		"no key":           {func(r *pb.ReverseEntitlementRequest) { r.IdempotencyKey = "" }, []string{"idempotency_key"}},
		"no tenant":        {func(r *pb.ReverseEntitlementRequest) { r.TenantId = "" }, []string{"tenant_id"}},
		"no target":        {func(r *pb.ReverseEntitlementRequest) { r.Target = nil }, []string{"target"}},
		"an empty id":      {func(r *pb.ReverseEntitlementRequest) { r.Target = &pb.ReverseEntitlementRequest_EntitlementId{} }, []string{"target"}},
		"an upper-case id": {byID(strings.ToUpper(id)), []string{"entitlement_id"}},
		"an id in braces":  {byID("{" + id + "}"), []string{"entitlement_id"}},
		"an empty effect": {func(r *pb.ReverseEntitlementRequest) {
			r.Target = &pb.ReverseEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{}}
		}, []string{"business_key.invoice_id", "business_key.entitlement_type"}},
		"a negative version":    {func(r *pb.ReverseEntitlementRequest) { r.GetBusinessKey().OperationVersion = -1 }, []string{"business_key.operation_version"}},
		"no reason":             {func(r *pb.ReverseEntitlementRequest) { r.Reason = "" }, []string{"reason"}},
		"long reason":           {func(r *pb.ReverseEntitlementRequest) { r.Reason = strings.Repeat("x", 501) }, []string{"reason"}},
		"blank reason":          {func(r *pb.ReverseEntitlementRequest) { r.Reason = " \u3000" }, []string{"reason"}},
		"two lines of reason":   {func(r *pb.ReverseEntitlementRequest) { r.Reason = "a\nb" }, []string{"reason"}},
		"no actor":              {func(r *pb.ReverseEntitlementRequest) { r.Actor = "" }, []string{"actor"}},
		"long actor":            {func(r *pb.ReverseEntitlementRequest) { r.Actor = long }, []string{"actor"}},
		"long event":            {func(r *pb.ReverseEntitlementRequest) { r.EventId = long }, []string{"event_id"}},
		"long source":           {func(r *pb.ReverseEntitlementRequest) { r.Source = long }, []string{"source"}},
		"unknown field":         {func(r *pb.ReverseEntitlementRequest) { unknownField(r) }, []string{"15"}},
		"unknown field, nested": {func(r *pb.ReverseEntitlementRequest) { unknownField(r.GetBusinessKey()) }, []string{"business_key.15"}},
		"nothing at all": {func(r *pb.ReverseEntitlementRequest) { proto.Reset(r) },
			[]string{"idempotency_key", "tenant_id", "target", "reason", "actor"}},
	} {
		r := reversal("t1", "CASE", "INV-1", "team_access")
		test.change(r)
		_, err := b.ReverseEntitlement(t.Context(), r)
		wantViolations(t, "reverse: "+name, err, test.fields...)

		// The two requests have the same fields, by the same numbers.
		wire, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var same pb.ReinstateEntitlementRequest
		if err := proto.Unmarshal(wire, &same); err != nil {
			t.Fatal(err)
		}
		_, err = b.ReinstateEntitlement(t.Context(), &same)
		wantViolations(t, "reinstate: "+name, err, test.fields...)
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != attempts {
		t.Errorf("malformed requests left %d attempts", n-attempts)
	}

	// The longest that passes.
	longest := reversal("t1", strings.Repeat("K", 200), "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) {
		r.Reason, r.Actor = strings.Repeat("ü", 250), strings.Repeat("ü", 100)
		r.EventId, r.Source = strings.Repeat("e", 200), strings.Repeat("s", 200)
	})
	if op := b.turn(t, newly, byNothing, longest).GetOperation(); op.GetReason() != longest.GetReason() || op.GetActor() != longest.GetActor() {
		t.Errorf("the operation: %v", op)
	}
	b.record(t, newly, byNothing, recording("t1", "R", strings.Repeat("I", 128), paid, 9223372036854775807))
}

func byID(id string) func(*pb.ReverseEntitlementRequest) {
	return func(r *pb.ReverseEntitlementRequest) {
		r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: id}
	}
}
