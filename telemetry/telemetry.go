// Package telemetry is the authority for what grantd shows of itself: whether spans are made and where they go, the metrics on
// /metrics, and how an idempotency key gets into baggage and onto the spans of its call.
//
// Nothing here is global. What needs a provider or a propagator is given it, so that two servers in one process do not share
// theirs.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"

	"github.com/google/uuid"
	"go.opentelemetry.io/contrib/processors/baggagecopy"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

const scopeName = "github.com/grantd/grantd/telemetry"

const (
	// spanQueueSize holds the items of several full batches; the SDK's own 2,048 does not hold two.
	spanQueueSize = 8192
	// spanLinks is the number of calls that one commit may combine.
	spanLinks = 1024
	// attributeValueBytes trims what is long, which statements are.
	attributeValueBytes = 2048
)

// Config is what telemetry is set up with. The rest comes from the OTEL_* variables of the process, which OpenTelemetry's own
// packages read by themselves.
type Config struct {
	// Version is grantd's, as it stands in target_info and in the resource of every span.
	Version string
	// Log is told whether and where spans are exported, and what telemetry cannot do. Nil discards it.
	Log *slog.Logger
}

// Telemetry holds what the other packages are given.
type Telemetry struct {
	// TracerProvider makes no spans while tracing is off. It is never nil.
	TracerProvider trace.TracerProvider
	// MeterProvider's instruments are read by Metrics.
	MeterProvider metric.MeterProvider
	// Metrics answers /metrics, in the text formats of Prometheus and OpenMetrics.
	Metrics http.Handler
	// Propagator reads and writes W3C's trace context and baggage.
	Propagator propagation.TextMapPropagator

	tracing  bool
	tracer   trace.Tracer
	counters counters
	stop     []func(context.Context) error
}

// Setup starts what the environment asks for:
//
//   - spans are exported, over OTLP's gRPC, when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set and neither
//     OTEL_TRACES_EXPORTER=none nor OTEL_SDK_DISABLED=true says otherwise. The sampler is OTEL_TRACES_SAMPLER's, by default
//     the caller's decision and, where there is none, always;
//   - metrics are on, unless OTEL_SDK_DISABLED=true leaves Go's and the process's alone.
//
// An endpoint that does not answer fails nothing, now or later; one that cannot be read is an error.
func Setup(ctx context.Context, config Config) (*Telemetry, error) {
	log := config.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	endpoint, err := tracesEndpoint(log)
	if err != nil {
		return nil, err
	}
	t := &Telemetry{
		TracerProvider: tracenoop.NewTracerProvider(),
		MeterProvider:  metricnoop.NewMeterProvider(),
		Propagator:     propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
		tracing:        endpoint != nil,
	}
	about, err := describeProcess(ctx, config.Version)
	if err != nil {
		// What could be read of it is used.
		log.WarnContext(ctx, "the resource of spans and metrics is incomplete", "error", err)
	}
	if err := t.setupMetrics(about, log); err != nil {
		return nil, fmt.Errorf("set up metrics: %w", err)
	}
	if endpoint == nil {
		log.InfoContext(ctx, "spans are not exported")
	} else {
		if err := t.setupTracing(ctx, about, log); err != nil {
			return nil, errors.Join(fmt.Errorf("set up tracing: %w", err), t.Shutdown(ctx))
		}
		log.InfoContext(ctx, "spans are exported", "endpoint", endpoint.Redacted(), "transport", transport(endpoint))
	}
	t.tracer = t.TracerProvider.Tracer(scopeName)
	return t, nil
}

// describeProcess says which process this is. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME have the last word.
func describeProcess(ctx context.Context, version string) (*resource.Resource, error) {
	return resource.New(ctx,
		resource.WithSchemaURL(semconv.SchemaURL),
		resource.WithAttributes(
			semconv.ServiceName("grantd"),
			semconv.ServiceVersion(version),
			semconv.ServiceInstanceID(uuid.NewString()),
		),
		resource.WithHost(),
		resource.WithTelemetrySDK(),
		resource.WithFromEnv(),
	)
}

func (t *Telemetry) setupTracing(ctx context.Context, about *resource.Resource, log *slog.Logger) error {
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return err
	}
	limits := sdktrace.NewSpanLimits()
	if !isSet("OTEL_SPAN_LINK_COUNT_LIMIT") {
		limits.LinkCountLimit = spanLinks
	}
	if limits.AttributeValueLengthLimit < 0 {
		limits.AttributeValueLengthLimit = attributeValueBytes
	}
	var queue []sdktrace.BatchSpanProcessorOption
	if !isSet("OTEL_BSP_MAX_QUEUE_SIZE") {
		queue = append(queue, sdktrace.WithMaxQueueSize(spanQueueSize))
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithResource(about),
		sdktrace.WithRawSpanLimits(limits),
		sdktrace.WithSpanProcessor(inherit{}),
		sdktrace.WithSpanProcessor(baggagecopy.NewSpanProcessor(func(m baggage.Member) bool { return m.Key() == KeyName })),
		sdktrace.WithBatcher(&exports{SpanExporter: exporter, lost: t.counters.spansLost, log: log}, queue...),
	)
	t.TracerProvider = provider
	t.stop = append(t.stop, provider.Shutdown)
	return nil
}

func isSet(variable string) bool { return os.Getenv(variable) != "" }

// Shutdown exports the spans that are still here, for as long as ctx allows, and ends everything. Call it after the last call
// has ended.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	for i := len(t.stop) - 1; i >= 0; i-- {
		errs = append(errs, t.stop[i](ctx))
	}
	t.stop = nil
	return errors.Join(errs...)
}
