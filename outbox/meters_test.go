package outbox_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/cloudevents/sdk-go/v2/event"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/grantd/grantd/outbox"
)

func TestMeters(t *testing.T) {
	in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, e *event.Event, count int) bool {
		switch {
		case e.Subject() == "refused":
			w.WriteHeader(http.StatusForbidden)
		case e.Subject() == "late" && count == 1:
			w.WriteHeader(http.StatusServiceUnavailable)
		case e.Subject() == "proxied" && count == 1:
			w.WriteHeader(http.StatusBadGateway) // a proxy's: the receiver may have it
		default:
			return false
		}
		return true
	})
	gone := newReceiver(t, nil)
	gone.Close()
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, fast, "")+hook("away", gone.URL, gone.ca, fast, ""))
	reader := sdkmetric.NewManualReader()
	b.start(func(c *outbox.Config) { c.MeterProvider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)) })
	for _, name := range []string{"accepted", "late", "proxied", "refused"} {
		b.grant("acme", "INV-1", name)
	}
	b.awaitState("crm", delivered, 3)
	b.awaitState("crm", dead, 1)
	b.await("it was probed", `SELECT count(*) > 5 FROM all_delivery_attempts a JOIN deliveries USING (tenant_id, delivery_id) WHERE destination = 'away' AND a.outcome <> 0`)

	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	note := func(name string, set attribute.Set, value float64) {
		destination, _ := set.Value("destination")
		outcome, _ := set.Value("outcome")
		state, _ := set.Value("state")
		cause, _ := set.Value("cause")
		got[fmt.Sprintf("%s %s %s%s%s", name, destination.AsString(), outcome.AsString(), state.AsString(), cause.AsString())] = value
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, p.Value)
				}
			}
		}
	}
	for name, want := range map[string]float64{
		"grantd.delivery.attempts crm delivered": 3, "grantd.delivery.attempts crm retry": 2, "grantd.delivery.attempts crm dead": 1,
		"grantd.destination.breaker crm closed": 1, "grantd.destination.breaker crm open": 0, "grantd.destination.breaker crm paused": 0,
		"grantd.destination.breaker away closed": 0, "grantd.delivery.oldest_due_age crm ": 0,
		"grantd.deliveries crm pending": 0, "grantd.deliveries crm sending": 0, "grantd.deliveries crm unknown": 0, "grantd.deliveries crm dead": 1,
		"grantd.duplicates  webhook": 1,
	} {
		if value, ok := got[name]; !ok || value != want {
			t.Errorf("%s is %v, want %v", name, value, want)
		}
	}
	if got["grantd.deliveries away pending"]+got["grantd.deliveries away sending"] != 4 {
		t.Errorf("what waits at the destination that is away: %v", got)
	}
	if got["grantd.delivery.attempts away retry"] < 3 || got["grantd.delivery.oldest_due_age away "] <= 0 {
		t.Errorf("the destination that is away: %v", got)
	}
}
