package telemetry_test

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/telemetry"
)

const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	spanID      = "b7ad6b7169203331"
	traceparent = "00-" + traceID + "-" + spanID + "-01"
)

func TestRemoteSpan_Off(t *testing.T) {
	clearEnvironment(t)
	var got trace.SpanContext
	b := start(t, func(tel *telemetry.Telemetry) handler {
		return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
			got = telemetry.RemoteSpan(tel.WithKey(ctx, r.GetIdempotencyKey()))
			return nil
		}
	})
	for name, c := range map[string]struct {
		headers []string
		valid   bool
	}{
		"none":           {nil, false},
		"a caller's":     {[]string{traceparent}, true},
		"not sampled":    {[]string{"00-" + traceID + "-" + spanID + "-00"}, true},
		"a later format": {[]string{"01-" + traceID + "-" + spanID + "-01-more"}, true},
		"two":            {[]string{traceparent, "00-11111111111111111111111111111111-2222222222222222-01"}, true},
		"empty":          {[]string{""}, false},
		"malformed":      {[]string{"00-" + traceID + "-nonsense"}, false},
		"zeroes":         {[]string{"00-00000000000000000000000000000000-0000000000000000-01"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			for _, h := range c.headers {
				ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", h)
			}
			b.grant(t, ctx, key)
			if got.IsValid() != c.valid || c.valid && (got.TraceID().String() != traceID || got.SpanID().String() != spanID) {
				t.Errorf("got %s %s", got.TraceID(), got.SpanID())
			}
		})
	}
}

// While tracing is on, the attempt's span is the server's own, in the caller's trace.
func TestRemoteSpan_On(t *testing.T) {
	var got trace.SpanContext
	b := setup(t, func(tel *telemetry.Telemetry) handler {
		return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
			got = telemetry.RemoteSpan(tel.WithKey(ctx, r.GetIdempotencyKey()))
			return nil
		}
	})
	b.grant(t, metadata.AppendToOutgoingContext(t.Context(), "traceparent", traceparent), key)
	span := b.collector.AwaitAttribute(1, telemetry.KeyName, key)[0]
	if span.Trace() != traceID || span.Parent() != spanID || got.SpanID().String() != span.ID() {
		t.Errorf("got %s %s, exported %s %s < %s", got.TraceID(), got.SpanID(), span.Trace(), span.ID(), span.Parent())
	}
}

func TestPreviousAttempts_OfARealRetry(t *testing.T) {
	clearEnvironment(t)
	const policy = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.001s",
		"maxBackoff": "0.001s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
	var got []int32
	b := start(t, func(*telemetry.Telemetry) handler {
		return func(ctx context.Context, _ *entitlementv1.GrantEntitlementRequest) error {
			got = append(got, telemetry.PreviousAttempts(ctx))
			if len(got) < 3 {
				return status.Error(codes.Unavailable, "try again")
			}
			return nil
		}
	}, grpc.WithDefaultServiceConfig(policy))
	b.grant(t, t.Context(), key)
	if len(got) != 3 || got[0] != 0 || got[1] != 1 || got[2] != 2 {
		t.Errorf("the tries said %v", got)
	}
}

func TestPreviousAttempts_Malformed(t *testing.T) {
	for _, value := range []string{"", "-1", "x", "1.5", "99999999999999999999"} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("grpc-previous-rpc-attempts", value))
		if got := telemetry.PreviousAttempts(ctx); got != 0 {
			t.Errorf("%q is %d", value, got)
		}
	}
}

// Off must cost nothing.
func TestOff_Allocations(t *testing.T) {
	clearEnvironment(t)
	tel := setUp(t)
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("user-agent", "test", ":authority", "test"))
	for name, f := range map[string]func(){
		"WithKey":          func() { tel.WithKey(ctx, key) },
		"StartItem":        func() { tel.StartItem(ctx, key) },
		"RemoteSpan":       func() { telemetry.RemoteSpan(ctx) },
		"PreviousAttempts": func() { telemetry.PreviousAttempts(ctx) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

func BenchmarkRemoteSpan(b *testing.B) {
	ctx := metadata.NewIncomingContext(b.Context(), metadata.Pairs("traceparent", traceparent, "user-agent", "test"))
	b.ReportAllocs()
	for b.Loop() {
		telemetry.RemoteSpan(ctx)
	}
}
