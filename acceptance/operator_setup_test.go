package acceptance_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

const (
	pending    = pb.DeliveryState_DELIVERY_STATE_PENDING
	sending    = pb.DeliveryState_DELIVERY_STATE_SENDING
	unknown    = pb.DeliveryState_DELIVERY_STATE_UNKNOWN
	delivered  = pb.DeliveryState_DELIVERY_STATE_DELIVERED
	dead       = pb.DeliveryState_DELIVERY_STATE_DEAD
	discarded  = pb.DeliveryState_DELIVERY_STATE_DISCARDED
	wasSent    = pb.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED
	sendAgain  = pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN
	theActor   = "ana@desk"
	theReason  = "CRM repaired, see CASE-1"
	crm        = "crm"
	mailbox    = "mailbox"
	mailLayout = "welcome"
)

// operated is a server whose deliveries the test sends by itself, by way of the store, and its operators' service.
type operated struct {
	*bundle
	operator pb.OperatorServiceClient
}

func setupOperated(t testing.TB, destinations ...store.Destination) *operated {
	t.Helper()
	b := setup(t, to(destinations...))
	return &operated{b, pb.NewOperatorServiceClient(b.conn)}
}

// to has entries delivered to destinations.
func to(destinations ...store.Destination) func(*settings) {
	return func(s *settings) { s.store.Destinations = destinations }
}

// claim begins a call for whatever is due at a destination.
func (o *operated) claim(t testing.TB, destination string) []*store.Delivery {
	t.Helper()
	claimed, err := o.store.Claim(t.Context(), destination, "worker", time.Minute, 100, func(d *store.Delivery) ([]byte, string, error) {
		// Another body each time: what is sent again must be what was rendered first.
		return []byte(uuid.NewString()), "text/plain", nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return claimed
}

// claimOne is claim where one delivery must be due.
func (o *operated) claimOne(t testing.TB, destination string) *store.Delivery {
	t.Helper()
	claimed := o.claim(t, destination)
	if len(claimed) != 1 {
		t.Fatalf("%d deliveries are due, want 1", len(claimed))
	}
	return claimed[0]
}

// end records what came of a call.
func (o *operated) end(t testing.TB, d *store.Delivery, outcome store.DeliveryOutcome, statusCode int, text string) {
	t.Helper()
	lost, err := o.store.Settle(t.Context(), []store.DeliveryResult{{Delivery: d, Outcome: outcome, StatusCode: statusCode, Error: text}})
	if err != nil || len(lost) > 0 {
		t.Fatalf("settling: %d lost, %v", len(lost), err)
	}
}

func (o *operated) redeliver(t testing.TB, d *store.Delivery, observed int64) *pb.RedeliverDeliveryResponse {
	t.Helper()
	resp, err := o.operator.RedeliverDelivery(t.Context(), &pb.RedeliverDeliveryRequest{
		TenantId: d.TenantID, Name: &pb.RedeliverDeliveryRequest_DeliveryKey{DeliveryKey: d.Key},
		ObservedAttempts: observed, Actor: theActor, Reason: theReason,
	})
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func (o *operated) discard(t testing.TB, d *store.Delivery) *pb.DiscardDeliveryResponse {
	t.Helper()
	resp, err := o.operator.DiscardDelivery(t.Context(), &pb.DiscardDeliveryRequest{
		TenantId: d.TenantID, Name: &pb.DiscardDeliveryRequest_DeliveryId{DeliveryId: d.ID.String()}, Actor: theActor, Reason: theReason,
	})
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func (o *operated) resolve(t testing.TB, id string, as pb.DeliveryResolution, observed int64) *pb.ResolveDeliveryResponse {
	t.Helper()
	resp, err := o.operator.ResolveDelivery(t.Context(), &pb.ResolveDeliveryRequest{
		TenantId: "t1", Name: &pb.ResolveDeliveryRequest_DeliveryId{DeliveryId: id}, Resolution: as,
		ObservedAttempts: observed, Actor: theActor, Reason: theReason,
	})
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// list is a page of a tenant's deliveries in a state.
func (o *operated) list(t testing.TB, tenant string, state pb.DeliveryState) []*pb.Delivery {
	t.Helper()
	resp, err := o.operator.ListDeliveries(t.Context(), &pb.ListDeliveriesRequest{TenantId: tenant, State: state})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetDeliveries()
}

func (o *operated) story(t testing.TB, r *pb.GetDeliveryRequest) *pb.DeliveryStory {
	t.Helper()
	resp, err := o.operator.GetDelivery(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetStory()
}

// ordered is the answer to any order of an operator.
type ordered interface {
	GetOutcome() pb.Outcome
	GetDelivery() *pb.Delivery
	GetRejection() *pb.Rejection
}

// wantOrdered checks an answer by its outcome, and then by the reason of a rejection or the state that the delivery has.
func wantOrdered(t testing.TB, a ordered, outcome pb.Outcome, then fmt.Stringer) {
	t.Helper()
	got := a.GetDelivery().GetState().String()
	if a.GetRejection() != nil {
		got = a.GetRejection().GetReason().String()
	}
	if a.GetOutcome() != outcome || got != then.String() {
		t.Errorf("got %v %s, want %v %v", a.GetOutcome(), got, outcome, then)
	}
}

// reverse takes the entitlement of an invoice back.
func (o *operated) reverse(t testing.TB, tenant, key, invoice string) {
	t.Helper()
	resp, err := o.ReverseEntitlement(t.Context(), &pb.ReverseEntitlementRequest{
		IdempotencyKey: key, TenantId: tenant, Actor: theActor, Reason: "chargeback",
		Target: &pb.ReverseEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{InvoiceId: invoice, EntitlementType: "team_access"}},
	})
	if err != nil || resp.GetOutcome() != newly {
		t.Fatalf("reversing %s: %v %v", invoice, resp, err)
	}
}

func notify(recipient, locale string) func(*pb.GrantEntitlementRequest) {
	return func(r *pb.GrantEntitlementRequest) { r.Notify = &pb.Notify{Recipient: recipient, Locale: locale} }
}
