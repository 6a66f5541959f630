package server

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// validateGrantRequest checks a single grant or one item of a batch.
func validateGrantRequest(r *entitlementv1.GrantEntitlementRequest) violations {
	var v violations
	checkUnknownFields(&v, "", r)
	v.check(isIdempotencyKey(r.GetIdempotencyKey()), "idempotency_key", ruleIdempotencyKey)
	if r.GetGrant() == nil {
		v.add("grant", ruleRequired)
	} else {
		checkGrant(&v, r.GetGrant())
	}
	if r.GetInvoice() == nil {
		v.add("invoice", ruleRequired)
	} else {
		v.check(isInvoiceState(r.GetInvoice().GetState()), "invoice.state", ruleInvoiceState)
		v.check(r.GetInvoice().GetVersion() >= 0, "invoice.version", ruleVersion)
	}
	checkNotify(&v, r.GetNotify())
	v.check(isText(r.GetEventId(), maxDiagnosticBytes), "event_id", ruleDiagnostic)
	v.check(isText(r.GetSource(), maxDiagnosticBytes), "source", ruleDiagnostic)
	return v
}

// validateBatchRequest checks what no item can be blamed for. The items are checked one by one, by validateGrantRequest, since
// a malformed item does not sink the others.
func validateBatchRequest(r *entitlementv1.BatchGrantEntitlementsRequest) violations {
	var v violations
	addUnknownFields(&v, "", r.ProtoReflect().GetUnknown())
	if n := len(r.GetRequests()); n < 1 || n > maxBatchItems {
		v.add("requests", ruleBatchItems)
	}
	v.check(proto.Size(r) <= maxBatchBytes, "requests", ruleBatchBytes)
	return v
}

func validateRecordInvoiceStateRequest(r *entitlementv1.RecordInvoiceStateRequest) violations {
	var v violations
	checkUnknownFields(&v, "", r)
	v.check(isIdempotencyKey(r.GetIdempotencyKey()), "idempotency_key", ruleIdempotencyKey)
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	v.check(isIdentifier(r.GetInvoiceId()), "invoice_id", ruleIdentifier)
	v.check(isInvoiceState(r.GetState()), "state", ruleInvoiceState)
	v.check(r.GetVersion() >= 1, "version", ruleRecordedVersion)
	checkNotify(&v, r.GetNotify())
	v.check(isText(r.GetEventId(), maxDiagnosticBytes), "event_id", ruleDiagnostic)
	v.check(isText(r.GetSource(), maxDiagnosticBytes), "source", ruleDiagnostic)
	return v
}

// turnRequest is what the requests to reverse and to reinstate have in common, which is everything.
type turnRequest interface {
	proto.Message
	GetIdempotencyKey() string
	GetTenantId() string
	GetEntitlementId() string
	GetBusinessKey() *entitlementv1.BusinessKey
	GetReason() string
	GetActor() string
	GetEventId() string
	GetSource() string
	GetNotify() *entitlementv1.Notify
}

func validateTurnRequest(r turnRequest) violations {
	var v violations
	checkUnknownFields(&v, "", r)
	v.check(isIdempotencyKey(r.GetIdempotencyKey()), "idempotency_key", ruleIdempotencyKey)
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	switch {
	case r.GetBusinessKey() != nil:
		checkBusinessKey(&v, r.GetBusinessKey())
	case r.GetEntitlementId() != "":
		v.check(isUUID(r.GetEntitlementId()), "entitlement_id", ruleUUID)
	default:
		v.add("target", ruleEntitlementName)
	}
	v.check(isStatement(r.GetReason(), maxReasonBytes), "reason", ruleReason)
	v.check(isStatement(r.GetActor(), maxActorBytes), "actor", ruleActor)
	checkNotify(&v, r.GetNotify())
	v.check(isText(r.GetEventId(), maxDiagnosticBytes), "event_id", ruleDiagnostic)
	v.check(isText(r.GetSource(), maxDiagnosticBytes), "source", ruleDiagnostic)
	return v
}

func validateListEntitlementsRequest(r *entitlementv1.ListEntitlementsRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	v.check(r.GetEntitlementType() == "" || isIdentifier(r.GetEntitlementType()), "entitlement_type", ruleIdentifier)
	v.check(r.GetInvoiceId() == "" || isIdentifier(r.GetInvoiceId()), "invoice_id", ruleIdentifier)
	_, known := entitlementv1.EntitlementState_name[int32(r.GetState())]
	v.check(known, "state", ruleEntitlementState)
	checkPageSize(&v, r.GetPageSize())
	return v
}

func validateCheckEntitlementRequest(r *entitlementv1.CheckEntitlementRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	v.check(isIdentifier(r.GetEntitlementType()), "entitlement_type", ruleIdentifier)
	checkTime(&v, "at", r.GetAt())
	return v
}

