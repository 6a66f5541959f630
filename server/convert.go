package server

import (
	"encoding/hex"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// The two representations meet here and in convert_deliveries.go: messages of the contract and structs of the store. What comes in has
// been validated.

func grantIn(g *entitlementv1.Grant) store.Grant {
	return store.Grant{
		TenantID: g.GetTenantId(), InvoiceID: g.GetInvoiceId(), EntitlementType: g.GetEntitlementType(),
		OperationVersion: g.GetOperationVersion(), Scope: g.GetScope(), Quantity: g.Quantity,
		StartsAt: timeIn(g.GetStartsAt()), ExpiresAt: timeIn(g.GetExpiresAt()),
	}
}

func timeIn(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

func businessKeyIn(b *entitlementv1.BusinessKey) store.BusinessKey {
	return store.BusinessKey{
		InvoiceID: b.GetInvoiceId(), EntitlementType: b.GetEntitlementType(), OperationVersion: b.GetOperationVersion(),
	}
}

// targetIn reads an entitlement's name; an id is in canonical form.
func targetIn(id string, b *entitlementv1.BusinessKey) store.Target {
	if b != nil {
		return store.Target{BusinessKey: businessKeyIn(b)}
	}
	parsed, _ := uuid.Parse(id)
	return store.Target{EntitlementID: parsed}
}

func grantOut(g *store.Grant) *entitlementv1.Grant {
	return &entitlementv1.Grant{
		TenantId: g.TenantID, InvoiceId: g.InvoiceID, EntitlementType: g.EntitlementType,
		OperationVersion: g.OperationVersion, Scope: g.Scope, Quantity: g.Quantity,
		StartsAt: timeOut(g.StartsAt), ExpiresAt: timeOut(g.ExpiresAt),
	}
}

func timeOut(t *time.Time) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	return timestamppb.New(*t)
}

func entitlementOut(e *store.Entitlement) *entitlementv1.Entitlement {
	return &entitlementv1.Entitlement{
		EntitlementId: e.ID.String(), Grant: grantOut(&e.Grant), GrantedByKey: e.OperationKey,
		GrantedAt: timestamppb.New(e.GrantedAt), State: e.State, Version: e.Version,
		ChangedAt: timestamppb.New(e.ChangedAt), EndsAt: timeOut(e.EndsAt),
	}
}

func entryOut(n *store.Entry) *entitlementv1.Entry {
	return &entitlementv1.Entry{
		EntitlementId: n.EntitlementID.String(), EntryNumber: n.Number, Kind: n.Kind, IdempotencyKey: n.OperationKey,
		InvoiceVersion: n.InvoiceVersion, Actor: n.Actor, Reason: n.Reason, At: timestamppb.New(n.At),
	}
}

func operationOut(op *store.Operation) *entitlementv1.Operation {
	if op == nil {
		return nil
	}
	out := &entitlementv1.Operation{
		TenantId: op.TenantID, IdempotencyKey: op.IdempotencyKey, Kind: op.Kind, InvoiceId: op.InvoiceID,
		EntryNumber: op.EntryNumber, InvoiceState: op.Invoice.State, InvoiceVersion: op.Invoice.Version,
		Actor: op.Actor, Reason: op.Reason, AppliedAt: timestamppb.New(op.AppliedAt), AttemptId: op.AttemptID.String(),
		EventId: op.Origin.EventID, Source: op.Origin.Source, Caller: op.Origin.Caller,
		TraceId: hexOut(op.Origin.TraceID[:]), SpanId: hexOut(op.Origin.SpanID[:]),
		Fingerprint: hex.EncodeToString(op.Fingerprint[:]), FingerprintRecipe: int32(op.Recipe),
	}
	if op.EntitlementID != uuid.Nil {
		out.EntitlementId = op.EntitlementID.String()
	}
	return out
}

// hexOut is empty for an id of zeros, which is none.
func hexOut(id []byte) string {
	for _, b := range id {
		if b != 0 {
			return hex.EncodeToString(id)
		}
	}
	return ""
}

func attemptOut(a *store.Attempt) *entitlementv1.Attempt {
	return &entitlementv1.Attempt{
		AttemptId: a.ID.String(), At: timestamppb.New(a.At), IdempotencyKey: a.IdempotencyKey, Kind: a.Kind,
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Reason: a.Reason, DifferingFields: a.DifferingFields,
		InvoiceId: a.InvoiceID, EntitlementType: a.EntitlementType, EventId: a.Origin.EventID, Source: a.Origin.Source,
		Caller: a.Origin.Caller, TraceId: hexOut(a.Origin.TraceID[:]), SpanId: hexOut(a.Origin.SpanID[:]),
		WinnerTraceId: hexOut(a.WinnerTraceID[:]), PreviousTries: a.PreviousTries,
	}
}

func conflictOut(c *store.Conflict) *entitlementv1.Conflict {
	out := &entitlementv1.Conflict{StoredOperation: operationOut(c.Stored)}
	for _, d := range c.Differences {
		out.Differences = append(out.Differences, &entitlementv1.Difference{
			Field: d.Field, Stored: d.Stored, Submitted: d.Submitted,
		})
	}
	return out
}

func rejectionOut(r *store.Rejection) *entitlementv1.Rejection {
	return &entitlementv1.Rejection{Reason: r.Reason, Message: r.Message, Retry: r.Retry}
}

func failureOut(f *store.Failure) *entitlementv1.RetryableFailure {
	return &entitlementv1.RetryableFailure{Reason: f.Reason, RetryDelay: durationpb.New(f.RetryDelay)}
}

func grantAnswerOut(a *store.Answer) *entitlementv1.GrantEntitlementResponse {
	out := &entitlementv1.GrantEntitlementResponse{
		Outcome: a.Outcome, MatchedBy: a.MatchedBy, Operation: operationOut(a.Operation),
		CurrentState: a.CurrentState, CurrentVersion: a.CurrentVersion,
	}
	switch {
	case a.Conflict != nil:
		out.Result = &entitlementv1.GrantEntitlementResponse_Conflict{Conflict: conflictOut(a.Conflict)}
	case a.Rejection != nil:
		out.Result = &entitlementv1.GrantEntitlementResponse_Rejection{Rejection: rejectionOut(a.Rejection)}
	case a.Entitlement != nil:
		out.Result = &entitlementv1.GrantEntitlementResponse_Entitlement{Entitlement: entitlementOut(a.Entitlement)}
	}
	return out
}

// grantFailureOut is the typed answer that goes along with a retryable failure.
func grantFailureOut(f *store.Failure) *entitlementv1.GrantEntitlementResponse {
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
		Result:  &entitlementv1.GrantEntitlementResponse_Failure{Failure: failureOut(f)},
	}
}

