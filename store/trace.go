package store

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// Attributes of the spans of commits.
const (
	keyAttribute  = attribute.Key("entitlement.idempotency_key")
	keysAttribute = attribute.Key("entitlement.idempotency_keys")
	sizeAttribute = attribute.Key("grantd.batch.size")
)

// maxTracedKeys bounds the keys that stand on the span of a combined transaction. Each call's own span has its key in any case.
const maxTracedKeys = 128

// traceWith keeps the caller's context where its span is recorded.
func (p *pending) traceWith(ctx context.Context) {
	if trace.SpanFromContext(ctx).IsRecording() {
		p.ctx = ctx
	}
}

// trace starts the spans of a transaction, and returns the context for its statements. Each traced call gets a span of its own,
// in its own trace and with its own key. The statements of a single command stand below that. Those of a combined transaction
// stand below a span that all of the calls' link to and that links to all of them; it is sampled with the first of them.
//
// The contexts lose their cancellation: a caller's leaving stops its waiting, never a commit.
func (c *committer) trace(batch []*pending) (context.Context, func(error)) {
	var traced []*pending
	for _, p := range batch {
		if p.ctx != nil {
			traced = append(traced, p)
		}
	}
	if len(traced) == 0 {
		return context.Background(), func(error) {}
	}
	size := trace.WithAttributes(sizeAttribute.Int(len(batch)))
	if len(batch) == 1 {
		ctx, span := c.config.tracer.Start(context.WithoutCancel(traced[0].ctx), "grantd.commit", size)
		return ctx, func(err error) { endSpan(span, err) }
	}

	keys := make([]string, 0, min(len(traced), maxTracedKeys))
	links := make([]trace.Link, len(traced))
	for i, p := range traced {
		if i < maxTracedKeys {
			keys = append(keys, p.command.IdempotencyKey)
		}
		links[i] = trace.Link{
			SpanContext: trace.SpanContextFromContext(p.ctx),
			Attributes:  []attribute.KeyValue{keyAttribute.String(p.command.IdempotencyKey)},
		}
	}
	// Without baggage: one call's key must not stand on statements that serve many.
	ctx := baggage.ContextWithoutBaggage(context.WithoutCancel(traced[0].ctx))
	ctx, shared := c.config.tracer.Start(ctx, "grantd.combined_commit", size, trace.WithLinks(links...),
		trace.WithAttributes(keysAttribute.StringSlice(keys)))
	spans := make([]trace.Span, len(traced))
	for i, p := range traced {
		_, spans[i] = c.config.tracer.Start(p.ctx, "grantd.commit", size,
			trace.WithAttributes(keyAttribute.String(p.command.IdempotencyKey)),
			trace.WithLinks(trace.Link{SpanContext: shared.SpanContext()}))
	}
	return ctx, func(err error) {
		endSpan(shared, err)
		for _, span := range spans {
			endSpan(span, err)
		}
	}
}

// endSpan says what failed by its reason alone: an error's text may quote values. A transaction that is run again is no failure.
func endSpan(span trace.Span, err error) {
	if err != nil {
		switch what, reason := interpretError(err); {
		case what == runAgain:
			span.AddEvent("run again")
		case reason != "":
			span.SetStatus(codes.Error, reason)
		default:
			span.SetStatus(codes.Error, "internal error")
		}
	}
	span.End()
}
