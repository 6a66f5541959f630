package outbox_test

import (
	"io"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/grantd/grantd/outbox"
)

// The receiver's answer alone does not say what becomes of a delivery: the span says what was recorded, also of a call that was cut off.
func TestAttempt_SpanHasTheOutcome(t *testing.T) {
	var answer atomic.Int32
	called := make(chan struct{}, 8)
	r := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		called <- struct{}{}
		code := int(answer.Load())
		if code == 0 {
			<-r.Context().Done()
			return
		}
		// The retry is accepted.
		answer.CompareAndSwap(http.StatusServiceUnavailable, http.StatusNoContent)
		w.WriteHeader(code)
	})
	b := setup(t, "destinations:"+hook("crm", r.URL, r.ca, "deadline: 30s\n  timeout: 30s\n  retry: {limit: 5, min_delay: 10ms, max_delay: 50ms}", ""))
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	replica := b.start(func(c *outbox.Config) { c.TracerProvider, c.Grace = provider, 1 })
	answer.Store(http.StatusServiceUnavailable)
	b.grant("t1", "INV-1", "team_access")
	b.awaitState("crm", delivered, 1)
	answer.Store(http.StatusUnprocessableEntity)
	b.grant("t2", "INV-1", "team_access")
	b.awaitState("crm", dead, 1)
	answer.Store(http.StatusBadGateway)
	b.grant("t3", "INV-1", "team_access")
	b.awaitState("crm", unknown, 1)
	for range 4 {
		<-called
	}
	answer.Store(0)
	b.grant("t4", "INV-1", "team_access")
	<-called
	replica.stop()
	var got []string
	for _, span := range spans.Ended() {
		attributes := attribute.NewSet(span.Attributes()...)
		outcome, _ := attributes.Value("grantd.delivery.outcome")
		got = append(got, outcome.AsString())
		if span.EndTime().Before(span.StartTime()) {
			t.Errorf("%s ends before it starts", outcome.AsString())
		}
	}
	if want := []string{"retry", "delivered", "dead", "unknown", "cut_off"}; !slices.Equal(got, want) {
		t.Errorf("the outcomes are %q, want %q", got, want)
	}
}
