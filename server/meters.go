package server

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	codepb "google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// callMeter measures the calls of the contract's services, whether they are traced or not. Its labels are their methods and gRPC's codes.
type callMeter struct {
	duration metric.Float64Histogram
	// options are, for each method, those of each code: made once, so that a call allocates none.
	options map[string][][]metric.RecordOption
}

func newCallMeter(provider metric.MeterProvider) (*callMeter, error) {
	duration, err := provider.Meter("github.com/grantd/grantd/server").Float64Histogram("rpc.server.call.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from taking up a call to its status, by method and status."),
		// Those of the conventions begin at 5 ms, which most calls take less than.
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))
	m := &callMeter{duration: duration, options: make(map[string][][]metric.RecordOption)}
	for _, service := range []*grpc.ServiceDesc{&entitlementv1.EntitlementService_ServiceDesc, &entitlementv1.OperatorService_ServiceDesc} {
		for i := range service.Methods {
			method := service.ServiceName + "/" + service.Methods[i].MethodName
			m.options["/"+method] = optionsOf(method)
		}
	}
	return m, err
}

// optionsOf returns what a method's calls are recorded with, by code.
func optionsOf(method string) [][]metric.RecordOption {
	all := make([][]metric.RecordOption, codes.Unauthenticated+1)
	for code := range all {
		name := codepb.Code(code).String()
		labels := []attribute.KeyValue{semconv.RPCSystemNameGRPC, semconv.RPCMethod(method), semconv.RPCResponseStatusCode(name)}
		switch codes.Code(code) {
		case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
			// The codes that the conventions call errors of a server.
			labels = append(labels, semconv.ErrorTypeKey.String(name))
		}
		all[code] = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(labels...))}
	}
	return all
}

func (m *callMeter) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	started := time.Now()
	resp, err := handler(ctx, req)
	if options, code := m.options[info.FullMethod], int(status.Code(err)); code < len(options) {
		m.duration.Record(ctx, time.Since(started).Seconds(), options[code]...)
	}
	return resp, err
}
