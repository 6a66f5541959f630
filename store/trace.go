package store

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Attributes of the spans of calls, commits and deliveries.
const (
	TenantAttribute  = attribute.Key("entitlement.tenant_id")
	EventAttribute   = attribute.Key("entitlement.event_id")
	OutcomeAttribute = attribute.Key("entitlement.outcome")
	ReasonAttribute  = attribute.Key("entitlement.reason")

	keyAttribute   = attribute.Key("entitlement.idempotency_key")
	keysAttribute  = attribute.Key("entitlement.idempotency_keys")
	matchAttribute = attribute.Key("entitlement.matched_by")
	sizeAttribute  = attribute.Key("grantd.batch.size")
	// linkAttribute says on a link what it leads to: the winner's span, a call that a commit combined, or the commit of a call.
	linkAttribute = attribute.Key("grantd.link")
)

// DescribeLookup puts what was found on the span of a look-up. It is no error, also where it foretells a conflict: nobody sent that payload.
func (a *Answer) DescribeLookup(span trace.Span) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(OutcomeAttribute.String(a.Outcome.String()))
	if a.MatchedBy != entitlementv1.MatchedBy_MATCHED_BY_UNSPECIFIED {
		span.SetAttributes(matchAttribute.String(a.MatchedBy.String()))
	}
}

// Describe puts the answer on a span of its call. Where an earlier attempt was met, the span links to that one's. A conflict is an error
// there, though the call is not: somebody has to look at it.
func (a *Answer) Describe(span trace.Span) {
	if !span.IsRecording() {
		return
	}
	a.DescribeLookup(span)
	if a.Rejection != nil {
		span.SetAttributes(ReasonAttribute.String(a.Rejection.Reason.String()))
	}
	if a.Conflict != nil {
		span.SetStatus(codes.Error, "conflicting payload")
	}
	if w := a.Winner(); w != nil && w.Origin.SpanContext().IsValid() {
		span.AddLink(trace.Link{
			SpanContext: w.Origin.SpanContext(),
			Attributes:  []attribute.KeyValue{keyAttribute.String(w.IdempotencyKey), linkAttribute.String("winner")},
		})
	}
}

// SpanContext names the span that the arrival was recorded under; it is not valid where there was none.
func (o *Origin) SpanContext() trace.SpanContext {
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: o.TraceID, SpanID: o.SpanID, TraceFlags: trace.TraceFlags(0).WithSampled(o.Sampled), Remote: true,
	})
}

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
	size := sizeAttribute.Int(len(batch))
	if len(batch) == 1 {
		ctx, span := traced[0].startCommit(c.config.tracer, size)
		return ctx, func(err error) { traced[0].endCommit(span, err) }
	}

	keys := make([]string, 0, min(len(traced), maxTracedKeys))
	links := make([]trace.Link, len(traced))
	for i, p := range traced {
		if i < maxTracedKeys {
			keys = append(keys, p.command.IdempotencyKey)
		}
		links[i] = trace.Link{
			SpanContext: trace.SpanContextFromContext(p.ctx),
			Attributes:  []attribute.KeyValue{keyAttribute.String(p.command.IdempotencyKey), linkAttribute.String("call")},
		}
	}
	// Without baggage: one call's key must not stand on statements that serve many.
	ctx := baggage.ContextWithoutBaggage(context.WithoutCancel(traced[0].ctx))
	ctx, shared := c.config.tracer.Start(ctx, "grantd.combined_commit", trace.WithLinks(links...),
		trace.WithAttributes(size, keysAttribute.StringSlice(keys)))
	spans := make([]trace.Span, len(traced))
	for i, p := range traced {
		_, spans[i] = p.startCommit(c.config.tracer, size)
		spans[i].AddLink(trace.Link{
			SpanContext: shared.SpanContext(), Attributes: []attribute.KeyValue{linkAttribute.String("combined commit")},
		})
	}
	return ctx, func(err error) {
		endSpan(shared, err)
		for i, span := range spans {
			traced[i].endCommit(span, err)
		}
	}
}

// startCommit starts the span of the call's share in a transaction.
func (p *pending) startCommit(tracer trace.Tracer, size attribute.KeyValue) (context.Context, trace.Span) {
	ctx, span := tracer.Start(context.WithoutCancel(p.ctx), "grantd.commit", trace.WithAttributes(size,
		keyAttribute.String(p.command.IdempotencyKey), TenantAttribute.String(p.command.TenantID)))
	if id := p.command.Origin.EventID; id != "" {
		span.SetAttributes(EventAttribute.String(id))
	}
	return ctx, span
}

// endCommit ends it with the answer, unless the transaction or this command in it failed.
func (p *pending) endCommit(span trace.Span, err error) {
	switch failure := new(Failure); {
	case err != nil:
	case p.err == nil:
		p.answer.Describe(span)
	case errors.As(p.err, &failure):
		span.SetStatus(codes.Error, failure.Reason)
	default:
		span.SetStatus(codes.Error, internalError)
	}
	endSpan(span, err)
}

const internalError = "internal error"

// endSpan says what failed by its reason alone: an error's text may quote values. A transaction that is run again is no failure.
func endSpan(span trace.Span, err error) {
	if err != nil {
		var fate unknownFate
		switch what, reason := interpretError(err); {
		case errors.As(err, &fate):
			span.SetStatus(codes.Error, ReasonCommitUnknown)
		case what == runAgain:
			span.AddEvent("run again")
		case reason != "":
			span.SetStatus(codes.Error, reason)
		default:
			span.SetStatus(codes.Error, internalError)
		}
	}
	span.End()
}