// invalidItemOut answers a malformed item of a batch.
func invalidItemOut(v violations) *entitlementv1.GrantEntitlementResponse {
	r := &entitlementv1.Rejection{
		Reason:  entitlementv1.RejectionReason_REJECTION_REASON_INVALID_REQUEST,
		Message: "the item is malformed",
		Retry:   entitlementv1.RetryAdvice_RETRY_ADVICE_NEVER,
	}
	for _, one := range v.within(itemViolationBytes) {
		r.Violations = append(r.Violations, &entitlementv1.FieldViolation{Field: one.field, Description: one.rule})
	}
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_REJECTED,
		Result:  &entitlementv1.GrantEntitlementResponse_Rejection{Rejection: r},
	}
}

// maxAnswerBytes leaves room below the 4 MiB that clients accept.
const maxAnswerBytes = 4<<20 - 64<<10

// fitBatch leaves out differences, from the last conflict on, until the answer is one that clients accept. Nothing else of an
// answer can make it too large: a thousand stored scopes of 2 KiB fit.
func fitBatch(out *entitlementv1.BatchGrantEntitlementsResponse) {
	excess := proto.Size(out) - maxAnswerBytes
	for i := len(out.GetResponses()) - 1; i >= 0 && excess > 0; i-- {
		c := out.GetResponses()[i].GetConflict()
		if c == nil {
			continue
		}
		before := proto.Size(c)
		c.OmittedDifferences = int32(len(c.GetDifferences()))
		c.Differences = nil
		excess -= before - proto.Size(c)
	}
}

func aliasOut(a store.Alias) *entitlementv1.Alias {
	return &entitlementv1.Alias{IdempotencyKey: a.IdempotencyKey, BoundAt: timestamppb.New(a.BoundAt)}
}

func entitlementsOut(all []*store.Entitlement) []*entitlementv1.Entitlement {
	out := make([]*entitlementv1.Entitlement, len(all))
	for i, e := range all {
		out[i] = entitlementOut(e)
	}
	return out
}

// maxNamedReversals bounds the entitlements that an answer names, and so its size.
const maxNamedReversals = 1000

func recordedOut(invoiceID string, a *store.Answer) *entitlementv1.RecordedInvoice {
	return &entitlementv1.RecordedInvoice{
		InvoiceId: invoiceID, State: a.Recorded.State, Version: a.Recorded.Version,
		Reversed:      entitlementsOut(a.Reversed[:min(len(a.Reversed), maxNamedReversals)]),
		ReversedCount: int32(len(a.Reversed)),
	}
}
