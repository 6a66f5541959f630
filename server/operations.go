package server

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

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
	a.DescribeLookup(trace.SpanFromContext(ctx))
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
	if a.Recorded.State != entitlementv1.InvoiceState_INVOICE_STATE_UNSPECIFIED {
		// The operation may be of another kind: a grant's evidence may have recorded the state, and a refund may have reversed what
		// an alias asked to reverse.
		out.Recorded = recordedOut(a.Operation.InvoiceID, a)
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
	for i := range found.Deliveries {
		out.Deliveries = append(out.Deliveries, deliveryStoryOut(&found.Deliveries[i]))
	}
	for i := range found.Notifications {
		out.Notifications = append(out.Notifications, notificationOut(&found.Notifications[i]))
	}
	for i := range found.Pauses {
		out.Pauses = append(out.Pauses, pauseOut(&found.Pauses[i]))
	}
	out.Truncated = found.Truncated
	fitStory(out)
	return out, nil
}

// fitStory leaves out the older half of whatever list is the largest, until the answer is one that clients accept. What the operation
// itself says is never left out, and fits.
func fitStory(out *entitlementv1.GetOperationResponse) {
	for proto.Size(out) > maxAnswerBytes {
		out.Truncated = true
		lists := []struct {
			bytes int
			halve func()
		}{
			{sizeOf(out.Attempts), func() { out.Attempts = newerHalf(out.Attempts) }},
			{sizeOf(out.Aliases), func() { out.Aliases = newerHalf(out.Aliases) }},
			{sizeOf(out.Entries), func() { out.Entries = newerHalf(out.Entries) }},
			{sizeOf(out.Deliveries), func() { out.Deliveries = newerHalf(out.Deliveries) }},
			{sizeOf(out.Notifications), func() { out.Notifications = newerHalf(out.Notifications) }},
			{sizeOf(out.Pauses), func() { out.Pauses = newerHalf(out.Pauses) }},
		}
		largest := 0
		for i := range lists {
			if lists[i].bytes > lists[largest].bytes {
				largest = i
			}
		}
		if lists[largest].bytes == 0 {
			return
		}
		lists[largest].halve()
	}
}

func sizeOf[M proto.Message](all []M) int {
	n := 0
	for _, m := range all {
		n += proto.Size(m)
	}
	return n
}

func newerHalf[M any](all []M) []M { return all[(len(all)+1)/2:] }

// ListOperations implements the contract.
func (s *EntitlementService) ListOperations(ctx context.Context, r *entitlementv1.ListOperationsRequest) (*entitlementv1.ListOperationsResponse, error) {
	if v := validateListOperationsRequest(r); !v.none() {
		return nil, invalid(v)
	}
	filter := store.OperationFilter{
		TenantID: r.GetTenantId(), EventID: r.GetEventId(), InvoiceID: r.GetInvoiceId(), EntitlementType: r.GetEntitlementType(),
	}
	found, next, err := s.store.Operations(ctx, filter, pageIn(r))
	if err != nil {
		return nil, listStatus(ctx, err, s.log)
	}
	out := &entitlementv1.ListOperationsResponse{NextPageToken: next}
	for i := range found {
		l := &entitlementv1.ListedOperation{
			IdempotencyKey: found[i].IdempotencyKey, Operation: operationOut(found[i].Operation),
		}
		if found[i].LastAttempt != nil {
			l.LastAttempt = attemptOut(found[i].LastAttempt)
		}
		out.Operations = append(out.Operations, l)
	}
	return out, nil
}
