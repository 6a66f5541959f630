// Package server is the authority for the contract: it validates what comes in, hands one command to the store, and turns what
// the store says into messages and statuses. It decides nothing about entitlements.
package server

import (
	"context"
	"log/slog"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// EntitlementService answers billing and product services.
type EntitlementService struct {
	entitlementv1.UnsafeEntitlementServiceServer
	store     *store.Store
	telemetry *telemetry.Telemetry
	log       *slog.Logger
}

// RegisterEntitlementService adds the service to a gRPC server.
func RegisterEntitlementService(r grpc.ServiceRegistrar, s *store.Store, t *telemetry.Telemetry, log *slog.Logger) {
	entitlementv1.RegisterEntitlementServiceServer(wellFormed{r}, &EntitlementService{store: s, telemetry: t, log: log})
}

func originOf(ctx context.Context, eventID, source string) store.Origin {
	span := telemetry.RemoteSpan(ctx)
	return store.Origin{
		EventID: eventID, Source: source, Caller: callerOf(ctx), TraceID: span.TraceID(), SpanID: span.SpanID(),
		Sampled: span.IsSampled(),
	}
}

// apply hands a command to the store, and puts on the call's span what came of it. A retryable failure becomes a status with the typed
// response as a detail.
func (s *EntitlementService) apply(ctx context.Context, c *store.Command, typed func(*store.Failure) proto.Message) (*store.Answer, error) {
	answer, err := s.store.Apply(ctx, c)
	if err != nil {
		return nil, typedStatus(ctx, err, s.log.With(telemetry.KeyName, c.IdempotencyKey), typed)
	}
	answer.Describe(trace.SpanFromContext(ctx))
	return &answer, nil
}
