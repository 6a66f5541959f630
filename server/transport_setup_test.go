package server_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/stats"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/server"
)

// grantFunc is a service whose grants are a function.
type grantFunc struct {
	entitlementv1.UnimplementedEntitlementServiceServer
	grant func(context.Context, *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error)
}

func (g *grantFunc) GrantEntitlement(ctx context.Context, in *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	return g.grant(ctx, in)
}

func (g *grantFunc) answerAtOnce() {
	g.grant = func(context.Context, *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		return &entitlementv1.GrantEntitlementResponse{}, nil
	}
}

// logLines is a log that tests read.
type logLines struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(p)
}

func (l *logLines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.buffer.String(), text)
}

// served is a gRPC server on TCP, SERVING, without a store.
type served struct {
	transport *server.Transport
	health    *server.Health
	addr      string
	log       *logLines
	// stop tells the server to stop; done then gets what Serve returned.
	stop context.CancelFunc
	done chan error
}

type transportSetup struct {
	tls    *tls.Config
	limits server.Limits
	stop   server.Stop
	ready  func(context.Context) error
	grants *grantFunc
	add    func(*grpc.Server)
	// inner stands between the server's own stream interceptor and the handlers.
	inner grpc.StreamServerInterceptor
	stats stats.Handler
}

func setupTransport(t *testing.T, with transportSetup) *served {
	t.Helper()
	b := &served{log: &logLines{}, done: make(chan error, 1)}
	log := slog.New(slog.NewJSONHandler(b.log, nil))
	b.transport = server.NewTransport(log)
	options := b.transport.ServerOptions(with.tls, with.limits)
	if with.inner != nil {
		options = append(options, grpc.ChainStreamInterceptor(with.inner))
	}
	if with.stats != nil {
		options = append(options, grpc.StatsHandler(with.stats))
	}
	s := grpc.NewServer(options...)
	if with.grants == nil {
		with.grants = &grantFunc{}
		with.grants.answerAtOnce()
	}
	entitlementv1.RegisterEntitlementServiceServer(s, with.grants)
	if with.add != nil {
		with.add(s)
	}
	reflection.Register(s)
	b.health = server.RegisterHealth(s)
	lis, err := server.Listen("127.0.0.1:0", with.tls, false)
	if err != nil {
		t.Fatal(err)
	}
	b.addr = lis.Addr().String()
	if with.stop.Grace == 0 {
		with.stop.Grace = 10 * time.Second
	}
	if with.ready == nil {
		with.ready = func(context.Context) error { return nil }
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = cancel
	var running sync.WaitGroup
	running.Go(func() { b.health.WatchReadiness(ctx, with.ready, time.Millisecond, log) })
	running.Go(func() {
		b.done <- b.transport.Serve(ctx, lis, s, b.health, with.stop)
	})
	t.Cleanup(func() {
		cancel()
		s.Stop()
		running.Wait()
	})
	return b
}

// connect returns a connection of its own; config is nil for plaintext.
func (b *served) connect(t *testing.T, config *tls.Config) *grpc.ClientConn {
	t.Helper()
	creds := insecure.NewCredentials()
	if config != nil {
		creds = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient("passthrough:///"+b.addr, grpc.WithTransportCredentials(creds), grpc.WithDisableRetry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// dial opens a connection that says nothing.
func (b *served) dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
