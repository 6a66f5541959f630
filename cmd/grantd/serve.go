package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/migrations"
	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/server"
	"github.com/grantd/grantd/store"
	"github.com/grantd/grantd/telemetry"
)

// serveCmd is `grantd serve`.
type serveCmd struct {
	DatabaseURL string `name:"database-url" required:"" help:"PostgreSQL URL; several hosts may be named, writes go to the primary." env:"GRANTD_DATABASE_URL"`
	service     `embed:""`
}

// service is what serve and dev have in common.
type service struct {
	GRPCAddr string `name:"grpc-addr" default:"127.0.0.1:50051" help:"Address for gRPC." env:"GRANTD_GRPC_ADDR"`
	HTTPAddr string `name:"http-addr" default:"127.0.0.1:8080" help:"Address for health and metrics over HTTP." env:"GRANTD_HTTP_ADDR"`

	TLSCert           string        `name:"tls-cert" type:"path" help:"PEM file of the server's certificate; read again when it changes." env:"GRANTD_TLS_CERT"`
	TLSKey            string        `name:"tls-key" type:"path" help:"PEM file of its private key." env:"GRANTD_TLS_KEY"`
	ClientCA          string        `name:"client-ca" type:"path" help:"PEM file of the authorities whose certificates callers must present." env:"GRANTD_CLIENT_CA"`
	InsecurePlaintext bool          `help:"Allow plaintext gRPC on an address that is not loopback." env:"GRANTD_INSECURE_PLAINTEXT"`
	MaxStreams        uint32        `default:"1024" help:"Calls in flight on one connection." env:"GRANTD_MAX_STREAMS"`
	MaxConnectionAge  time.Duration `default:"0" help:"Age at which connections are renewed; 0 lets them stand." env:"GRANTD_MAX_CONNECTION_AGE"`
	ShutdownGrace     time.Duration `default:"10s" help:"How long calls, and attempts to deliver, may go on after SIGTERM. The process ends within seconds of that." env:"GRANTD_SHUTDOWN_GRACE"`
	ShutdownDelay     time.Duration `default:"0s" help:"Part of it in which NOT_SERVING is shown and calls are still taken, for balancers that poll." env:"GRANTD_SHUTDOWN_DELAY"`

	Catalog string `type:"path" help:"YAML file of the entitlement types that may be granted; any may be without one." env:"GRANTD_CATALOG"`

	Committers       int           `default:"2" help:"Transactions that run at once; another one begins only when as much waits as those under way hold." env:"GRANTD_COMMITTERS"`
	QueueLimit       int           `default:"8192" help:"Commands that may wait; more are answered RESOURCE_EXHAUSTED." env:"GRANTD_QUEUE_LIMIT"`
	AliasRetention   time.Duration `default:"9600h" help:"How long a later key for the same effect is kept." env:"GRANTD_ALIAS_RETENTION"`
	AttemptRetention time.Duration `default:"720h" help:"How long attempts are kept." env:"GRANTD_ATTEMPT_RETENTION"`

	Destinations      string        `type:"path" help:"YAML file of the destinations that hear of every entry; none without it." env:"GRANTD_DESTINATIONS"`
	DeliveryRetention time.Duration `default:"720h" help:"How long deliveries are kept after they were delivered or discarded." env:"GRANTD_DELIVERY_RETENTION"`

	LogFormat string `default:"text" enum:"text,json" help:"text or json." env:"GRANTD_LOG_FORMAT"`
	LogLevel  string `default:"info" enum:"debug,info,warn,error" help:"debug, info, warn or error." env:"GRANTD_LOG_LEVEL"`
}

// Help is what --help says before the flags.
func (service) Help() string {
	return "OpenTelemetry's own variables turn tracing on: OTEL_EXPORTER_OTLP_ENDPOINT, and the others of docs/tracing.md."
}

// Validate is called by the parser.
func (c *service) Validate() error {
	switch {
	case c.Committers < 1:
		return errors.New("--committers must be at least 1")
	case c.QueueLimit < 1:
		return errors.New("--queue-limit must be at least 1")
	case c.AliasRetention <= 0:
		return errors.New("--alias-retention must be above 0")
	case c.AttemptRetention <= 0:
		return errors.New("--attempt-retention must be above 0")
	case c.DeliveryRetention <= 0:
		return errors.New("--delivery-retention must be above 0")
	}
	return nil
}

func (c *serveCmd) run(ctx context.Context, io stdio) error {
	pending, err := migrations.Pending(ctx, c.DatabaseURL)
	if err != nil {
		return err
	}
	if pending {
		return errors.New("the database lacks migrations of this version: run `grantd migrate` first")
	}
	return c.serve(ctx, c.DatabaseURL, nil, io, func(addresses) error { return nil })
}

// addresses are where the service listens.
type addresses struct{ grpc, http string }

// heapGrowthPercent trades memory for time: the live heap is small, and most of a call's cost is allocation.
const heapGrowthPercent = 800

