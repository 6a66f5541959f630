package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/baggage"
	"google.golang.org/grpc/metadata"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/telemetry"
)

// record logs once through a handler, and returns what stands in the line beside its time, level and message.
func record(t *testing.T, log func(*slog.Logger)) map[string]any {
	t.Helper()
	var out bytes.Buffer
	log(slog.New(telemetry.LogHandler(slog.NewJSONHandler(&out, nil))))
	if n := strings.Count(out.String(), `"`+telemetry.KeyName+`"`); n > 1 {
		t.Errorf("the key stands %d times in %s", n, &out)
	}
	line := map[string]any{}
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v: %s", err, &out)
	}
	for _, name := range []string{"time", "level", "msg"} {
		delete(line, name)
	}
	return line
}

func TestLog_NamesTraceAndKeyOfTheCall(t *testing.T) {
	var line, without map[string]any
	b := setup(t, func(tel *telemetry.Telemetry) handler {
		return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
			ctx = tel.WithKey(ctx, r.GetIdempotencyKey())
			line = record(t, func(log *slog.Logger) { log.With("a", 1).WarnContext(ctx, "message", "b", "two") })
			without = record(t, func(log *slog.Logger) { log.Warn("message", "b", "two") })
			return nil
		}
	})
	// The caller says another key, and does not record: the line has the request's all the same.
	for _, flags := range []string{"-01", "-00"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", strings.TrimSuffix(traceparent, "-01")+flags,
			"baggage", telemetry.KeyName+"=other")
		b.grant(t, ctx, key)
		if id, _ := line["span_id"].(string); len(id) != 16 || id == spanID {
			t.Errorf("%s: span_id %q, want the server's own", flags, id)
		}
		delete(line, "span_id")
		want := map[string]any{"a": 1.0, "b": "two", "trace_id": traceID, telemetry.KeyName: key}
		if diff := cmp.Diff(want, line); diff != "" {
			t.Errorf("%s (-want +got):\n%s", flags, diff)
		}
		if diff := cmp.Diff(map[string]any{"b": "two"}, without); diff != "" {
			t.Errorf("%s, without a context (-want +got):\n%s", flags, diff)
		}
	}
}

// While tracing is off, a line names the caller's trace, as the attempt does.
func TestLog_TracingIsOff(t *testing.T) {
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("traceparent", traceparent))
	line := record(t, func(log *slog.Logger) { log.ErrorContext(ctx, "message") })
	if diff := cmp.Diff(map[string]any{"trace_id": traceID, "span_id": spanID}, line); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestLog_RecordNamesTheKeyItself(t *testing.T) {
	bag, err := baggage.Parse(telemetry.KeyName + "=of-the-context")
	if err != nil {
		t.Fatal(err)
	}
	ctx := baggage.ContextWithBaggage(t.Context(), bag)
	for name, log := range map[string]func(*slog.Logger){
		"record": func(log *slog.Logger) { log.ErrorContext(ctx, "message", "a", 1, telemetry.KeyName, key, "b", 2) },
		"logger": func(log *slog.Logger) { log.With(telemetry.KeyName, key).ErrorContext(ctx, "message", "a", 1, "b", 2) },
	} {
		if diff := cmp.Diff(map[string]any{"a": 1.0, "b": 2.0, telemetry.KeyName: key}, record(t, log)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	line := record(t, func(log *slog.Logger) { log.WithGroup("g").ErrorContext(ctx, "message", "a", 1) })
	if diff := cmp.Diff(map[string]any{"g": map[string]any{"a": 1.0, telemetry.KeyName: "of-the-context"}}, line); diff != "" {
		t.Errorf("in a group (-want +got):\n%s", diff)
	}
}

// A level that is not wanted costs nothing.
func TestLog_Level(t *testing.T) {
	h := telemetry.LogHandler(slog.NewTextHandler(&bytes.Buffer{}, nil))
	if h.Enabled(t.Context(), slog.LevelDebug) || !h.Enabled(t.Context(), slog.LevelInfo) {
		t.Error("the handler's level is not that of what it stands on")
	}
}
