package telemetry

import (
	"cmp"
	"context"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// KeyName names the baggage member and the span attribute that hold an operation's idempotency key.
const KeyName = "entitlement.idempotency_key"

// W3C's limits of what a receiver must take. Beyond them receivers drop members, or all of them.
const (
	maxBaggageMembers = 64
	maxBaggageBytes   = 8192
)

// WithKey is called once in every call that is about one operation, with the key from the request. The call's span, and every
// span that is started under the context it returns, has the key as its attribute, and the context's baggage has it as its
// member.
//
// The request's field is the authority. A member of the caller's own that says otherwise is replaced, counted
// (grantd.baggage.keys_replaced) and noted on the span (grantd.baggage.key_replaced). Nothing that is wrong with baggage fails a call:
// where it is full, the longest of the other members give way.
//
// Where there is no key, or the call's span is not recorded and there is nothing to replace, it returns ctx.
func (t *Telemetry) WithKey(ctx context.Context, key string) context.Context {
	if key == "" {
		return ctx
	}
	span := trace.SpanFromContext(ctx)
	claimed := baggage.FromContext(ctx).Member(KeyName).Value()
	if !span.IsRecording() && (claimed == "" || claimed == key) {
		return ctx
	}
	if claimed != "" && claimed != key {
		t.counters.keysReplaced.Add(ctx, 1)
		span.SetAttributes(attribute.Bool("grantd.baggage.key_replaced", true))
	}
	span.SetAttributes(attribute.String(KeyName, key))
	return t.withMember(ctx, span, key)
}

// StartItem starts the span of one item of a batch call, which its caller ends. It is a span of its own, since only an
// attribute that holds one key, and holds it alone, is found by a search for that key in every trace viewer: an array is
// matched as a whole by some, and events and links are searched by few. The batch's own span is given no key.
//
// Where the batch's span is not recorded it returns ctx and a span that does nothing.
func (t *Telemetry) StartItem(ctx context.Context, key string) (context.Context, trace.Span) {
	if !trace.SpanFromContext(ctx).IsRecording() {
		return ctx, tracenoop.Span{}
	}
	ctx, span := t.tracer.Start(ctx, "grantd.batch.item")
	if key == "" {
		return ctx, span
	}
	span.SetAttributes(attribute.String(KeyName, key))
	return t.withMember(ctx, span, key), span
}

func (t *Telemetry) withMember(ctx context.Context, span trace.Span, key string) context.Context {
	bag := baggage.FromContext(ctx)
	if bag.Member(KeyName).Value() == key {
		return ctx
	}
	bag, evicted, ok := setKey(bag, key)
	if !ok {
		t.counters.keysDropped.Add(ctx, 1)
		span.SetAttributes(attribute.Bool("grantd.baggage.key_dropped", true))
	}
	if evicted > 0 {
		t.counters.membersEvicted.Add(ctx, int64(evicted))
		span.SetAttributes(attribute.Int("grantd.baggage.members_evicted", evicted))
	}
	return baggage.ContextWithBaggage(ctx, bag)
}

// setKey sets the member within W3C's limits, and returns how many others it had to evict. The longest go first, so that
// they are few; which of them came last is not known any more. A key that cannot be a member is not ok, and the member is
// gone then: what another said is no better.
func setKey(bag baggage.Baggage, key string) (_ baggage.Baggage, evicted int, ok bool) {
	member, err := baggage.NewMemberRaw(KeyName, key)
	if err != nil || len(member.String()) > maxBaggageBytes {
		return bag.DeleteMember(KeyName), 0, false
	}
	with, err := bag.SetMember(member)
	if err != nil {
		return bag.DeleteMember(KeyName), 0, false
	}
	if with.Len() <= maxBaggageMembers && len(with.String()) <= maxBaggageBytes {
		return with, 0, true
	}
	others := with.DeleteMember(KeyName).Members()
	slices.SortFunc(others, func(a, b baggage.Member) int {
		return cmp.Or(cmp.Compare(len(b.String()), len(a.String())), cmp.Compare(a.Key(), b.Key()))
	})
	for _, m := range others {
		with = with.DeleteMember(m.Key())
		evicted++
		if with.Len() <= maxBaggageMembers && len(with.String()) <= maxBaggageBytes {
			break
		}
	}
	return with, evicted, true
}
