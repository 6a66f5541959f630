package outbox

import (
	"context"

	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// carried is what internal destinations are told of a delivery's context. External ones get none of it.
var carried = propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})

// carry sets the headers of trace context and baggage where the destination is internal, and none where it is external.
func (d *Destination) carry(ctx context.Context, headers propagation.TextMapCarrier) {
	if d.Internal {
		carried.Inject(ctx, headers)
	}
}

// originContext holds the span of the winning attempt as the parent of what comes and, where the destination is internal, the one
// member of baggage that is allowed to travel on: the operation's key. What else the caller's baggage held was never stored.
func (d *Destination) originContext(ctx context.Context, of *store.Delivery) context.Context {
	ctx = baggage.ContextWithoutBaggage(ctx)
	if of.Event == nil {
		return ctx
	}
	op := &of.Event.Operation
	// The origin's sampling is not kept. Its trace is the one that people look at, so it is continued rather than cut.
	parent := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: op.Origin.TraceID, SpanID: op.Origin.SpanID, TraceFlags: trace.FlagsSampled, Remote: true,
	})
	ctx = trace.ContextWithRemoteSpanContext(ctx, parent)
	if !d.Internal {
		return ctx
	}
	member, err := baggage.NewMemberRaw(telemetry.KeyName, op.IdempotencyKey)
	if err != nil {
		return ctx
	}
	bag, err := baggage.New(member)
	if err != nil {
		return ctx
	}
	return baggage.ContextWithBaggage(ctx, bag)
}
