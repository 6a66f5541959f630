package outbox_test

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// Case 19: the caller's baggage carries a user's e-mail beside the key. An external destination gets Idempotency-Key and no context at all; an
// internal one gets the trace and the key's member, and nothing else. Deliveries continue the winner's trace.
func TestCarry_ContextStaysInside(t *testing.T) {
	external, fromExternal := recorder(t)
	internal, fromInternal := recorder(t)
	b := setup(t, "destinations:"+hook("partner", external.URL, external.ca, "", "")+hook("products", internal.URL, internal.ca, "internal: true", ""))
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	replica := b.start(func(c *outbox.Config) { c.TracerProvider = provider })

	bag, err := baggage.Parse("user.email=ann%40example.com," + telemetry.KeyName + "=spoofed,region=eu")
	if err != nil {
		t.Fatal(err)
	}
	ctx := baggage.ContextWithBaggage(t.Context(), bag)
	c := grant("acme", "INV-1", "team_access")
	c.Origin = store.Origin{EventID: "evt-1", TraceID: trace.TraceID{1, 2, 3}, SpanID: trace.SpanID{4, 5, 6}, Sampled: true}
	if _, err := b.store.Apply(ctx, &c); err != nil {
		t.Fatal(err)
	}
	b.awaitState("partner", delivered, 1)
	b.awaitState("products", delivered, 1)
	replica.stop()

	got := <-fromExternal
	for name, values := range got.header {
		if text := strings.ToLower(name + strings.Join(values, "")); strings.Contains(text, "baggage") || strings.Contains(text, "trace") || strings.Contains(text, "example.com") {
			t.Errorf("an external destination gets %s: %v", name, values)
		}
	}
	key := b.list("acme", "partner")[0].Key
	if got.header.Get("Idempotency-Key") != key || strings.Contains(string(got.body), "ann") {
		t.Errorf("%v\n%s", got.header, got.body)
	}

	got = <-fromInternal
	if text := got.header.Get("Baggage"); text != telemetry.KeyName+"=grant:INV-1:team_access" {
		t.Errorf("an internal destination gets the baggage %q", text)
	}
	ended := spans.Ended()
	if len(ended) != 2 {
		t.Fatalf("%d spans", len(ended))
	}
	for _, span := range ended {
		if span.SpanContext().TraceID() != c.Origin.TraceID || span.Parent().SpanID() != c.Origin.SpanID || !span.Parent().IsRemote() {
			t.Errorf("%s is in %v below %v", span.Name(), span.SpanContext().TraceID(), span.Parent().SpanID())
		}
		attributes := attribute.NewSet(span.Attributes()...)
		if v, _ := attributes.Value(telemetry.KeyName); v.AsString() != c.IdempotencyKey {
			t.Errorf("%s: the key is %q", span.Name(), v.AsString())
		}
		for name, want := range map[attribute.Key]string{"entitlement.tenant_id": "acme", "entitlement.event_id": "evt-1"} {
			if v, _ := attributes.Value(name); v.AsString() != want {
				t.Errorf("%s: %s is %q", span.Name(), name, v.AsString())
			}
		}
		destination, _ := attributes.Value("grantd.delivery.destination")
		deliveryKey, _ := attributes.Value("grantd.delivery.key")
		if deliveryKey.AsString() != b.list("acme", destination.AsString())[0].Key {
			t.Errorf("%s: the delivery key is %q", span.Name(), deliveryKey.AsString())
		}
		if destination.AsString() == "products" {
			want := "00-" + span.SpanContext().TraceID().String() + "-" + span.SpanContext().SpanID().String() + "-01"
			if h := got.header.Get("Traceparent"); h != want {
				t.Errorf("traceparent %s, want %s", h, want)
			}
		}
	}
}

// With tracing off here, the trace of the caller goes on all the same, sampled or not as the caller decided. A replica that does trace makes no
// spans of what the caller did not sample: the rest of that trace is nowhere.
func TestCarry_WithoutASpanHere(t *testing.T) {
	headers := make(chan http.Header, 1)
	r := newReceiver(t, func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		headers <- r.Header.Clone()
	})
	b := setup(t, "destinations:"+hook("products", r.URL, r.ca, "internal: true", ""))
	send := func(invoice string, sampled bool, change ...func(*outbox.Config)) string {
		replica := b.start(change...)
		defer replica.stop()
		c := grant("acme", invoice, "team_access")
		c.Origin = store.Origin{TraceID: trace.TraceID{1, 2, 3}, SpanID: trace.SpanID{4, 5, 6}, Sampled: sampled}
		b.apply(c)
		return (<-headers).Get("Traceparent")
	}
	const parent = "00-01020300000000000000000000000000-0405060000000000-"
	if h := send("INV-1", true); h != parent+"01" {
		t.Errorf("off, sampled: traceparent %s", h)
	}
	if h := send("INV-2", false); h != parent+"00" {
		t.Errorf("off, not sampled: traceparent %s", h)
	}
	spans := tracetest.NewSpanRecorder()
	h := send("INV-3", false, func(c *outbox.Config) {
		c.TracerProvider = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	})
	if !strings.HasPrefix(h, parent[:36]) || !strings.HasSuffix(h, "-00") || len(spans.Ended()) != 0 {
		t.Errorf("on, not sampled: traceparent %s, %d spans", h, len(spans.Ended()))
	}
}

// What waits for an operator is logged with the winner's trace and the key, whichever replica gave it up.
func TestCarry_LogNamesTheWinner(t *testing.T) {
	r := newReceiver(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) })
	b := setup(t, "destinations:"+hook("crm", r.URL, r.ca, "", ""))
	c := grant("acme", "INV-1", "team_access")
	c.Origin = store.Origin{TraceID: trace.TraceID{1, 2, 3}, SpanID: trace.SpanID{4, 5, 6}}
	b.apply(c)
	var log bytes.Buffer
	replica := b.start(func(c *outbox.Config) {
		c.Log = slog.New(telemetry.LogHandler(slog.NewTextHandler(&log, nil)))
	})
	b.awaitState("crm", dead, 1)
	replica.stop()
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "waits for an operator") {
			for _, want := range []string{
				"trace_id=01020300000000000000000000000000", "span_id=0405060000000000", telemetry.KeyName + "=" + c.IdempotencyKey,
				"delivery_key=" + b.list("acme", "crm")[0].Key,
			} {
				if !strings.Contains(line, want) {
					t.Errorf("no %s in %s", want, line)
				}
			}
			return
		}
	}
	t.Errorf("not logged:\n%s", &log)
}
