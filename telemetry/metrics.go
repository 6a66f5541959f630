package telemetry

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
)

// setupMetrics makes the registry behind /metrics, and this package's own counters.
func (t *Telemetry) setupMetrics(about *resource.Resource, log *slog.Logger) error {
	registry := prometheus.NewRegistry()
	if err := errors.Join(
		registry.Register(collectors.NewGoCollector()),
		registry.Register(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})),
	); err != nil {
		return err
	}
	if !sdkDisabled() {
		// The scope would stand on every series, and says only which package of grantd counts.
		exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo())
		if err != nil {
			return err
		}
		provider := sdkmetric.NewMeterProvider(sdkmetric.WithResource(about), sdkmetric.WithReader(exporter))
		t.MeterProvider = provider
		t.stop = append(t.stop, provider.Shutdown)
	}
	t.Metrics = promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelError),
		ErrorHandling:     promhttp.ContinueOnError,
		Registry:          registry,
		EnableOpenMetrics: true,
	})
	var err error
	t.counters, err = newCounters(t.MeterProvider.Meter(scopeName))
	return err
}

// counters are this package's own instruments. They have no labels.
type counters struct {
	keysReplaced   metric.Int64Counter
	keysDropped    metric.Int64Counter
	membersEvicted metric.Int64Counter
	spansLost      metric.Int64Counter
}

func newCounters(meter metric.Meter) (counters, error) {
	var c counters
	var errs [4]error
	c.keysReplaced, errs[0] = meter.Int64Counter("grantd.baggage.keys_replaced", metric.WithUnit("{call}"),
		metric.WithDescription("Traced calls whose baggage named another idempotency key than their request."))
	c.keysDropped, errs[1] = meter.Int64Counter("grantd.baggage.keys_dropped", metric.WithUnit("{call}"),
		metric.WithDescription("Traced calls whose idempotency key could not be put into baggage."))
	c.membersEvicted, errs[2] = meter.Int64Counter("grantd.baggage.members_evicted", metric.WithUnit("{member}"),
		metric.WithDescription("Baggage members of callers that gave way to the idempotency key."))
	c.spansLost, errs[3] = meter.Int64Counter("grantd.trace.spans_lost", metric.WithUnit("{span}"),
		metric.WithDescription("Spans that the OTLP endpoint did not take."))
	err := errors.Join(errs[:]...)
	if err == nil {
		// From zero on, so that the first one is seen to have come.
		for _, counter := range []metric.Int64Counter{c.keysReplaced, c.keysDropped, c.membersEvicted, c.spansLost} {
			counter.Add(context.Background(), 0)
		}
	}
	return c, err
}
