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

// originContext holds the span of the winning attempt as the parent of what comes, and the one member of baggage that is allowed
// to travel on: the operation's key. What else the caller's baggage held was never stored.
func originContext(ctx context.Context, d *store.Delivery) context.Context {
	ctx = baggage.ContextWithoutBaggage(ctx)
	if d.Event == nil {
		return ctx
	}
	op := &d.Event.Operation
	ctx = trace.ContextWithRemoteSpanContext(ctx, op.Origin.SpanContext())
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
