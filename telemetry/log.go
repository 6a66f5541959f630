package telemetry

import (
	"context"
	"log/slog"

	"go.opentelemetry.io/otel/baggage"
)

// LogHandler returns a handler that adds to each record what its context says of the call or delivery that it is about: trace_id and
// span_id, which are those of its attempt, and the idempotency key under KeyName. A record that names the key by itself is left as it is.
func LogHandler(h slog.Handler) slog.Handler { return logHandler{Handler: h} }

type logHandler struct {
	slog.Handler
	// keyed says that all records name the key.
	keyed bool
}

func (h logHandler) Handle(ctx context.Context, r slog.Record) error {
	span := RemoteSpan(ctx)
	key := ""
	if !h.keyed && !names(r) {
		key = baggage.FromContext(ctx).Member(KeyName).Value()
	}
	if span.IsValid() || key != "" {
		r = r.Clone()
	}
	if span.IsValid() {
		r.AddAttrs(slog.String("trace_id", span.TraceID().String()), slog.String("span_id", span.SpanID().String()))
	}
	if key != "" {
		r.AddAttrs(slog.String(KeyName, key))
	}
	return h.Handler.Handle(ctx, r)
}

// names reports whether the record names the key.
func names(r slog.Record) bool {
	found := false
	r.Attrs(func(a slog.Attr) bool {
		found = a.Key == KeyName
		return !found
	})
	return found
}

func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		h.keyed = h.keyed || a.Key == KeyName
	}
	h.Handler = h.Handler.WithAttrs(attrs)
	return h
}

func (h logHandler) WithGroup(name string) slog.Handler {
	h.Handler = h.Handler.WithGroup(name)
	return h
}
