package telemetry_test

import (
	"context"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/telemetry"
	"github.com/grantd/grantd/telemetry/otlptest"
)

const key = "billing:grant:INV-A:team_access"

// bundle is telemetry that exports to a collector, and a gRPC server whose handler is the test's.
type bundle struct {
	*telemetry.Telemetry
	collector *otlptest.Collector
	server    *grpc.Server
	client    entitlementv1.EntitlementServiceClient
	conn      *grpc.ClientConn
}

// handler is what the server does with a call.
type handler func(context.Context, *entitlementv1.GrantEntitlementRequest) error

type service struct {
	entitlementv1.UnimplementedEntitlementServiceServer
	handle handler
}

func (s service) GrantEntitlement(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	return &entitlementv1.GrantEntitlementResponse{}, s.handle(ctx, r)
}

// setup exports to a collector; start does what the environment says.
func setup(t *testing.T, makeHandler func(*telemetry.Telemetry) handler, opts ...grpc.DialOption) *bundle {
	t.Helper()
	clearEnvironment(t)
	collector := otlptest.Start(t)
	collector.Setenv(t)
	b := start(t, makeHandler, opts...)
	b.collector = collector
	return b
}

func start(t *testing.T, makeHandler func(*telemetry.Telemetry) handler, opts ...grpc.DialOption) *bundle {
	t.Helper()
	b := &bundle{Telemetry: setUp(t)}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serverOptions []grpc.ServerOption
	if h := b.ServerHandler(); h != nil {
		serverOptions = append(serverOptions, grpc.StatsHandler(h))
	}
	s := grpc.NewServer(serverOptions...)
	b.server = s
	entitlementv1.RegisterEntitlementServiceServer(s, service{handle: makeHandler(b.Telemetry)})
	healthpb.RegisterHealthServer(s, health.NewServer())
	var served sync.WaitGroup
	served.Go(func() {
		if err := s.Serve(listener); err != nil {
			t.Error(err)
		}
	})
	opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))
	b.conn, err = grpc.NewClient(listener.Addr().String(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.conn.Close()
		s.Stop()
		served.Wait()
	})
	b.client = entitlementv1.NewEntitlementServiceClient(b.conn)
	return b
}

// setUp is telemetry alone.
func setUp(t *testing.T) *telemetry.Telemetry {
	t.Helper()
	tel, err := telemetry.Setup(t.Context(), telemetry.Config{Version: "1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := tel.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return tel
}

// clearEnvironment keeps the OTEL_* variables of the machine out of the test.
func clearEnvironment(t *testing.T) {
	t.Helper()
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "")
		}
	}
}

func (b *bundle) grant(t *testing.T, ctx context.Context, key string) {
	t.Helper()
	if _, err := b.client.GrantEntitlement(ctx, &entitlementv1.GrantEntitlementRequest{IdempotencyKey: key}); err != nil {
		t.Fatal(err)
	}
}

// finish ends the server and then its telemetry, so that every span is with the collector: a call's own ends after its caller
// has the answer.
func (b *bundle) finish(t *testing.T) {
	t.Helper()
	b.server.GracefulStop()
	if err := b.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// scrape returns the page of /metrics.
func scrape(t *testing.T, tel *telemetry.Telemetry) string {
	t.Helper()
	w := httptest.NewRecorder()
	tel.Metrics.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	page, err := io.ReadAll(w.Result().Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("status %d: %s %v", w.Code, page, err)
	}
	return string(page)
}

// sample returns the value of a metric without labels, "0" when it was never counted.
func sample(t *testing.T, tel *telemetry.Telemetry, name string) string {
	t.Helper()
	for line := range strings.Lines(scrape(t, tel)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return "0"
}
