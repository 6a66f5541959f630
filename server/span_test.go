package server_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Requests are described before they are validated. A caller's names of a megabyte stood on the spans whole, and eight thousand of them
// wait in memory while the collector is away.
func TestSpan_KeepsTheBeginningOfOverlongNames(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	b := setupTransport(t, transportSetup{stats: otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(provider))})
	client := entitlementv1.NewEntitlementServiceClient(b.connect(t, nil))
	long := "x" + strings.Repeat("é", 200_000)
	if _, err := client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{
		Grant: &entitlementv1.Grant{TenantId: long}, EventId: long,
	}); err != nil {
		t.Fatal(err)
	}
	names := 0
	for _, span := range recorder.Started() {
		for _, a := range span.Attributes() {
			if a.Key != "entitlement.tenant_id" && a.Key != "entitlement.event_id" {
				continue
			}
			names++
			if s := a.Value.AsString(); len(s) < 100 || len(s) > 200 || !utf8.ValidString(s) || !strings.HasPrefix(long, s) {
				t.Errorf("%s has %d bytes", a.Key, len(s))
			}
		}
	}
	if names != 2 {
		t.Errorf("%d names on the spans, want 2", names)
	}
}