func validateListOperationsRequest(r *entitlementv1.ListOperationsRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	switch r.GetFilter().(type) {
	case *entitlementv1.ListOperationsRequest_EventId:
		v.check(r.GetEventId() != "" && isText(r.GetEventId(), maxDiagnosticBytes), "event_id", ruleEventFilter)
	case *entitlementv1.ListOperationsRequest_InvoiceId:
		v.check(isIdentifier(r.GetInvoiceId()), "invoice_id", ruleIdentifier)
	case *entitlementv1.ListOperationsRequest_EntitlementType:
		v.check(isIdentifier(r.GetEntitlementType()), "entitlement_type", ruleIdentifier)
	default:
		v.add("filter", ruleOperationFilter)
	}
	checkPageSize(&v, r.GetPageSize())
	return v
}

func checkPageSize(v *violations, size int32) {
	v.check(size >= 0 && size <= maxPageSize, "page_size", rulePageSize)
}

// validateGetOperationRequest checks a look-up. A grant in it is held to the rules of a write, since the answer says what a
// write would be told; elsewhere fields that this version does not know are ignored, as in every read.
func validateGetOperationRequest(r *entitlementv1.GetOperationRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	grant := r.GetGrant()
	switch r.GetName().(type) {
	case *entitlementv1.GetOperationRequest_IdempotencyKey:
		v.check(isIdempotencyKey(r.GetIdempotencyKey()), "idempotency_key", ruleIdempotencyKey)
	case *entitlementv1.GetOperationRequest_BusinessKey:
		checkBusinessKey(&v, r.GetBusinessKey())
	default:
		v.check(grant != nil, "name", ruleOperationName)
	}
	if grant != nil {
		checkUnknownFields(&v, "grant", grant)
		checkGrant(&v, grant)
		checkAgreement(&v, r)
	}
	v.check(isOperationView(r.GetView()), "view", ruleView)
	return v
}

func validateGetEntitlementRequest(r *entitlementv1.GetEntitlementRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	switch r.GetName().(type) {
	case *entitlementv1.GetEntitlementRequest_EntitlementId:
		v.check(isUUID(r.GetEntitlementId()), "entitlement_id", ruleUUID)
	case *entitlementv1.GetEntitlementRequest_BusinessKey:
		checkBusinessKey(&v, r.GetBusinessKey())
	default:
		v.add("name", ruleEntitlementName)
	}
	return v
}

func checkGrant(v *violations, g *entitlementv1.Grant) {
	v.check(isIdentifier(g.GetTenantId()), "grant.tenant_id", ruleIdentifier)
	v.check(isIdentifier(g.GetInvoiceId()), "grant.invoice_id", ruleIdentifier)
	v.check(isIdentifier(g.GetEntitlementType()), "grant.entitlement_type", ruleIdentifier)
	v.check(g.GetOperationVersion() >= 0, "grant.operation_version", ruleVersion)
	checkScope(v, g.GetScope())
	v.check(g.Quantity == nil || *g.Quantity >= 1, "grant.quantity", ruleQuantity)
	starts, expires := g.GetStartsAt(), g.GetExpiresAt()
	startsSet := checkTime(v, "grant.starts_at", starts)
	expiresSet := checkTime(v, "grant.expires_at", expires)
	if startsSet && expiresSet {
		after := expires.Seconds > starts.Seconds || expires.Seconds == starts.Seconds && expires.Nanos > starts.Nanos
		v.check(after, "grant.expires_at", ruleWindow)
	}
}

func checkScope(v *violations, scope map[string]string) {
	totalBytes, legal := 0, true
	for key, value := range scope {
		totalBytes += len(key) + len(value)
		legal = legal && isScopeKey(key) && isText(value, maxScopeValueBytes)
	}
	v.check(len(scope) <= maxScopeEntries, "grant.scope", ruleScopeEntries)
	v.check(totalBytes <= maxScopeBytes, "grant.scope", ruleScopeBytes)
	if legal {
		return
	}
	// In the order of the keys, so that the same request is told the same.
	for _, key := range slices.Sorted(maps.Keys(scope)) {
		if !isScopeKey(key) {
			v.add(scopePath(key), ruleScopeKey)
		}
		if !isText(scope[key], maxScopeValueBytes) {
			v.add(scopePath(key), ruleScopeValue)
		}
	}
}

func checkBusinessKey(v *violations, k *entitlementv1.BusinessKey) {
	v.check(isIdentifier(k.GetInvoiceId()), "business_key.invoice_id", ruleIdentifier)
	v.check(isIdentifier(k.GetEntitlementType()), "business_key.entitlement_type", ruleIdentifier)
	v.check(k.GetOperationVersion() >= 0, "business_key.operation_version", ruleVersion)
}

// checkAgreement compares the grant of a look-up with what else names the operation. An empty identifier has been
// reported already.
func checkAgreement(v *violations, r *entitlementv1.GetOperationRequest) {
	g := r.GetGrant()
	same := func(grant, lookup string) bool { return grant == "" || grant == lookup }
	v.check(same(g.GetTenantId(), r.GetTenantId()), "grant.tenant_id", ruleSameTenant)
	if k := r.GetBusinessKey(); k != nil {
		v.check(same(g.GetInvoiceId(), k.GetInvoiceId()), "grant.invoice_id", ruleSameEffect)
		v.check(same(g.GetEntitlementType(), k.GetEntitlementType()), "grant.entitlement_type", ruleSameEffect)
		v.check(g.GetOperationVersion() == k.GetOperationVersion(), "grant.operation_version", ruleSameEffect)
	}
}
