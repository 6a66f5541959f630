package server

import (
	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

func notifyIn(n *entitlementv1.Notify) *store.Notify {
	if n == nil {
		return nil
	}
	return &store.Notify{Recipient: n.GetRecipient(), Locale: n.GetLocale()}
}

func notifyOut(n *store.Notify) *entitlementv1.Notify {
	if n == nil {
		return nil
	}
	return &entitlementv1.Notify{Recipient: n.Recipient, Locale: n.Locale}
}

// deliveryNameIn reads a delivery's name, which is in canonical form.
func deliveryNameIn(r namedDelivery) store.DeliveryName {
	if ref := r.GetReference(); ref != nil {
		id, _ := uuid.Parse(ref.GetEntitlementId())
		return store.DeliveryName{EntitlementID: id, EntryNumber: ref.GetEntryNumber(), Destination: ref.GetDestination()}
	}
	if key := r.GetDeliveryKey(); key != "" {
		id, _ := store.DeliveryIDOf(key)
		return store.DeliveryName{ID: id}
	}
	id, _ := uuid.Parse(r.GetDeliveryId())
	return store.DeliveryName{ID: id}
}

// deliveryOut is nil for a delivery that was removed.
func deliveryOut(d *store.Delivery) *entitlementv1.Delivery {
	if d == nil {
		return nil
	}
	entry := &d.Event.Entry
	key := d.Event.Entitlement.Grant.BusinessKey()
	out := &entitlementv1.Delivery{
		TenantId: d.TenantID, DeliveryId: d.ID.String(), DeliveryKey: d.Key, Destination: d.Destination, State: d.State,
		Attempts: d.Attempts, Poison: d.Poison, LeaseUntil: timeOut(d.LeaseUntil), LastError: d.LastError,
		CreatedAt: timestamppb.New(d.CreatedAt), SettledAt: timeOut(d.SettledAt),
		EntitlementId: entry.EntitlementID.String(), EntryNumber: entry.Number, EntryKind: entry.Kind,
		BusinessKey: &entitlementv1.BusinessKey{
			InvoiceId: key.InvoiceID, EntitlementType: key.EntitlementType, OperationVersion: key.OperationVersion,
		},
		IdempotencyKey: entry.OperationKey, HeldByEntryNumber: d.HeldBy, Notify: notifyOut(d.Notify), Template: d.Template,
		BodyBytes: d.BodyBytes, ContentType: d.ContentType,
	}
	if d.State == entitlementv1.DeliveryState_DELIVERY_STATE_PENDING && d.HeldBy == 0 {
		out.NextAttemptAt = timestamppb.New(d.NextAttemptAt)
	}
	return out
}

func deliveryStoryOut(s *store.DeliveryStory) *entitlementv1.DeliveryStory {
	out := &entitlementv1.DeliveryStory{Delivery: deliveryOut(s.Delivery)}
	for i := range s.Attempts {
		a := &s.Attempts[i]
		out.Attempts = append(out.Attempts, &entitlementv1.DeliveryAttempt{
			AttemptNumber: a.Number, Worker: a.Worker, StartedAt: timestamppb.New(a.StartedAt), EndedAt: timeOut(a.EndedAt),
			Outcome: a.Outcome, StatusCode: int32(a.StatusCode), Error: a.Error, Note: a.Note,
		})
	}
	for i := range s.Actions {
		a := &s.Actions[i]
		out.Actions = append(out.Actions, &entitlementv1.OperatorAction{
			Kind: a.Kind, Attempts: a.Attempts, FromState: a.From, ToState: a.To, Actor: a.Actor, Reason: a.Reason, Caller: a.Caller,
			At: timestamppb.New(a.At),
		})
	}
	return out
}

func pauseOut(p *store.Pause) *entitlementv1.DestinationPause {
	return &entitlementv1.DestinationPause{
		Destination: p.Destination, PauseNumber: p.Number, PausedAt: timestamppb.New(p.PausedAt), ResumedAt: timeOut(p.ResumedAt),
		Actor: p.Actor, Reason: p.Reason, Caller: p.Caller,
	}
}

func notificationOut(n *store.Notification) *entitlementv1.Notification {
	return &entitlementv1.Notification{
		EntitlementId: n.EntitlementID.String(), EntryNumber: n.EntryNumber, Template: n.Template, Notify: notifyOut(&n.Notify),
		Destination: n.Destination, RequestedAt: timestamppb.New(n.RequestedAt), SentAt: timeOut(n.SentAt),
	}
}
