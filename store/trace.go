package store

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// keyAttribute stands on every span that is about one operation.
const keyAttribute = attribute.Key("entitlement.idempotency_key")

// traceWith keeps the caller's context where its span is recorded.
func (p *pending) traceWith(ctx context.Context) {
	if trace.SpanFromContext(ctx).IsRecording() {
		p.ctx = ctx
	}
}

// trace starts the span of a transaction. That of a single command belongs to the command's own trace. A combined one
// belongs to none of them: it links to each call, and each call's span says where its share went.
func (c *committer) trace(batch []*pending) (context.Context, func(error)) {
	ctx := context.Background()
	var links []trace.Link
	for _, p := range batch {
		if p.ctx == nil {
			continue
		}
		links = append(links, trace.Link{
			SpanContext: trace.SpanContextFromContext(p.ctx),
			Attributes:  []attribute.KeyValue{keyAttribute.String(p.command.IdempotencyKey)},
		})
	}
	if len(links) == 0 {
		return ctx, func(error) {}
	}
	attributes := trace.WithAttributes(attribute.Int("grantd.batch.size", len(batch)))
	var span trace.Span
	if len(batch) == 1 {
		// WithoutCancel: the caller's leaving stops its waiting, never a commit.
		ctx, span = c.config.tracer.Start(context.WithoutCancel(batch[0].ctx), "grantd.commit", attributes)
	} else {
		ctx, span = c.config.tracer.Start(ctx, "grantd.commit", attributes, trace.WithNewRoot(), trace.WithLinks(links...))
		for _, p := range batch {
			if p.ctx != nil {
				trace.SpanFromContext(p.ctx).AddLink(trace.Link{
					SpanContext: span.SpanContext(), Attributes: []attribute.KeyValue{attribute.Int("grantd.batch.size", len(batch))},
				})
			}
		}
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
