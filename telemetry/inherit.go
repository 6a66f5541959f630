package telemetry

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

const (
	// tenantName and eventName are the attributes of spans that say whose a call is, and which event asked for it.
	tenantName = "entitlement.tenant_id"
	eventName  = "entitlement.event_id"
)

// ownScopes begin the names of grantd's own instrumentation.
const ownScopes = "github.com/grantd/grantd/"

// inherit gives the spans of libraries, which are statements and calls of receivers, the tenant and the event of the span above them.
// grantd's own spans say for themselves: that of a combined commit stands below one of many calls, and is everybody's.
type inherit struct{}

func (inherit) OnStart(parent context.Context, span sdktrace.ReadWriteSpan) {
	if strings.HasPrefix(span.InstrumentationScope().Name, ownScopes) {
		return
	}
	above, ok := trace.SpanFromContext(parent).(sdktrace.ReadOnlySpan)
	if !ok {
		return
	}
	for _, a := range above.Attributes() {
		if a.Key == tenantName || a.Key == eventName {
			span.SetAttributes(attribute.KeyValue{Key: a.Key, Value: a.Value})
		}
	}
}

func (inherit) OnEnd(sdktrace.ReadOnlySpan)      {}
func (inherit) Shutdown(context.Context) error   { return nil }
func (inherit) ForceFlush(context.Context) error { return nil }
