package server

import (
	"strings"

	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// describeRequest puts on a span whose request it is, as the caller says: malformed ones are looked for too. Of what is too long for a
// request only the beginning is kept.
func describeRequest(span trace.Span, request any) {
	if !span.IsRecording() {
		return
	}
	tenant := ""
	switch r := request.(type) {
	case interface{ GetTenantId() string }:
		tenant = r.GetTenantId()
	case interface{ GetGrant() *entitlementv1.Grant }:
		tenant = r.GetGrant().GetTenantId()
	}
	if tenant != "" {
		span.SetAttributes(store.TenantAttribute.String(beginning(tenant)))
	}
	if r, ok := request.(interface{ GetEventId() string }); ok && r.GetEventId() != "" {
		span.SetAttributes(store.EventAttribute.String(beginning(r.GetEventId())))
	}
}

// beginning cuts off what no valid name has. The rest of it must not be kept in memory until the span is exported, as it would behind
// the SDK's own cut: thousands of spans wait while the collector is away.
func beginning(s string) string {
	if len(s) <= maxDiagnosticBytes {
		return s
	}
	return strings.Clone(strings.ToValidUTF8(s[:maxDiagnosticBytes], ""))
}

// describeFailure puts on a span that its call, or its item, got no answer.
func describeFailure(span trace.Span, f *store.Failure) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(store.OutcomeAttribute.String(entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE.String()), store.ReasonAttribute.String(f.Reason))
	span.SetStatus(otelcodes.Error, f.Reason)
}
