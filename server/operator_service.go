package server

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// Breakers tells what this process makes of each destination that it delivers to, by the destination's name.
type Breakers func() map[string]entitlementv1.BreakerState

// OperatorService answers the people who look after deliveries.
type OperatorService struct {
	entitlementv1.UnsafeOperatorServiceServer
	store     *store.Store
	breakers  Breakers
	telemetry *telemetry.Telemetry
	log       *slog.Logger
}

// RegisterOperatorService adds the service to a gRPC server. breakers is nil where the process delivers nothing.
func RegisterOperatorService(r grpc.ServiceRegistrar, s *store.Store, breakers Breakers, t *telemetry.Telemetry, log *slog.Logger) {
	entitlementv1.RegisterOperatorServiceServer(wellFormed{r}, &OperatorService{store: s, breakers: breakers, telemetry: t, log: log})
}

// ListDeliveries implements the contract.
func (s *OperatorService) ListDeliveries(ctx context.Context, r *entitlementv1.ListDeliveriesRequest) (*entitlementv1.ListDeliveriesResponse, error) {
	if v := validateListDeliveriesRequest(r); !v.none() {
		return nil, invalid(v)
	}
	filter := store.DeliveryFilter{TenantID: r.GetTenantId(), Destination: r.GetDestination(), State: r.GetState()}
	found, next, err := s.store.Deliveries(ctx, filter, pageIn(r))
	if err != nil {
		return nil, listStatus(ctx, err, s.log)
	}
	pauses, err := s.store.Pauses(ctx)
	if err != nil {
		return nil, listStatus(ctx, err, s.log)
	}
	out := &entitlementv1.ListDeliveriesResponse{NextPageToken: next, Destinations: s.destinationsOut(found, pauses)}
	for _, d := range found {
		out.Deliveries = append(out.Deliveries, deliveryOut(d))
	}
	return out, nil
}

// destinationsOut is what this process makes of each destination that it delivers to, and of each that is named or paused, by their names.
func (s *OperatorService) destinationsOut(named []*store.Delivery, pauses []store.Pause) []*entitlementv1.DestinationStatus {
	states := make(map[string]entitlementv1.BreakerState)
	for _, d := range named {
		states[d.Destination] = entitlementv1.BreakerState_BREAKER_STATE_UNSPECIFIED
	}
	if s.breakers != nil {
		maps.Copy(states, s.breakers())
	}
	held := make(map[string]*entitlementv1.DestinationPause)
	for i := range pauses {
		p := &pauses[i]
		states[p.Destination], held[p.Destination] = entitlementv1.BreakerState_BREAKER_STATE_PAUSED, pauseOut(p)
	}
	var out []*entitlementv1.DestinationStatus
	for _, name := range slices.Sorted(maps.Keys(states)) {
		out = append(out, &entitlementv1.DestinationStatus{Destination: name, Breaker: states[name], Pause: held[name]})
	}
	return out
}

// GetDelivery implements the contract.
func (s *OperatorService) GetDelivery(ctx context.Context, r *entitlementv1.GetDeliveryRequest) (*entitlementv1.GetDeliveryResponse, error) {
	if v := validateGetDeliveryRequest(r); !v.none() {
		return nil, invalid(v)
	}
	story, err := s.store.Delivery(ctx, r.GetTenantId(), deliveryNameIn(r))
	if err != nil {
		return nil, s.orderStatus(ctx, err, untyped)
	}
	return &entitlementv1.GetDeliveryResponse{Story: deliveryStoryOut(story)}, nil
}

// RedeliverDelivery implements the contract.
func (s *OperatorService) RedeliverDelivery(ctx context.Context, r *entitlementv1.RedeliverDeliveryRequest) (*entitlementv1.RedeliverDeliveryResponse, error) {
	if v := validateRedeliverDeliveryRequest(r); !v.none() {
		return nil, invalid(v)
	}
	order := orderIn(ctx, r)
	order.ObservedAttempts = r.GetObservedAttempts()
	a, err := s.store.Redeliver(ctx, order)
	if err != nil {
		return nil, s.orderStatus(ctx, err, func(f *store.Failure) proto.Message {
			return &entitlementv1.RedeliverDeliveryResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
				Result:  &entitlementv1.RedeliverDeliveryResponse_Failure{Failure: failureOut(f)},
			}
		})
	}
	s.describe(ctx, &a)
	out := &entitlementv1.RedeliverDeliveryResponse{Outcome: a.Outcome, Delivery: deliveryOut(a.Delivery)}
	if a.Rejection != nil {
		out.Result = &entitlementv1.RedeliverDeliveryResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	}
	return out, nil
}

