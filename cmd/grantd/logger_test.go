package main

import (
	"bytes"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"
)

// Both formats name the trace that a line is about.
func TestLogger_NamesTheTrace(t *testing.T) {
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2},
	}))
	for format, want := range map[string]string{
		"text": "trace_id=01000000000000000000000000000000 span_id=0200000000000000",
		"json": `"trace_id":"01000000000000000000000000000000","span_id":"0200000000000000"`,
	} {
		var out bytes.Buffer
		log, err := (&service{LogFormat: format, LogLevel: "info"}).logger(&out)
		if err != nil {
			t.Fatal(err)
		}
		log.InfoContext(ctx, "message")
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s: %s", format, &out)
		}
	}
}
