package server

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// Config is what a server is made from.
type Config struct {
	Store     *store.Store
	Telemetry *telemetry.Telemetry
	Log       *slog.Logger
	// TLS is nil for plaintext.
	TLS    *tls.Config
	Limits Limits
	// Breakers is nil where this process delivers nothing.
	Breakers Breakers
	Stop     Stop
}

// readinessInterval is how often the health service asks whether a writable primary answers.
const readinessInterval = time.Second

// Server is the gRPC server with everything that belongs to it.
type Server struct {
	config    Config
	transport *Transport
	grpc      *grpc.Server
	health    *Health
}

// New makes a server with both services of the contract, reflection and health.
func New(cfg Config) *Server {
	s := &Server{config: cfg, transport: NewTransport(cfg.Log)}
	calls, err := newCallMeter(cfg.Telemetry.MeterProvider)
	if err != nil {
		cfg.Log.Error("calls are not measured", "error", err)
	}
	// Outside of everything, so that it sees what became of a panic.
	options := append([]grpc.ServerOption{grpc.ChainUnaryInterceptor(calls.unary)}, s.transport.ServerOptions(cfg.TLS, cfg.Limits)...)
	if h := cfg.Telemetry.ServerHandler(); h != nil {
		options = append(options, grpc.StatsHandler(h))
	}
	s.grpc = grpc.NewServer(options...)
	RegisterEntitlementService(s.grpc, cfg.Store, cfg.Telemetry, cfg.Log)
	RegisterOperatorService(s.grpc, cfg.Store, cfg.Breakers, cfg.Telemetry, cfg.Log)
	s.health = RegisterHealth(s.grpc)
	// v1 and v1alpha, so that every grpcurl finds it.
	reflection.Register(s.grpc)
	return s
}

// Serve answers calls until ctx ends, and then stops as Transport.Serve says.
func (s *Server) Serve(ctx context.Context, lis net.Listener) error {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go s.health.watchReadiness(watching, s.writable, readinessInterval, s.config.Log)
	return s.transport.Serve(ctx, lis, s.grpc, s.health, s.config.Stop)
}

var errNotWritable = errors.New("the database is read-only")

func (s *Server) writable(ctx context.Context) error {
	r, err := s.config.Store.Ready(ctx)
	if err == nil && !r.Writable {
		err = errNotWritable
	}
	return err
}

// HTTP returns what the HTTP port shows: liveness, readiness and metrics.
func (s *Server) HTTP() http.Handler {
	return HTTP{
		Ready:    s.config.Store.Ready,
		Stopping: s.transport.Stopping,
		Metrics:  s.config.Telemetry.Metrics,
	}.Handler()
}
