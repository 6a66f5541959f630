package telemetry_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"google.golang.org/grpc/metadata"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/telemetry"
	"github.com/grantd/grantd/telemetry/otlptest"
)

// headerOf is a baggage header with n members besides what it starts with.
func headerOf(start string, n, valueBytes int) string {
	members := []string{}
	if start != "" {
		members = append(members, start)
	}
	for i := range n {
		members = append(members, fmt.Sprintf("m%02d=%s", i, strings.Repeat("v", valueBytes)))
	}
	return strings.Join(members, ",")
}

// Whatever the caller's baggage is, the call succeeds, its span has the request's key, and so has the baggage that goes on.
func TestWithKey_CallersBaggage(t *testing.T) {
	const own = telemetry.KeyName + "=" + key
	for name, c := range map[string]struct {
		header string
		// kept are members that must still be there; members is how many there are in all.
		kept                       map[string]string
		members                    int
		replaced, evicted, dropped string
	}{
		"none":               {members: 1},
		"others":             {header: "region=eu,tier=1;p=q", kept: map[string]string{"region": "eu", "tier": "1"}, members: 3},
		"the key":            {header: own, members: 1},
		"the key, escaped":   {header: strings.ReplaceAll(own, ":", "%3A"), members: 1},
		"the key, twice":     {header: telemetry.KeyName + "=other," + own, members: 1},
		"another key":        {header: telemetry.KeyName + "=other,region=eu", kept: map[string]string{"region": "eu"}, members: 2, replaced: "1"},
		"an empty key":       {header: telemetry.KeyName + "=", members: 1},
		"malformed":          {header: ";;;==,", members: 1},
		"malformed in part":  {header: "region=eu,not a member,b=%zz", kept: map[string]string{"region": "eu"}, members: 2},
		"not UTF-8":          {header: "b=%ff%fe", kept: map[string]string{"b": "\ufffd"}, members: 2},
		"oversized":          {header: headerOf("", 9, 1000), members: 1},
		"too many":           {header: headerOf("", 70, 1), members: 64, evicted: "1"},
		"full":               {header: headerOf("", 64, 1), members: 64, evicted: "1"},
		"full, with the key": {header: headerOf(own, 63, 1), members: 64},
		"full, with another": {header: headerOf(telemetry.KeyName+"=other", 63, 1), members: 64, replaced: "1"},
		"full of bytes":      {header: "region=eu," + headerOf("", 8, 1015), kept: map[string]string{"region": "eu"}, members: 9, evicted: "1"},
	} {
		t.Run(name, func(t *testing.T) {
			var onward baggage.Baggage
			b := setup(t, func(tel *telemetry.Telemetry) handler {
				return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
					ctx = tel.WithKey(ctx, r.GetIdempotencyKey())
					onward = baggage.FromContext(ctx)
					_, span := tel.TracerProvider.Tracer("test").Start(ctx, "below")
					span.End()
					return nil
				}
			})
			ctx := t.Context()
			if c.header != "" {
				ctx = metadata.AppendToOutgoingContext(ctx, "baggage", c.header)
			}
			b.grant(t, ctx, key)

			found := b.collector.AwaitAttribute(2, telemetry.KeyName, key)
			for _, span := range found {
				noted := map[string]string{}
				for name, value := range span.Attributes() {
					if strings.HasPrefix(name, "grantd.baggage.") {
						noted[name] = value
					}
				}
				want := map[string]string{}
				if span.GetName() != "below" && c.replaced != "" {
					want["grantd.baggage.key_replaced"] = "true"
				}
				if span.GetName() != "below" && c.evicted != "" {
					want["grantd.baggage.members_evicted"] = c.evicted
				}
				if diff := cmp.Diff(want, noted); diff != "" {
					t.Errorf("%s (-want +got):\n%s", span.GetName(), diff)
				}
			}
			if got := onward.Member(telemetry.KeyName).Value(); got != key {
				t.Errorf("the member is %q", got)
			}
			if onward.Len() != c.members || len(onward.String()) > 8192 {
				t.Errorf("%d members, %d bytes, want %d members", onward.Len(), len(onward.String()), c.members)
			}
			for name, value := range c.kept {
				if got := onward.Member(name).Value(); !strings.HasPrefix(got, value) {
					t.Errorf("%s is %q, want %q", name, got, value)
				}
			}
			for metric, want := range map[string]string{
				"grantd_baggage_keys_replaced_total": c.replaced, "grantd_baggage_members_evicted_total": c.evicted,
				"grantd_baggage_keys_dropped_total": c.dropped,
			} {
				if got := sample(t, b.Telemetry, metric); got != want && (got != "0" || want != "") {
					t.Errorf("%s is %s, want %q", metric, got, want)
				}
			}
		})
	}
}