// DiscardDelivery implements the contract.
func (s *OperatorService) DiscardDelivery(ctx context.Context, r *entitlementv1.DiscardDeliveryRequest) (*entitlementv1.DiscardDeliveryResponse, error) {
	if v := validateOrder(r); !v.none() {
		return nil, invalid(v)
	}
	order := orderIn(ctx, r)
	a, err := s.store.Discard(ctx, order)
	if err != nil {
		return nil, s.orderStatus(ctx, err, func(f *store.Failure) proto.Message {
			return &entitlementv1.DiscardDeliveryResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
				Result:  &entitlementv1.DiscardDeliveryResponse_Failure{Failure: failureOut(f)},
			}
		})
	}
	s.describe(ctx, &a)
	out := &entitlementv1.DiscardDeliveryResponse{Outcome: a.Outcome, Delivery: deliveryOut(a.Delivery)}
	if a.Rejection != nil {
		out.Result = &entitlementv1.DiscardDeliveryResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	}
	return out, nil
}

// ResolveDelivery implements the contract.
func (s *OperatorService) ResolveDelivery(ctx context.Context, r *entitlementv1.ResolveDeliveryRequest) (*entitlementv1.ResolveDeliveryResponse, error) {
	if v := validateResolveDeliveryRequest(r); !v.none() {
		return nil, invalid(v)
	}
	order := orderIn(ctx, r)
	order.ObservedAttempts = r.GetObservedAttempts()
	a, err := s.store.Resolve(ctx, order, r.GetResolution())
	if err != nil {
		return nil, s.orderStatus(ctx, err, func(f *store.Failure) proto.Message {
			return &entitlementv1.ResolveDeliveryResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
				Result:  &entitlementv1.ResolveDeliveryResponse_Failure{Failure: failureOut(f)},
			}
		})
	}
	s.describe(ctx, &a)
	out := &entitlementv1.ResolveDeliveryResponse{Outcome: a.Outcome, Delivery: deliveryOut(a.Delivery)}
	if a.Rejection != nil {
		out.Result = &entitlementv1.ResolveDeliveryResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	}
	return out, nil
}

// ResumeDestination implements the contract.
func (s *OperatorService) ResumeDestination(ctx context.Context, r *entitlementv1.ResumeDestinationRequest) (*entitlementv1.ResumeDestinationResponse, error) {
	if v := validateResumeDestinationRequest(r); !v.none() {
		return nil, invalid(v)
	}
	outcome, pause, err := s.store.Resume(ctx, store.ResumeOrder{
		Destination: r.GetDestination(), PauseNumber: r.GetPauseNumber(), Actor: r.GetActor(), Reason: r.GetReason(), Caller: callerOf(ctx),
	})
	switch {
	case errors.Is(err, store.ErrUnknownDestination):
		return nil, status.Error(codes.NotFound, "no such destination is known: the file of the replica that answers has none, the database has no pause of it, "+
			"and nothing waits for it")
	case errors.Is(err, store.ErrNotFound) && r.GetPauseNumber() != 0:
		return nil, status.Error(codes.NotFound, "the destination never had a pause of that number")
	case errors.Is(err, store.ErrNotFound):
		return nil, status.Error(codes.NotFound, "the destination was never paused")
	}
	if err != nil {
		return nil, s.orderStatus(ctx, err, func(f *store.Failure) proto.Message {
			return &entitlementv1.ResumeDestinationResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
				Result:  &entitlementv1.ResumeDestinationResponse_Failure{Failure: failureOut(f)},
			}
		})
	}
	trace.SpanFromContext(ctx).SetAttributes(
		store.OutcomeAttribute.String(outcome.String()),
		attribute.String("grantd.delivery.destination", r.GetDestination()),
	)
	return &entitlementv1.ResumeDestinationResponse{Outcome: outcome, Pause: pauseOut(pause)}, nil
}

func orderIn(ctx context.Context, r orderRequest) store.DeliveryOrder {
	return store.DeliveryOrder{
		TenantID: r.GetTenantId(), Delivery: deliveryNameIn(r), Actor: r.GetActor(), Reason: r.GetReason(), Caller: callerOf(ctx),
	}
}

// describe puts the answer on the call's span, with the key of the operation whose event it is about.
func (s *OperatorService) describe(ctx context.Context, a *store.OrderAnswer) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(store.OutcomeAttribute.String(a.Outcome.String()))
	if a.Rejection != nil {
		span.SetAttributes(store.ReasonAttribute.String(a.Rejection.Reason.String()))
	}
	if a.Delivery != nil {
		s.telemetry.WithKey(ctx, a.Delivery.Event.Entry.OperationKey)
		span.SetAttributes(attribute.String("grantd.delivery.key", a.Delivery.Key))
	}
}

// orderStatus is status with the typed response as a detail of a retryable failure.
func (s *OperatorService) orderStatus(ctx context.Context, err error, typed func(*store.Failure) proto.Message) error {
	if errors.Is(err, store.ErrNotFound) {
		return status.Error(codes.NotFound, "no such delivery")
	}
	return typedStatus(ctx, err, s.log, typed)
}
