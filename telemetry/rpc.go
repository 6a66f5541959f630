package telemetry

import (
	"strings"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/grpc/stats"
)

// ServerHandler returns what makes the spans of a gRPC server's calls, nil while tracing is off. Health, reflection and the rest of
// gRPC's own services make none.
//
// It makes no metrics, which would be there only while tracing is on: the server measures its calls itself.
func (t *Telemetry) ServerHandler() stats.Handler {
	if !t.tracing {
		return nil
	}
	return otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(t.TracerProvider),
		otelgrpc.WithMeterProvider(metricnoop.NewMeterProvider()),
		otelgrpc.WithPropagators(t.Propagator),
		otelgrpc.WithFilter(func(info *stats.RPCTagInfo) bool { return !strings.HasPrefix(info.FullMethodName, "/grpc.") }),
	)
}
