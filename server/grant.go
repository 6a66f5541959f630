package server

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// GrantEntitlement implements the contract.
func (s *EntitlementService) GrantEntitlement(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	if v := validateGrantRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	c := grantCommand(ctx, r)
	answer, err := s.apply(ctx, &c, func(f *store.Failure) proto.Message { return grantFailureOut(f) })
	if err != nil {
		return nil, err
	}
	return grantAnswerOut(answer), nil
}

// BatchGrantEntitlements implements the contract.
func (s *EntitlementService) BatchGrantEntitlements(ctx context.Context, r *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	if v := validateBatchRequest(r); !v.none() {
		return nil, invalid(v)
	}
	out := &entitlementv1.BatchGrantEntitlementsResponse{
		Responses: make([]*entitlementv1.GrantEntitlementResponse, len(r.GetRequests())),
	}
	commands := make([]store.Command, 0, len(r.GetRequests()))
	places := make([]int, 0, len(r.GetRequests()))
	contexts := make([]context.Context, 0, len(r.GetRequests()))
	for i, item := range r.GetRequests() {
		if v := validateGrantRequest(item); !v.none() {
			out.Responses[i] = invalidItemOut(v)
			continue
		}
		itemCtx, span := s.telemetry.StartItem(ctx, item.GetIdempotencyKey())
		defer span.End()
		commands = append(commands, grantCommand(itemCtx, item))
		places = append(places, i)
		contexts = append(contexts, itemCtx)
	}
	results, err := s.store.ApplyAll(ctx, commands, contexts)
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	for n, result := range results {
		i := places[n]
		var failure *store.Failure
		switch {
		case result.Err == nil:
			describe(contexts[n], &commands[n], &result.Answer)
			out.Responses[i] = grantAnswerOut(&result.Answer)
		case errors.As(result.Err, &failure):
			out.Responses[i] = grantFailureOut(failure)
		default:
			// A bug: one item's must not hide the others' answers, and the caller may try that item again.
			s.log.ErrorContext(ctx, "internal error", "item", i, "error", result.Err)
			out.Responses[i] = grantFailureOut(&store.Failure{Reason: reasonInternal})
		}
	}
	fitBatch(out)
	return out, nil
}

// reasonInternal stands in a batch item where a single call would be answered INTERNAL.
const reasonInternal = "INTERNAL"

func grantCommand(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) store.Command {
	return store.Command{
		Kind:     entitlementv1.OperationKind_OPERATION_KIND_GRANT,
		TenantID: r.GetGrant().GetTenantId(), IdempotencyKey: r.GetIdempotencyKey(), Grant: grantIn(r.GetGrant()),
		Invoice: store.InvoiceVersion{State: r.GetInvoice().GetState(), Version: r.GetInvoice().GetVersion()},
		Notify:  notifyIn(r.GetNotify()),
		Origin:  originOf(ctx, r.GetEventId(), r.GetSource()), PreviousTries: telemetry.PreviousAttempts(ctx),
	}
}
