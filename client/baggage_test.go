package client_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// members is the baggage that the server gets, as its own propagator would read it.
func members(t *testing.T, md metadata.MD) map[string]string {
	t.Helper()
	got := map[string]string{}
	bag, err := baggage.Parse(strings.Join(md.Get("baggage"), ","))
	if err != nil {
		t.Errorf("baggage %q: %v", md.Get("baggage"), err)
	}
	for _, m := range bag.Members() {
		got[m.Key()] = m.Value()
	}
	return got
}

func withMembers(t *testing.T, ctx context.Context, members map[string]string) context.Context {
	t.Helper()
	bag := baggage.FromContext(ctx)
	for name, value := range members {
		m, err := baggage.NewMemberRaw(name, value)
		if err != nil {
			t.Fatal(err)
		}
		if bag, err = bag.SetMember(m); err != nil {
			t.Fatal(err)
		}
	}
	return baggage.ContextWithBaggage(ctx, bag)
}

// arrivedWith sends one grant and returns the metadata that the server got.
func arrivedWith(t *testing.T, ctx context.Context, key string, opts ...grpc.DialOption) metadata.MD {
	t.Helper()
	s := &server{answer: func(context.Context, int) (*entitlementv1.GrantEntitlementResponse, error) { return applied(), nil }}
	if _, err := setup(t, s, opts...).Grant(ctx, request(key)); err != nil {
		t.Fatal(err)
	}
	return s.seen()[0].metadata
}

const member = "entitlement.idempotency_key"

// The application's baggage may hold what must not leave its process; without a propagator, nothing but the key does.
func TestBaggage_WithoutPropagator(t *testing.T) {
	ctx := withMembers(t, t.Context(), map[string]string{"user.email": "a@example.com"})
	got := members(t, arrivedWith(t, ctx, key))
	if diff := cmp.Diff(map[string]string{member: key}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := baggage.FromContext(ctx).Len(); n != 1 {
		t.Errorf("the caller's own context has %d members now", n)
	}
}

func TestBaggage_EveryCharacterOfAKeyArrives(t *testing.T) {
	const every = "AZaz09._:/~@+=-"
	md := arrivedWith(t, t.Context(), every)
	if got := md.Get("baggage"); !cmp.Equal(got, []string{member + "=" + every}) {
		t.Errorf("baggage %q", got)
	}
}

func TestBaggage_GlobalPropagator(t *testing.T) {
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}))
	t.Cleanup(func() { otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator()) })
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	ctx := trace.ContextWithSpanContext(t.Context(), span)
	// The key of the request that this call is made for is not the key of this call.
	ctx = withMembers(t, ctx, map[string]string{"region": "eu", member: "upstream:key"})
	md := arrivedWith(t, ctx, key)
	if diff := cmp.Diff(map[string]string{"region": "eu", member: key}, members(t, md)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	want := fmt.Sprintf("00-%s-%s-01", span.TraceID(), span.SpanID())
	if got := md.Get("traceparent"); !cmp.Equal(got, []string{want}) {
		t.Errorf("traceparent %q, want %q", got, want)
	}
}

func TestBaggage_OtelgrpcHandler(t *testing.T) {
	handler := otelgrpc.NewClientHandler(otelgrpc.WithPropagators(propagation.Baggage{}))
	ctx := withMembers(t, t.Context(), map[string]string{"region": "eu"})
	got := members(t, arrivedWith(t, ctx, key, grpc.WithStatsHandler(handler)))
	if diff := cmp.Diff(map[string]string{"region": "eu", member: key}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestBaggage_HeaderOfTheApplicationIsKept(t *testing.T) {
	ctx := metadata.AppendToOutgoingContext(t.Context(), "baggage", "region=eu", "baggage", "tier=1")
	got := members(t, arrivedWith(t, ctx, key))
	if diff := cmp.Diff(map[string]string{"region": "eu", "tier": "1", member: key}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	ctx = metadata.AppendToOutgoingContext(t.Context(), "baggage", "not baggage")
	if got := arrivedWith(t, ctx, key).Get("baggage"); !cmp.Equal(got, []string{"not baggage"}) {
		t.Errorf("baggage %q", got)
	}
}

// A receiver may drop any member of baggage that is over the limit, or all of it.
func TestBaggage_FullStaysAsItIs(t *testing.T) {
	many := map[string]string{}
	for i := range 64 {
		many[fmt.Sprintf("m%d", i)] = "v"
	}
	for name, full := range map[string]map[string]string{
		"members": many,
		"bytes":   {"m": strings.Repeat("v", 8180)},
	} {
		t.Run(name, func(t *testing.T) {
			handler := otelgrpc.NewClientHandler(otelgrpc.WithPropagators(propagation.Baggage{}))
			got := members(t, arrivedWith(t, withMembers(t, t.Context(), full), key, grpc.WithStatsHandler(handler)))
			if diff := cmp.Diff(full, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// The server refuses such keys, and does it itself.
func TestBaggage_MalformedKeyFailsNoCall(t *testing.T) {
	for _, key := range []string{"", "a key\nwith, all; kinds=of%things", strings.Repeat("k", 10_000)} {
		arrivedWith(t, t.Context(), key)
	}
}

// Where the key finds no place, no other call's key stands in it.
func TestBaggage_StaleKeyIsNotSent(t *testing.T) {
	handler := otelgrpc.NewClientHandler(otelgrpc.WithPropagators(propagation.Baggage{}))
	ctx := withMembers(t, t.Context(), map[string]string{"region": "eu", member: "upstream:key"})
	got := members(t, arrivedWith(t, ctx, strings.Repeat("k", 10_000), grpc.WithStatsHandler(handler)))
	if diff := cmp.Diff(map[string]string{"region": "eu"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	ctx = metadata.AppendToOutgoingContext(t.Context(), "baggage", member+"=upstream:key")
	if got := arrivedWith(t, ctx, strings.Repeat("k", 10_000)).Get("baggage"); len(got) != 0 {
		t.Errorf("baggage %q", got)
	}
}
