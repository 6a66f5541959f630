package server_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

func TestHealth_FollowsThePrimary(t *testing.T) {
	var down atomic.Bool
	down.Store(true)
	b := setupTransport(t, transportSetup{ready: func(context.Context) error {
		if down.Load() {
			return errors.New("no writable primary")
		}
		return nil
	}})
	client := healthpb.NewHealthClient(b.connect(t, nil))
	for _, service := range []string{"", entitlementv1.EntitlementService_ServiceDesc.ServiceName} {
		down.Store(true)
		stream, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil {
			t.Fatal(err)
		}
		waitStatus(t, stream, healthpb.HealthCheckResponse_NOT_SERVING)
		down.Store(false)
		waitStatus(t, stream, healthpb.HealthCheckResponse_SERVING)
		down.Store(true)
		waitStatus(t, stream, healthpb.HealthCheckResponse_NOT_SERVING)
		response, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || response.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Errorf("Check(%q): %v, %v", service, response, err)
		}
		down.Store(false)
		waitStatus(t, stream, healthpb.HealthCheckResponse_SERVING)
	}
	_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "no.such.Service"})
	wantCode(t, "an unknown service", err, codes.NotFound)
}
