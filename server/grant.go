package server

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/trace"
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
			s.traceInvalidItem(ctx, item)
			continue
		}
		itemCtx, span := s.telemetry.StartItem(ctx, item.GetIdempotencyKey())
		defer span.End()
		describeRequest(span, item)
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
			result.Answer.Describe(trace.SpanFromContext(contexts[n]))
			out.Responses[i] = grantAnswerOut(&result.Answer)
			continue
		case errors.As(result.Err, &failure):
		default:
			// A bug: one item's must not hide the others' answers, and the caller may try that item again.
			s.log.ErrorContext(contexts[n], "internal error", "item", i, telemetry.KeyName, commands[n].IdempotencyKey, "error", result.Err)
			failure = &store.Failure{Reason: reasonInternal}
		}
		describeFailure(trace.SpanFromContext(contexts[n]), failure)
		out.Responses[i] = grantFailureOut(failure)
	}
	fitBatch(out)
	return out, nil
}

// traceInvalidItem leaves a span of a malformed item. It has no key: what was sent as one need not be one.
func (s *EntitlementService) traceInvalidItem(ctx context.Context, item *entitlementv1.GrantEntitlementRequest) {
	_, span := s.telemetry.StartItem(ctx, "")
	defer span.End()
	describeRequest(span, item)
	span.SetAttributes(
		store.OutcomeAttribute.String(entitlementv1.Outcome_OUTCOME_REJECTED.String()),
		store.ReasonAttribute.String(entitlementv1.RejectionReason_REJECTION_REASON_INVALID_REQUEST.String()))
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
