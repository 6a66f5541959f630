package telemetry

import (
	"context"
	"log/slog"
	"sync/atomic"

	"go.opentelemetry.io/otel/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// exports counts and logs what could not be exported. The SDK would hand each error to its global handler, which writes it to
// standard error as plain text, once for every few hundred spans.
type exports struct {
	sdktrace.SpanExporter
	lost    metric.Int64Counter
	log     *slog.Logger
	failing atomic.Bool
}

func (e *exports) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if err := e.SpanExporter.ExportSpans(ctx, spans); err != nil {
		e.lost.Add(ctx, int64(len(spans)))
		if !e.failing.Swap(true) {
			e.log.WarnContext(ctx, "spans cannot be exported and are lost, until further notice", "error", err)
		}
		return nil
	}
	if e.failing.Swap(false) {
		e.log.InfoContext(ctx, "spans are exported again")
	}
	return nil
}
