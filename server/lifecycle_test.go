package server_test

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/server"
)

func wantCode(t *testing.T, what string, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("%s: code %v (%v), want %v", what, got, err, want)
	}
}

// watch opens a health stream and waits until it says SERVING.
func watch(t *testing.T, conn *grpc.ClientConn, service string) grpc.ServerStreamingClient[healthpb.HealthCheckResponse] {
	t.Helper()
	stream, err := healthpb.NewHealthClient(conn).Watch(t.Context(), &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		t.Fatal(err)
	}
	waitStatus(t, stream, healthpb.HealthCheckResponse_SERVING)
	return stream
}

// waitStatus reads a health stream until it says want.
func waitStatus(t *testing.T, stream grpc.ServerStreamingClient[healthpb.HealthCheckResponse], want healthpb.HealthCheckResponse_ServingStatus) {
	t.Helper()
	for {
		response, err := stream.Recv()
		if err != nil {
			t.Fatalf("health ended before %v: %v", want, err)
		}
		if response.GetStatus() == want {
			return
		}
	}
}

// Story: SIGTERM arrives with 100 grants in flight and with health's Watch and reflection streams open, which never end by
// themselves. A plain GracefulStop would wait for the streams forever, a plain Stop would cut off the grants.
func TestServe_StopsInOrderWithStreamsOpen(t *testing.T) {
	const calls = 100
	entered, release := make(chan struct{}, calls), make(chan struct{})
	grants := &grantFunc{grant: func(context.Context, *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		entered <- struct{}{}
		<-release
		return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED}, nil
	}}
	b := setupTransport(t, transportSetup{grants: grants, stop: server.Stop{Grace: 10 * time.Second}})
	streams, callers := b.connect(t, nil), b.connect(t, nil)

	whole := watch(t, streams, "")
	service := watch(t, streams, entitlementv1.EntitlementService_ServiceDesc.ServiceName)
	unknown, err := healthpb.NewHealthClient(streams).Watch(t.Context(), &healthpb.HealthCheckRequest{Service: "no.such.Service"})
	if err != nil {
		t.Fatal(err)
	}
	waitStatus(t, unknown, healthpb.HealthCheckResponse_SERVICE_UNKNOWN)
	reflections := map[string]grpc.ClientStream{}
	for _, version := range []string{"v1", "v1alpha"} {
		// Both speak the same messages, and gRPC has deprecated the Go types of the older one.
		stream, err := streams.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
			"/grpc.reflection."+version+".ServerReflection/ServerReflectionInfo")
		if err != nil {
			t.Fatal(err)
		}
		request := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
		if err := stream.SendMsg(request); err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(&reflectionpb.ServerReflectionResponse{}); err != nil {
			t.Fatal(err)
		}
		reflections[version] = stream
	}

	answers := make(chan error, calls)
	client := entitlementv1.NewEntitlementServiceClient(callers)
	for range calls {
		go func() {
			response, err := client.GrantEntitlement(context.Background(), &entitlementv1.GrantEntitlementRequest{})
			if err == nil && response.GetOutcome() != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
				err = errors.New(response.GetOutcome().String())
			}
			answers <- err
		}()
	}
	for range calls {
		<-entered
	}

	began := time.Now()
	b.stop()
	for _, stream := range []grpc.ServerStreamingClient[healthpb.HealthCheckResponse]{whole, service} {
		waitStatus(t, stream, healthpb.HealthCheckResponse_NOT_SERVING)
		_, err := stream.Recv()
		wantCode(t, "health's stream after NOT_SERVING", err, codes.Unavailable)
	}
	_, err = unknown.Recv()
	wantCode(t, "health's stream of an unknown service", err, codes.Unavailable)
	for version, stream := range reflections {
		wantCode(t, "reflection's stream "+version, stream.RecvMsg(&reflectionpb.ServerReflectionResponse{}), codes.Unavailable)
	}
	if !b.transport.Stopping() {
		t.Error("Stopping is false after stop")
	}

	// New calls are refused, on a new connection and on one that stands.
	_, err = entitlementv1.NewEntitlementServiceClient(b.connect(t, nil)).GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{})
	wantCode(t, "a call on a new connection", err, codes.Unavailable)
	callers.WaitForStateChange(t.Context(), connectivity.Ready)
	_, err = client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{})
	wantCode(t, "a call after the connection was told", err, codes.Unavailable)

	// All of that happened with the grants still in flight.
	if got := b.transport.InFlight(); got != calls {
		t.Errorf("%d calls in flight, want %d", got, calls)
	}
	select {
	case err := <-b.done:
		t.Fatalf("Serve returned %v with calls in flight", err)
	case err := <-answers:
		t.Fatalf("a grant was answered before its handler returned: %v", err)
	default:
	}
	close(release)
	for range calls {
		if err := <-answers; err != nil {
			t.Errorf("a grant in flight: %v", err)
		}
	}
	if err := <-b.done; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if took := time.Since(began); took >= 30*time.Second {
		t.Errorf("stopping took %v", took)
	}
}

