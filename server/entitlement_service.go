// Package server is the authority for the contract: it validates what comes in, hands one command to the store, and turns what
// the store says into messages and statuses. It decides nothing about entitlements.
package server

import (
	"context"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// EntitlementService answers billing and product services.
type EntitlementService struct {
	entitlementv1.UnsafeEntitlementServiceServer
	store     *store.Store
	telemetry *telemetry.Telemetry
	log       *slog.Logger
}

// RegisterEntitlementService adds the service to a gRPC server.
func RegisterEntitlementService(r grpc.ServiceRegistrar, s *store.Store, t *telemetry.Telemetry, log *slog.Logger) {
	entitlementv1.RegisterEntitlementServiceServer(r, &EntitlementService{store: s, telemetry: t, log: log})
}

// GrantEntitlement implements the contract.
func (s *EntitlementService) GrantEntitlement(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	if v := validateGrantRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	c := grantCommand(ctx, r)
	answer, err := s.store.Apply(ctx, &c)
	if err != nil {
		return nil, s.noAnswer(ctx, err, func(f *store.Failure) error { return retryable(f, grantFailureOut(f)) })
	}
	s.describe(ctx, &c, &answer)
	return grantAnswerOut(&answer), nil
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
	for i, item := range r.GetRequests() {
		if v := validateGrantRequest(item); !v.none() {
			out.Responses[i] = invalidItemOut(v)
			continue
		}
		commands = append(commands, grantCommand(ctx, item))
		places = append(places, i)
	}
	results, err := s.store.ApplyAll(ctx, commands)
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	for n, result := range results {
		i := places[n]
		var failure *store.Failure
		switch {
		case result.Err == nil:
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
		Origin:  originOf(ctx, r.GetEventId(), r.GetSource()),
	}
}

func originOf(ctx context.Context, eventID, source string) store.Origin {
	span := telemetry.RemoteSpan(ctx)
	return store.Origin{
		EventID: eventID, Source: source, Caller: callerOf(ctx), TraceID: span.TraceID(), SpanID: span.SpanID(),
	}
}

// noAnswer turns an error of a write into a status; a retryable failure gets the typed response as a detail.
func (s *EntitlementService) noAnswer(ctx context.Context, err error, typed func(*store.Failure) error) error {
	var f *store.Failure
	if errors.As(err, &f) {
		pushback(ctx, f)
		return typed(f)
	}
	return statusOf(ctx, err, s.log)
}

// describe puts the answer on the call's span. A conflict is an error there, though the call is not: somebody has to look at it.
func (s *EntitlementService) describe(ctx context.Context, c *store.Command, a *store.Answer) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(
		attribute.String("entitlement.outcome", a.Outcome.String()),
		attribute.String("entitlement.matched_by", a.MatchedBy.String()),
		attribute.String("entitlement.tenant_id", c.TenantID),
		attribute.String("entitlement.event_id", c.Origin.EventID),
	)
	if a.Conflict != nil {
		span.SetStatus(otelcodes.Error, "conflicting payload")
	}
}

// GetOperation implements the contract.
func (s *EntitlementService) GetOperation(ctx context.Context, r *entitlementv1.GetOperationRequest) (*entitlementv1.GetOperationResponse, error) {
	if v := validateGetOperationRequest(r); !v.none() {
		return nil, invalid(v)
	}
	ctx = s.telemetry.WithKey(ctx, r.GetIdempotencyKey())
	l := store.Lookup{
		TenantID: r.GetTenantId(), IdempotencyKey: r.GetIdempotencyKey(), BusinessKey: businessKeyIn(r.GetBusinessKey()),
		Full: r.GetView() == entitlementv1.OperationView_OPERATION_VIEW_FULL,
	}
	if r.GetGrant() != nil {
		g := grantIn(r.GetGrant())
		l.Grant = &g
	}
	found, err := s.store.Operation(ctx, l)
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	a := &found.Answer
	out := &entitlementv1.GetOperationResponse{
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Operation: operationOut(a.Operation),
		CurrentState: a.CurrentState, CurrentVersion: a.CurrentVersion,
	}
	if a.Entitlement != nil {
		out.Entitlement = entitlementOut(a.Entitlement)
	}
	if a.Conflict != nil {
		out.Conflict = conflictOut(a.Conflict)
		out.Operation = out.GetConflict().GetStoredOperation()
	}
	for i := range found.Attempts {
		out.Attempts = append(out.Attempts, attemptOut(&found.Attempts[i]))
	}
	for _, alias := range found.Aliases {
		out.Aliases = append(out.Aliases, aliasOut(alias))
	}
	for i := range found.Entries {
		out.Entries = append(out.Entries, entryOut(&found.Entries[i]))
	}
	return out, nil
}

// GetEntitlement implements the contract.
func (s *EntitlementService) GetEntitlement(ctx context.Context, r *entitlementv1.GetEntitlementRequest) (*entitlementv1.GetEntitlementResponse, error) {
	if v := validateGetEntitlementRequest(r); !v.none() {
		return nil, invalid(v)
	}
	e, err := s.store.Entitlement(ctx, r.GetTenantId(), targetIn(r.GetEntitlementId(), r.GetBusinessKey()))
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	return &entitlementv1.GetEntitlementResponse{Entitlement: entitlementOut(e)}, nil
}
