package server

import (
	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// checkNotify checks who is to be told, where a write says so.
func checkNotify(v *violations, n *entitlementv1.Notify) {
	if n == nil {
		return
	}
	v.check(isRecipient(n.GetRecipient()), "notify.recipient", ruleRecipient)
	v.check(isLocale(n.GetLocale()), "notify.locale", ruleLocale)
}

func validateListDeliveriesRequest(r *entitlementv1.ListDeliveriesRequest) violations {
	var v violations
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	v.check(r.GetDestination() == "" || isDestination(r.GetDestination()), "destination", ruleDestination)
	_, known := entitlementv1.DeliveryState_name[int32(r.GetState())]
	v.check(known, "state", ruleDeliveryState)
	checkPageSize(&v, r.GetPageSize())
	return v
}

// namedDelivery is a request about one delivery.
type namedDelivery interface {
	proto.Message
	GetTenantId() string
	GetDeliveryId() string
	GetDeliveryKey() string
	GetReference() *entitlementv1.DeliveryReference
}

func validateGetDeliveryRequest(r *entitlementv1.GetDeliveryRequest) violations {
	var v violations
	checkDeliveryName(&v, r)
	return v
}

func checkDeliveryName(v *violations, r namedDelivery) {
	v.check(isIdentifier(r.GetTenantId()), "tenant_id", ruleIdentifier)
	switch ref := r.GetReference(); {
	case ref != nil:
		v.check(isUUID(ref.GetEntitlementId()), "reference.entitlement_id", ruleUUID)
		v.check(ref.GetEntryNumber() >= 1, "reference.entry_number", ruleEntryNumber)
		v.check(isDestination(ref.GetDestination()), "reference.destination", ruleDestination)
	case r.GetDeliveryId() != "":
		v.check(isUUID(r.GetDeliveryId()), "delivery_id", ruleUUID)
	case r.GetDeliveryKey() != "":
		v.check(isDeliveryKey(r.GetDeliveryKey()), "delivery_key", ruleDeliveryKey)
	default:
		v.add("name", ruleDeliveryName)
	}
}

// orderRequest is what the operators' writes have in common.
type orderRequest interface {
	namedDelivery
	GetActor() string
	GetReason() string
}

func validateOrder(r orderRequest) violations {
	var v violations
	checkUnknownFields(&v, "", r)
	checkDeliveryName(&v, r)
	checkStatements(&v, r)
	return v
}

func checkStatements(v *violations, r interface {
	GetActor() string
	GetReason() string
}) {
	v.check(isStatement(r.GetActor(), maxActorBytes), "actor", ruleActor)
	v.check(isStatement(r.GetReason(), maxReasonBytes), "reason", ruleReason)
}

func validateResumeDestinationRequest(r *entitlementv1.ResumeDestinationRequest) violations {
	var v violations
	checkUnknownFields(&v, "", r)
	v.check(isDestination(r.GetDestination()), "destination", ruleDestination)
	v.check(r.GetPauseNumber() >= 0, "pause_number", ruleVersion)
	checkStatements(&v, r)
	return v
}

func validateRedeliverDeliveryRequest(r *entitlementv1.RedeliverDeliveryRequest) violations {
	v := validateOrder(r)
	v.check(r.GetObservedAttempts() >= 0, "observed_attempts", ruleVersion)
	return v
}

func validateResolveDeliveryRequest(r *entitlementv1.ResolveDeliveryRequest) violations {
	v := validateOrder(r)
	switch r.GetResolution() {
	case entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED, entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN:
	default:
		v.add("resolution", ruleResolution)
	}
	v.check(r.GetObservedAttempts() >= 0, "observed_attempts", ruleVersion)
	return v
}