// heldStream sends NOT_SERVING only after release.
type heldStream struct {
	grpc.ServerStream
	release <-chan struct{}
}

func (h heldStream) SendMsg(m any) error {
	if response, ok := m.(*healthpb.HealthCheckResponse); ok && response.GetStatus() == healthpb.HealthCheckResponse_NOT_SERVING {
		<-h.release
	}
	return h.ServerStream.SendMsg(m)
}

// Story: the server drains faster than its health stream sends. The watcher must hear NOT_SERVING all the same, not only
// that the stream is gone.
func TestServe_SlowWatcherHearsNotServing(t *testing.T) {
	release := make(chan struct{})
	var held atomic.Bool
	b := setupTransport(t, transportSetup{inner: func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if held.Load() {
			ss = heldStream{ss, release}
		}
		return handler(srv, ss)
	}})
	conn := b.connect(t, nil)
	first := watch(t, conn, "")
	held.Store(true)
	slow := watch(t, conn, "")
	b.stop()
	waitStatus(t, first, healthpb.HealthCheckResponse_NOT_SERVING)
	_, err := first.Recv()
	wantCode(t, "the first stream", err, codes.Unavailable)
	close(release)
	waitStatus(t, slow, healthpb.HealthCheckResponse_NOT_SERVING)
	_, err = slow.Recv()
	wantCode(t, "the slow stream", err, codes.Unavailable)
	if err := <-b.done; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

// Story: one handler hangs in the database and another ignores its context. The process must still exit in time, and both
// callers must learn that a retry is in order.
func TestServe_GraceOver(t *testing.T) {
	entered, release := make(chan struct{}, 2), make(chan struct{})
	cancelled := make(chan struct{})
	grants := &grantFunc{grant: func(ctx context.Context, in *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		entered <- struct{}{}
		if in.GetIdempotencyKey() == "deaf" {
			<-release
		} else {
			<-ctx.Done()
			close(cancelled)
		}
		return nil, ctx.Err()
	}}
	const grace = time.Second
	b := setupTransport(t, transportSetup{grants: grants, stop: server.Stop{Grace: grace}})
	t.Cleanup(func() { close(release) })
	watch(t, b.connect(t, nil), "")
	answers := make(chan error, 2)
	for _, key := range []string{"deaf", "polite"} {
		client := entitlementv1.NewEntitlementServiceClient(b.connect(t, nil))
		go func() {
			_, err := client.GrantEntitlement(context.Background(), &entitlementv1.GrantEntitlementRequest{IdempotencyKey: key})
			answers <- err
		}()
	}
	<-entered
	<-entered

	began := time.Now()
	b.stop()
	err := <-b.done
	// Without a bound it would wait for ever; the rest is for a machine that is busy with other tests.
	if took := time.Since(began); took > grace+30*time.Second {
		t.Errorf("stopping took %v, %v were allowed", took, grace)
	}
	var cutOff *server.CutOffError
	if !errors.As(err, &cutOff) || cutOff.Calls != 2 {
		t.Errorf("Serve returned %v, want two calls cut off", err)
	}
	<-cancelled
	for range 2 {
		wantCode(t, "a call cut off", <-answers, codes.Unavailable)
	}
}

// Story: a balancer's probe connects and says nothing. gRPC's GracefulStop waits for such a handshake before it tells
// anyone that the server is going away.
func TestServe_SilentConnection(t *testing.T) {
	b := setupTransport(t, transportSetup{stop: server.Stop{Grace: time.Minute}})
	silent := b.dial(t)
	// The server's settings frame says that it has accepted the connection.
	if _, err := silent.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	b.stop()
	if err := <-b.done; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("stopping took %v", took)
	}
	if _, err := io.Copy(io.Discard, silent); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the silent connection: %v", err)
	}
}

func TestServe_DelayShowsNotServingAndStillAnswers(t *testing.T) {
	const delay = time.Second
	b := setupTransport(t, transportSetup{stop: server.Stop{Grace: time.Minute, Delay: delay}})
	conn := b.connect(t, nil)
	stream := watch(t, conn, "")
	began := time.Now()
	b.stop()
	waitStatus(t, stream, healthpb.HealthCheckResponse_NOT_SERVING)
	if _, err := entitlementv1.NewEntitlementServiceClient(conn).GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{}); err != nil {
		t.Errorf("a call during the delay: %v", err)
	}
	if err := <-b.done; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if took := time.Since(began); took < delay {
		t.Errorf("stopping took %v, the delay is %v", took, delay)
	}
}

// A delay longer than the grace leaves no time, but is no reason to stay.
func TestServe_DelayLongerThanGrace(t *testing.T) {
	b := setupTransport(t, transportSetup{stop: server.Stop{Grace: 200 * time.Millisecond, Delay: time.Hour}})
	watch(t, b.connect(t, nil), "")
	b.stop()
	if err := <-b.done; err != nil {
		t.Errorf("Serve: %v", err)
	}
}
