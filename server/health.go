package server

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// readinessTimeout bounds one question whether a writable primary answers.
const readinessTimeout = 2 * time.Second

// Health is the gRPC health service: one status for each service of the server and one for "", the whole. All are
// NOT_SERVING until watchReadiness saw a writable primary.
type Health struct {
	server   *health.Server
	services []string
}

// RegisterHealth adds the health service. The server's own services must be registered before.
func RegisterHealth(s *grpc.Server) *Health {
	h := &Health{server: health.NewServer(), services: []string{""}}
	for name := range s.GetServiceInfo() {
		// Reflection and the like do not need the database, so its absence says nothing about them.
		if !strings.HasPrefix(name, "grpc.") {
			h.services = append(h.services, name)
		}
	}
	h.set(healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(s, h.server)
	return h
}

func (h *Health) set(status healthpb.HealthCheckResponse_ServingStatus) {
	for _, service := range h.services {
		h.server.SetServingStatus(service, status)
	}
}

// watchReadiness asks ready at once and then every interval, until ctx ends, and sets the statuses to what it says. ready
// gets two seconds; an error means that no writable primary answers.
func (h *Health) watchReadiness(ctx context.Context, ready func(context.Context) error, interval time.Duration, log *slog.Logger) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	serving := false
	for {
		err := askReady(ctx, ready)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil && !serving:
			log.Info("health: SERVING")
			h.set(healthpb.HealthCheckResponse_SERVING)
		case err != nil && serving:
			log.Error("health: NOT_SERVING", "error", err)
			h.set(healthpb.HealthCheckResponse_NOT_SERVING)
		}
		serving = err == nil
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func askReady(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readinessTimeout)
	defer cancel()
	return ready(ctx)
}

// shutdown sets every status to NOT_SERVING for good.
func (h *Health) shutdown() { h.server.Shutdown() }