// serve runs the service until ctx ends. local are destinations beside those of the file. started is called once calls are answered.
func (c *service) serve(ctx context.Context, databaseURL string, local []outbox.Destination, io stdio, started func(addresses) error) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(heapGrowthPercent)
	}
	log, err := c.logger(io.stderr)
	if err != nil {
		return err
	}
	catalog, err := loadCatalog(c.Catalog)
	if err != nil {
		return err
	}
	tel, err := telemetry.Setup(ctx, telemetry.Config{Version: buildVersion(), Log: log})
	if err != nil {
		return err
	}
	defer c.flush(ctx, tel, log)
	tlsConfig, err := c.tls(log)
	if err != nil {
		return err
	}
	destinations, err := c.destinations(local)
	if err != nil {
		return err
	}
	grpcListener, err := server.Listen(c.GRPCAddr, tlsConfig, c.InsecurePlaintext)
	if err != nil {
		return fmt.Errorf("--grpc-addr: %w", err)
	}
	defer grpcListener.Close()
	httpListener, err := net.Listen("tcp", c.HTTPAddr)
	if err != nil {
		return fmt.Errorf("--http-addr: %w", err)
	}
	defer httpListener.Close()

	st, err := store.Open(ctx, store.Config{
		DatabaseURL: databaseURL, Catalog: catalog,
		Committers: c.Committers, QueueLimit: c.QueueLimit,
		AliasRetention: c.AliasRetention, AttemptRetention: c.AttemptRetention,
		Destinations: outbox.Stored(destinations), DeliveryRetention: c.DeliveryRetention,
		Log: log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider, QueryTracer: tel.QueryTracer(),
	})
	if err != nil {
		return err
	}
	defer st.Close()
	deliverer, err := outbox.New(outbox.Config{
		Store: st, Destinations: destinations, Grace: c.ShutdownGrace,
		Log: log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider,
	})
	if err != nil {
		return err
	}

	srv := server.New(server.Config{
		Store: st, Telemetry: tel, Log: log, TLS: tlsConfig,
		Limits:   server.Limits{MaxConcurrentStreams: c.MaxStreams, MaxConnectionAge: c.MaxConnectionAge},
		Breakers: breakers(deliverer, destinations),
		// The store's own end, at most a second, is part of the grace.
		Stop: server.Stop{Grace: c.ShutdownGrace - min(c.ShutdownGrace/5, time.Second), Delay: c.ShutdownDelay},
	})
	return answer(ctx, srv, deliverer, grpcListener, httpListener, log, started)
}

// answer answers calls and makes deliveries until ctx ends. started is called once calls are answered.
func answer(
	ctx context.Context, srv *server.Server, deliverer *outbox.Outbox, grpcListener, httpListener net.Listener, log *slog.Logger,
	started func(addresses) error,
) error {
	httpServer := &http.Server{Handler: srv.HTTP(), ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute}
	go httpServer.Serve(httpListener)
	defer httpServer.Close()

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	delivering := make(chan struct{})
	go func() { defer close(delivering); deliverer.Run(ctx) }()
	defer func() { stop(); <-delivering }()
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, grpcListener) }()
	log.Info("serving", "grpc", grpcListener.Addr().String(), "http", httpListener.Addr().String(), "version", buildVersion())
	if err := started(addresses{grpc: grpcListener.Addr().String(), http: httpListener.Addr().String()}); err != nil {
		stop()
		return errors.Join(err, <-served)
	}
	return <-served
}

// destinations reads the file of that name, and adds those that are local to this process.
func (c *service) destinations(local []outbox.Destination) ([]outbox.Destination, error) {
	if c.Destinations == "" {
		return local, nil
	}
	text, err := os.ReadFile(c.Destinations)
	if err != nil {
		return nil, fmt.Errorf("--destinations: %w", err)
	}
	all, err := outbox.ParseDestinations(c.Destinations, text)
	if err != nil {
		return nil, err
	}
	for _, l := range local {
		if slices.ContainsFunc(all, func(d outbox.Destination) bool { return d.Name == l.Name }) {
			return nil, fmt.Errorf("--destinations: the name %s is taken by a destination of grantd dev", l.Name)
		}
	}
	return append(all, local...), nil
}

// breakers tells what the outbox makes of each destination.
func breakers(o *outbox.Outbox, destinations []outbox.Destination) server.Breakers {
	return func() map[string]entitlementv1.BreakerState {
		states := make(map[string]entitlementv1.BreakerState, len(destinations))
		for i := range destinations {
			states[destinations[i].Name] = o.BreakerState(destinations[i].Name)
		}
		return states
	}
}

// flush exports the last spans, for a short time.
func (c *service) flush(ctx context.Context, tel *telemetry.Telemetry, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := tel.Shutdown(ctx); err != nil {
		log.Warn("telemetry was not flushed", "error", err)
	}
}

func (c *service) tls(log *slog.Logger) (*tls.Config, error) {
	if c.TLSCert == "" && c.TLSKey == "" && c.ClientCA == "" {
		return nil, nil
	}
	if c.TLSCert == "" || c.TLSKey == "" {
		return nil, errors.New("--tls-cert and --tls-key go together, and --client-ca with both")
	}
	return server.NewTLSConfig(server.TLSFiles{Cert: c.TLSCert, Key: c.TLSKey, ClientCA: c.ClientCA}, log)
}

func (c *service) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, fmt.Errorf("--log-level: %w", err)
	}
	options := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(telemetry.LogHandler(slog.NewJSONHandler(w, options))), nil
	}
	return slog.New(telemetry.LogHandler(slog.NewTextHandler(w, options))), nil
}
