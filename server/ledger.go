package server

import (
	"context"

	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// RecordInvoiceState implements the contract.
func (s *EntitlementService) RecordInvoiceState(ctx context.Context, r *entitlementv1.RecordInvoiceStateRequest) (*entitlementv1.RecordInvoiceStateResponse, error) {
	if v := validateRecordInvoiceStateRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	a, err := s.apply(ctx, &store.Command{
		Kind:     entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE,
		TenantID: r.GetTenantId(), IdempotencyKey: r.GetIdempotencyKey(), InvoiceID: r.GetInvoiceId(),
		Invoice: store.InvoiceVersion{State: r.GetState(), Version: r.GetVersion()},
		Notify:  notifyIn(r.GetNotify()),
		Origin:  originOf(ctx, r.GetEventId(), r.GetSource()), PreviousTries: telemetry.PreviousAttempts(ctx),
	}, func(f *store.Failure) proto.Message {
		return &entitlementv1.RecordInvoiceStateResponse{
			Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
			Result:  &entitlementv1.RecordInvoiceStateResponse_Failure{Failure: failureOut(f)},
		}
	})
	if err != nil {
		return nil, err
	}
	out := &entitlementv1.RecordInvoiceStateResponse{
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Operation: operationOut(a.Operation),
		CurrentState: a.CurrentInvoice.State, CurrentVersion: a.CurrentInvoice.Version,
	}
	switch {
	case a.Conflict != nil:
		out.Result = &entitlementv1.RecordInvoiceStateResponse_Conflict{Conflict: conflictOut(a.Conflict)}
	case a.Rejection != nil:
		out.Result = &entitlementv1.RecordInvoiceStateResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	default:
		out.Result = &entitlementv1.RecordInvoiceStateResponse_Recorded{Recorded: recordedOut(r.GetInvoiceId(), a)}
	}
	return out, nil
}

// ReverseEntitlement implements the contract.
func (s *EntitlementService) ReverseEntitlement(ctx context.Context, r *entitlementv1.ReverseEntitlementRequest) (*entitlementv1.ReverseEntitlementResponse, error) {
	if v := validateTurnRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	a, err := s.apply(ctx, turnCommand(ctx, entitlementv1.OperationKind_OPERATION_KIND_REVERSE, r), func(f *store.Failure) proto.Message {
		return &entitlementv1.ReverseEntitlementResponse{
			Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
			Result:  &entitlementv1.ReverseEntitlementResponse_Failure{Failure: failureOut(f)},
		}
	})
	if err != nil {
		return nil, err
	}
	out := &entitlementv1.ReverseEntitlementResponse{
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Operation: operationOut(a.Operation),
		CurrentState: a.CurrentState, CurrentVersion: a.CurrentVersion,
	}
	switch {
	case a.Conflict != nil:
		out.Result = &entitlementv1.ReverseEntitlementResponse_Conflict{Conflict: conflictOut(a.Conflict)}
	case a.Rejection != nil:
		out.Result = &entitlementv1.ReverseEntitlementResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	default:
		out.Result = &entitlementv1.ReverseEntitlementResponse_Entitlement{Entitlement: entitlementOut(a.Entitlement)}
	}
	return out, nil
}

// ReinstateEntitlement implements the contract.
func (s *EntitlementService) ReinstateEntitlement(ctx context.Context, r *entitlementv1.ReinstateEntitlementRequest) (*entitlementv1.ReinstateEntitlementResponse, error) {
	if v := validateTurnRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	a, err := s.apply(ctx, turnCommand(ctx, entitlementv1.OperationKind_OPERATION_KIND_REINSTATE, r), func(f *store.Failure) proto.Message {
		return &entitlementv1.ReinstateEntitlementResponse{
			Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
			Result:  &entitlementv1.ReinstateEntitlementResponse_Failure{Failure: failureOut(f)},
		}
	})
	if err != nil {
		return nil, err
	}
	out := &entitlementv1.ReinstateEntitlementResponse{
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Operation: operationOut(a.Operation),
		CurrentState: a.CurrentState, CurrentVersion: a.CurrentVersion,
	}
	switch {
	case a.Conflict != nil:
		out.Result = &entitlementv1.ReinstateEntitlementResponse_Conflict{Conflict: conflictOut(a.Conflict)}
	case a.Rejection != nil:
		out.Result = &entitlementv1.ReinstateEntitlementResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	default:
		out.Result = &entitlementv1.ReinstateEntitlementResponse_Entitlement{Entitlement: entitlementOut(a.Entitlement)}
	}
	return out, nil
}

func turnCommand(ctx context.Context, kind entitlementv1.OperationKind, r turnRequest) *store.Command {
	return &store.Command{
		Kind: kind, TenantID: r.GetTenantId(), IdempotencyKey: r.GetIdempotencyKey(),
		Target: targetIn(r.GetEntitlementId(), r.GetBusinessKey()), Reason: r.GetReason(), Actor: r.GetActor(),
		Notify: notifyIn(r.GetNotify()),
		Origin: originOf(ctx, r.GetEventId(), r.GetSource()), PreviousTries: telemetry.PreviousAttempts(ctx),
	}
}
