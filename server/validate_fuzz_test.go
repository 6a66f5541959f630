package server

import (
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// The contract's rules once more, from its words instead of from the code: with patterns and standard types.
var (
	keyPattern      = regexp.MustCompile(`\A[A-Za-z0-9._:/~@+=-]{1,200}\z`)
	namePattern     = regexp.MustCompile(`\A[[:graph:]]{1,128}\z`)
	scopeKeyPattern = regexp.MustCompile(`\A[a-z][a-z0-9_.]{0,62}\z`)
	localePattern   = regexp.MustCompile(`\A[A-Za-z0-9-]{2,35}\z`)

	destinationPattern = regexp.MustCompile(`\A[a-z][a-z0-9_-]{0,62}\z`)
	deliveryKeyPattern = regexp.MustCompile(`\A[0-9a-f]{64}\z`)

	uuidPattern = regexp.MustCompile(`\A[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\z`)
)

func textOracle(s string, maxBytes int) bool {
	return len(s) <= maxBytes && utf8.ValidString(s) && !strings.ContainsRune(s, 0)
}

func timeOracle(ts *timestamppb.Timestamp) bool {
	if ts == nil {
		return true
	}
	at := ts.AsTime()
	return ts.CheckValid() == nil && at.Equal(at.Truncate(time.Microsecond))
}

func grantOracle(g *entitlementv1.Grant) bool {
	total := 0
	for k, v := range g.GetScope() {
		total += len(k) + len(v)
		if !scopeKeyPattern.MatchString(k) || !textOracle(v, 256) {
			return false
		}
	}
	starts, expires := g.GetStartsAt(), g.GetExpiresAt()
	return namePattern.MatchString(g.GetTenantId()) &&
		namePattern.MatchString(g.GetInvoiceId()) &&
		namePattern.MatchString(g.GetEntitlementType()) &&
		g.GetOperationVersion() >= 0 &&
		len(g.GetScope()) <= 32 && total <= 2048 &&
		(g.Quantity == nil || g.GetQuantity() > 0) &&
		timeOracle(starts) && timeOracle(expires) &&
		(starts == nil || expires == nil || starts.AsTime().Before(expires.AsTime()))
}

func grantRequestOracle(r *entitlementv1.GrantEntitlementRequest) bool {
	_, known := entitlementv1.InvoiceState_name[int32(r.GetInvoice().GetState())]
	return knowsEveryField(r) &&
		keyPattern.MatchString(r.GetIdempotencyKey()) &&
		r.GetGrant() != nil && grantOracle(r.GetGrant()) &&
		r.GetInvoice() != nil && known && r.GetInvoice().GetState() != 0 && r.GetInvoice().GetVersion() >= 0 &&
		textOracle(r.GetEventId(), 200) && textOracle(r.GetSource(), 200) && notifyOracle(r.GetNotify())
}

func notifyOracle(n *entitlementv1.Notify) bool {
	to := n.GetRecipient()
	odd := strings.ContainsFunc(to, func(r rune) bool { return unicode.In(r, unicode.White_Space, unicode.Cc) })
	return n == nil || localePattern.MatchString(n.GetLocale()) &&
		len(to) >= 3 && textOracle(to, 254) && !odd &&
		strings.Count(to, "@") == 1 && strings.Trim(to, "@") == to
}

func resolveOracle(r *entitlementv1.ResolveDeliveryRequest) bool {
	named := false
	switch name := r.GetName().(type) {
	case *entitlementv1.ResolveDeliveryRequest_DeliveryId:
		named = uuidPattern.MatchString(name.DeliveryId)
	case *entitlementv1.ResolveDeliveryRequest_DeliveryKey:
		named = deliveryKeyPattern.MatchString(name.DeliveryKey)
	case *entitlementv1.ResolveDeliveryRequest_Reference:
		ref := r.GetReference()
		named = uuidPattern.MatchString(ref.GetEntitlementId()) && ref.GetEntryNumber() > 0 && destinationPattern.MatchString(ref.GetDestination())
	}
	line := func(s string, maxBytes int) bool {
		return s != "" && textOracle(s, maxBytes) && !strings.ContainsFunc(s, func(r rune) bool { return unicode.In(r, unicode.Cc) })
	}
	return knowsEveryField(r) && namePattern.MatchString(r.GetTenantId()) && named && r.GetObservedAttempts() >= 0 &&
		(r.GetResolution() == 1 || r.GetResolution() == 2) && line(r.GetActor(), 200) && line(r.GetReason(), 500)
}

func businessKeyOracle(k *entitlementv1.BusinessKey) bool {
	return namePattern.MatchString(k.GetInvoiceId()) && namePattern.MatchString(k.GetEntitlementType()) && k.GetOperationVersion() >= 0
}

func getOperationOracle(r *entitlementv1.GetOperationRequest) bool {
	_, knownView := entitlementv1.OperationView_name[int32(r.GetView())]
	if !knownView || !namePattern.MatchString(r.GetTenantId()) {
		return false
	}
	g := r.GetGrant()
	if g != nil && !(knowsEveryField(g) && grantOracle(g) && g.GetTenantId() == r.GetTenantId()) {
		return false
	}
	switch name := r.GetName().(type) {
	case *entitlementv1.GetOperationRequest_IdempotencyKey:
		return keyPattern.MatchString(name.IdempotencyKey)
	case *entitlementv1.GetOperationRequest_BusinessKey:
		of := &entitlementv1.BusinessKey{
			InvoiceId: g.GetInvoiceId(), EntitlementType: g.GetEntitlementType(), OperationVersion: g.GetOperationVersion(),
		}
		known := &entitlementv1.BusinessKey{
			InvoiceId:        name.BusinessKey.GetInvoiceId(),
			EntitlementType:  name.BusinessKey.GetEntitlementType(),
			OperationVersion: name.BusinessKey.GetOperationVersion(),
		}
		return businessKeyOracle(known) && (g == nil || proto.Equal(of, known))
	}
	return g != nil
}

func getEntitlementOracle(r *entitlementv1.GetEntitlementRequest) bool {
	if !namePattern.MatchString(r.GetTenantId()) {
		return false
	}
	if r.GetBusinessKey() != nil {
		return businessKeyOracle(r.GetBusinessKey())
	}
	return uuidPattern.MatchString(r.GetEntitlementId())
}

// knowsEveryField compares a message with what is left of it when unknown fields are dropped on the way through the wire.
func knowsEveryField(m proto.Message) bool {
	wire, err := proto.Marshal(m)
	if err != nil {
		return false
	}
	without := m.ProtoReflect().New().Interface()
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(wire, without); err != nil {
		return false
	}
	return proto.Equal(m, without)
}

// FuzzValidate decodes arbitrary bytes as each request: nothing panics, what passes is exactly what the contract's words
// allow, and what is refused makes a status of bounded size.
func FuzzValidate(f *testing.F) {
	seed := func(m proto.Message) {
		wire, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(wire)
	}
	grant := validGrantRequest()
	seed(grant)
	seed(&entitlementv1.BatchGrantEntitlementsRequest{Requests: []*entitlementv1.GrantEntitlementRequest{grant, {}}})
	seed(validGetOperationRequest())
	seed(&entitlementv1.GetEntitlementRequest{TenantId: "acme", Name: &entitlementv1.GetEntitlementRequest_EntitlementId{
		EntitlementId: "0198f3a2-7c1e-7abc-8def-0123456789ab",
	}})
	seed(withUnknown(validGrantRequest(), 99))
	resolve := &entitlementv1.ResolveDeliveryRequest{
		TenantId: "acme", Resolution: entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN, ObservedAttempts: 2,
		Name: &entitlementv1.ResolveDeliveryRequest_Reference{Reference: &entitlementv1.DeliveryReference{
			EntitlementId: "0198f3a2-7c1e-7abc-8def-0123456789ab", EntryNumber: 1, Destination: "crm",
		}},
		Actor: "ana@desk", Reason: "CASE-1",
	}
	seed(resolve)
	resolve.Name = &entitlementv1.ResolveDeliveryRequest_DeliveryKey{DeliveryKey: strings.Repeat("a", 64)}
	seed(resolve)
	for _, edit := range []func(*entitlementv1.Grant){
		func(g *entitlementv1.Grant) { g.Scope = scopeOf(33) },
		func(g *entitlementv1.Grant) { g.Scope = scopeOfBytes(2048) },
		func(g *entitlementv1.Grant) { g.Scope = map[string]string{"Bad Key": "\x00"} },
		func(g *entitlementv1.Grant) { g.ExpiresAt = g.StartsAt },
		func(g *entitlementv1.Grant) { g.StartsAt.Nanos = 1 },
		func(g *entitlementv1.Grant) { withUnknown(g.ExpiresAt, 7) },
	} {
		edited := validGrantRequest()
		edit(edited.Grant)
		seed(edited)
		lookup := validGetOperationRequest()
		edit(lookup.Grant)
		seed(lookup)
	}

	f.Fuzz(func(t *testing.T, wire []byte) {
		judge := func(m proto.Message, v violations, valid bool) {
			if v.none() != valid {
				t.Errorf("%T: the violations are %q, and the contract says %v\n%v", m, told(v), valid, m)
			}
			if !v.none() {
				checkInvalidStatus(t, v)
			}
		}
		var grant entitlementv1.GrantEntitlementRequest
		if proto.Unmarshal(wire, &grant) == nil {
			judge(&grant, validateGrantRequest(&grant), grantRequestOracle(&grant))
		}
		var batch entitlementv1.BatchGrantEntitlementsRequest
		if proto.Unmarshal(wire, &batch) == nil {
			n := len(batch.GetRequests())
			valid := n >= 1 && n <= 1000 && len(batch.ProtoReflect().GetUnknown()) == 0 && proto.Size(&batch) <= 1<<20
			judge(&batch, validateBatchRequest(&batch), valid)
			for _, item := range batch.GetRequests() {
				judge(item, validateGrantRequest(item), grantRequestOracle(item))
			}
		}
		var operation entitlementv1.GetOperationRequest
		if proto.Unmarshal(wire, &operation) == nil {
			judge(&operation, validateGetOperationRequest(&operation), getOperationOracle(&operation))
		}
		var entitlement entitlementv1.GetEntitlementRequest
		if proto.Unmarshal(wire, &entitlement) == nil {
			judge(&entitlement, validateGetEntitlementRequest(&entitlement), getEntitlementOracle(&entitlement))
		}
		var resolve entitlementv1.ResolveDeliveryRequest
		if proto.Unmarshal(wire, &resolve) == nil {
			judge(&resolve, validateResolveDeliveryRequest(&resolve), resolveOracle(&resolve))
		}
	})
}
