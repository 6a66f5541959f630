package telemetry

import (
	"context"
	"strconv"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
)

// RemoteSpan returns the span that an attempt is recorded under: the call's own or, while tracing is off, the caller's, as its
// traceparent names it. It is not valid where there is neither.
func RemoteSpan(ctx context.Context) trace.SpanContext {
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		return span
	}
	traceparent := incoming(ctx, "traceparent")
	if traceparent == "" {
		return trace.SpanContext{}
	}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(ctx, onlyTraceparent(traceparent)))
}

// PreviousAttempts returns gRPC's count of the tries of this call that its client made before this one, 0 where the client
// does not say, or says no number.
func PreviousAttempts(ctx context.Context) int32 {
	count := incoming(ctx, "grpc-previous-rpc-attempts")
	if count == "" {
		return 0
	}
	n, err := strconv.ParseUint(count, 10, 31)
	if err != nil {
		return 0
	}
	return int32(n)
}

// incoming returns the first value of a metadata key, which must be in lower case.
func incoming(ctx context.Context, key string) string {
	values := metadata.ValueFromIncomingContext(ctx, key)
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// onlyTraceparent is a carrier of nothing else: nobody keeps the trace state.
type onlyTraceparent string

func (c onlyTraceparent) Get(key string) string {
	if key == "traceparent" {
		return string(c)
	}
	return ""
}

func (onlyTraceparent) Set(string, string) {}

func (onlyTraceparent) Keys() []string { return []string{"traceparent"} }
