package server_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/server"
)

// panicStreams is a service with one stream, which panics.
func panicStreams(name string) *grpc.ServiceDesc {
	return &grpc.ServiceDesc{ServiceName: name, HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{
		StreamName: "Panic", ServerStreams: true, ClientStreams: true,
		Handler: func(any, grpc.ServerStream) error { panic("secret of tenant A") },
	}}}
}

func TestPanic_AnswersInternalAndGoesOn(t *testing.T) {
	grants := &grantFunc{grant: func(_ context.Context, in *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		if in.GetIdempotencyKey() == "panic" {
			panic("secret of tenant A")
		}
		return &entitlementv1.GrantEntitlementResponse{}, nil
	}}
	b := setupTransport(t, transportSetup{grants: grants, add: func(s *grpc.Server) {
		s.RegisterService(panicStreams("test.Streams"), struct{}{})
		s.RegisterService(panicStreams("grpc.reflection.test"), struct{}{})
	}})
	conn := b.connect(t, nil)
	client := entitlementv1.NewEntitlementServiceClient(conn)
	check := func(what string, err error) {
		t.Helper()
		wantCode(t, what, err, codes.Internal)
		if got := status.Convert(err).Message(); got != "internal error" {
			t.Errorf("%s: message %q", what, got)
		}
	}

	_, err := client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{IdempotencyKey: "panic"})
	check("a call", err)
	for _, method := range []string{"/test.Streams/Panic", "/grpc.reflection.test/Panic"} {
		stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err != nil {
			t.Fatal(err)
		}
		check(method, stream.RecvMsg(&entitlementv1.GrantEntitlementResponse{}))
	}
	if got := b.transport.Panics(); got != 3 {
		t.Errorf("%d panics counted, want 3", got)
	}
	if got := b.transport.InFlight(); got != 0 {
		t.Errorf("%d calls in flight, want none", got)
	}
	if b.log.count("interceptors_test.go") < 3 || b.log.count("GrantEntitlement") == 0 {
		t.Error("the log lacks a stack or the method")
	}
	if _, err := client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{}); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

func TestLimits_MessageSize(t *testing.T) {
	b := setupTransport(t, transportSetup{})
	client := entitlementv1.NewEntitlementServiceClient(b.connect(t, nil))
	send := func(bytes int) error {
		_, err := client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{EventId: strings.Repeat("x", bytes)})
		return err
	}
	wantCode(t, "a message over the limit", send(server.MaxRequestBytes), codes.ResourceExhausted)
	wantCode(t, "a message just below it", send(server.MaxRequestBytes-16), codes.OK)
}

func TestLimits_HeaderSize(t *testing.T) {
	b := setupTransport(t, transportSetup{})
	client := entitlementv1.NewEntitlementServiceClient(b.connect(t, nil))
	send := func(bytes int) error {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "baggage", strings.Repeat("x", bytes))
		_, err := client.GrantEntitlement(ctx, &entitlementv1.GrantEntitlementRequest{})
		return err
	}
	wantCode(t, "the largest baggage", send(8<<10), codes.OK)
	if err := send(100 << 10); err == nil {
		t.Error("headers of 100 KiB were accepted")
	}
}

func TestLimits_ConcurrentStreams(t *testing.T) {
	const limit, calls = 2, 10
	var running, most atomic.Int64
	meet := make(chan struct{})
	grants := &grantFunc{grant: func(ctx context.Context, _ *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		now := running.Add(1)
		defer running.Add(-1)
		for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
		}
		// Each waits for another one: fewer than two at a time would not get through.
		select {
		case meet <- struct{}{}:
		case <-meet:
		case <-ctx.Done():
		}
		return &entitlementv1.GrantEntitlementResponse{}, ctx.Err()
	}}
	b := setupTransport(t, transportSetup{grants: grants, limits: server.Limits{MaxConcurrentStreams: limit}})
	conn := b.connect(t, nil)
	// Until the server's first settings frame arrives, a client knows no limit: one answer comes after it.
	if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	answers := make(chan error, calls)
	client := entitlementv1.NewEntitlementServiceClient(conn)
	for range calls {
		go func() {
			_, err := client.GrantEntitlement(context.Background(), &entitlementv1.GrantEntitlementRequest{})
			answers <- err
		}()
	}
	for range calls {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	if got := most.Load(); got != limit {
		t.Errorf("%d calls ran at a time, want %d", got, limit)
	}
}