// Validation refuses such a key; if it did not, the call would still not fail here.
func TestWithKey_KeyThatIsNoMember(t *testing.T) {
	b := setup(t, noHandler)
	ctx, span := b.TracerProvider.Tracer("test").Start(t.Context(), "call")
	other, err := baggage.Parse("region=eu," + telemetry.KeyName + "=other")
	if err != nil {
		t.Fatal(err)
	}
	ctx = b.WithKey(baggage.ContextWithBaggage(ctx, other), strings.Repeat("k", 8200))
	span.End()
	if got := baggage.FromContext(ctx).String(); got != "region=eu" {
		t.Errorf("baggage %q", got)
	}
	b.collector.AwaitAttribute(1, "grantd.baggage.key_dropped", "true")
	if got := sample(t, b.Telemetry, "grantd_baggage_keys_dropped_total"); got != "1" {
		t.Errorf("%s keys dropped", got)
	}
}

func TestWithKey_WithoutKey(t *testing.T) {
	b := setup(t, noHandler)
	ctx, span := b.TracerProvider.Tracer("test").Start(t.Context(), "look-up")
	defer span.End()
	if b.WithKey(ctx, "") != ctx {
		t.Error("another context")
	}
}

// The caller decides: what it does not record costs nothing here.
func TestWithKey_CallerDoesNotRecord(t *testing.T) {
	same := false
	b := setup(t, func(tel *telemetry.Telemetry) handler {
		return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
			same = tel.WithKey(ctx, r.GetIdempotencyKey()) == ctx
			return nil
		}
	})
	const unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	b.grant(t, metadata.AppendToOutgoingContext(t.Context(), "traceparent", unsampled), "unsampled")
	if !same {
		t.Error("another context")
	}
	// Only where it says another key there is something to do: log lines would name that one.
	spoofed := metadata.AppendToOutgoingContext(t.Context(), "traceparent", unsampled, "baggage", telemetry.KeyName+"=other")
	b.grant(t, spoofed, "unsampled")
	if got := sample(t, b.Telemetry, "grantd_baggage_keys_replaced_total"); same || got != "1" {
		t.Errorf("another key: the same context is %t, %s replaced", same, got)
	}
	b.grant(t, t.Context(), "sampled")
	b.finish(t)
	if spans := b.collector.Spans(); len(spans) != 1 || spans[0].Attribute(telemetry.KeyName) != "sampled" {
		t.Errorf("spans:%s", b.collector)
	}
}

// One search for a key finds its item, with the outcome of that item alone, in the trace of the batch.
func TestStartItem(t *testing.T) {
	b := setup(t, noHandler)
	caller, err := baggage.Parse(telemetry.KeyName + "=other,region=eu")
	if err != nil {
		t.Fatal(err)
	}
	ctx, call := b.TracerProvider.Tracer("test").Start(baggage.ContextWithBaggage(t.Context(), caller), "batch")
	const items = 4000 // four full batches at once
	for i := range items {
		ctx, item := b.StartItem(ctx, fmt.Sprint("key-", i))
		if got := baggage.FromContext(ctx).Member(telemetry.KeyName).Value(); got != fmt.Sprint("key-", i) {
			t.Errorf("the member is %q", got)
		}
		item.SetAttributes(attribute.Int("item", i))
		item.End()
	}
	call.End()
	found := map[string]*otlptest.Span{}
	for _, item := range b.collector.Await(items, func(s *otlptest.Span) bool { return s.GetName() == "grantd.batch.item" }) {
		found[item.Attribute(telemetry.KeyName)] = item
	}
	for i := range items {
		item := found[fmt.Sprint("key-", i)]
		if item == nil || item.Trace() != call.SpanContext().TraceID().String() ||
			item.Parent() != call.SpanContext().SpanID().String() || item.Attribute("item") != fmt.Sprint(i) {
			t.Fatalf("item %d is %v", i, item)
		}
	}
	if got := sample(t, b.Telemetry, "grantd_baggage_keys_replaced_total"); got != "0" {
		t.Errorf("%s keys replaced: a batch's caller cannot name one", got)
	}
}

func noHandler(*telemetry.Telemetry) handler { return nil }
