package server

import (
	"context"
	"crypto/tls"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/grantd/grantd/telemetry"
)

const (
	// MaxRequestBytes is the size of the largest message that the server reads.
	MaxRequestBytes = 1<<20 + 64<<10
	// maxHeaderBytes holds a full baggage header (8 KiB), a token and trace headers several times over; gRPC's own
	// default is 16 MiB, for each of the streams.
	maxHeaderBytes = 64 << 10
	// handshakeTimeout is what a connection has for TLS and HTTP/2's preface.
	handshakeTimeout = 10 * time.Second

	defaultMaxConcurrentStreams = 1024
	// streamWorkers take a few KiB each.
	streamWorkers = 512
)

// Limits bounds what one connection may use.
type Limits struct {
	// MaxConcurrentStreams is how many calls a connection may have in flight, 1,024 when zero. More wait at the client.
	MaxConcurrentStreams uint32
	// MaxConnectionAge ends connections, when their calls are done, so that callers connect anew: to other replicas, and
	// under the certificates of today. Zero lets them stand.
	MaxConnectionAge time.Duration
}

// ServerOptions returns what every gRPC server of grantd is made with. config is nil for plaintext. Its interceptors are
// the outermost when the options come first.
func (t *Transport) ServerOptions(config *tls.Config, limits Limits) []grpc.ServerOption {
	if limits.MaxConcurrentStreams == 0 {
		limits.MaxConcurrentStreams = defaultMaxConcurrentStreams
	}
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(MaxRequestBytes),
		grpc.MaxConcurrentStreams(limits.MaxConcurrentStreams),
		// A goroutine that is used again has grown its stack already; beyond these, each call gets a new one.
		grpc.NumStreamWorkers(streamWorkers),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshakeTimeout),
		// gRPC's default of five minutes cuts off clients that keep a balancer's path open.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: time.Minute, Timeout: 20 * time.Second, MaxConnectionAge: limits.MaxConnectionAge,
		}),
		// The store is closed when Serve has returned: no handler should run then.
		grpc.WaitForHandlers(true),
		grpc.ChainUnaryInterceptor(t.unary),
		grpc.ChainStreamInterceptor(t.stream),
	}
	if config != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	return options
}

// unary counts the call, puts on its span whose it is, and turns a panic into INTERNAL.
func (t *Transport) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	t.inFlight.Add(1)
	defer t.inFlight.Add(-1)
	defer t.recovered(ctx, info.FullMethod, req, &err)
	describeRequest(trace.SpanFromContext(ctx), req)
	return handler(ctx, req)
}

// stream does the same for streams, and ends those that have no end of their own when the server drains.
func (t *Transport) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	if !endless(info.FullMethod) {
		t.inFlight.Add(1)
		defer t.inFlight.Add(-1)
		defer t.recovered(ss.Context(), info.FullMethod, nil, &err)
		return handler(srv, ss)
	}
	watched := &watchedStream{ServerStream: ss, sent: make(chan struct{}, 1)}
	done := make(chan error, 1)
	// Such a handler waits in RecvMsg or for the stream's context: it ends when this function has returned and gRPC has
	// closed the stream, not before.
	go func() {
		var err error
		defer func() { done <- err }()
		defer t.recovered(ss.Context(), info.FullMethod, nil, &err)
		err = handler(srv, watched)
	}()
	select {
	case err := <-done:
		return err
	case <-t.draining:
	}
	if strings.HasPrefix(info.FullMethod, healthPrefix) {
		// Its watcher is told NOT_SERVING before it is cut off.
		for watched.lastStatus() == healthpb.HealthCheckResponse_SERVING {
			select {
			case <-watched.sent:
			case err := <-done:
				return err
			}
		}
	}
	return status.Error(codes.Unavailable, "the server is shutting down")
}

const (
	healthPrefix     = "/grpc.health."
	reflectionPrefix = "/grpc.reflection."
)

// endless reports whether a stream stays open until its client closes it: health's Watch and reflection.
func endless(method string) bool {
	return strings.HasPrefix(method, healthPrefix) || strings.HasPrefix(method, reflectionPrefix)
}

// watchedStream knows the last health status that was sent on it; UNKNOWN when none was.
type watchedStream struct {
	grpc.ServerStream
	last atomic.Int32
	sent chan struct{}
}

func (w *watchedStream) lastStatus() healthpb.HealthCheckResponse_ServingStatus {
	return healthpb.HealthCheckResponse_ServingStatus(w.last.Load())
}

func (w *watchedStream) SendMsg(m any) error {
	err := w.ServerStream.SendMsg(m)
	if response, ok := m.(*healthpb.HealthCheckResponse); ok && err == nil {
		w.last.Store(int32(response.GetStatus()))
		select {
		case w.sent <- struct{}{}:
		default:
		}
	}
	return err
}

// recovered, deferred, answers a handler's panic. The text is fixed: a panic's own may hold a payload.
func (t *Transport) recovered(ctx context.Context, method string, request any, err *error) {
	if p := recover(); p != nil {
		t.panics.Add(1)
		log := t.log
		if r, ok := request.(interface{ GetIdempotencyKey() string }); ok {
			log = log.With(telemetry.KeyName, r.GetIdempotencyKey())
		}
		log.ErrorContext(ctx, "panic in a handler", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = status.Error(codes.Internal, "internal error")
	}
}
