package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// Transport is what a server's interceptors and its end share.
type Transport struct {
	log      *slog.Logger
	inFlight atomic.Int64
	panics   atomic.Int64
	// stopping is closed when the server is told to stop, draining when it takes no more calls.
	stopping, draining chan struct{}
}

// NewTransport returns the transport of one gRPC server, which is served once.
func NewTransport(log *slog.Logger) *Transport {
	return &Transport{log: log, stopping: make(chan struct{}), draining: make(chan struct{})}
}

// InFlight is the number of calls in flight, not counting health's and reflection's streams.
func (t *Transport) InFlight() int64 { return t.inFlight.Load() }

// Panics is the number of panics that were answered with INTERNAL.
func (t *Transport) Panics() int64 { return t.panics.Load() }

// Stopping reports whether the server was told to stop.
func (t *Transport) Stopping() bool {
	select {
	case <-t.stopping:
		return true
	default:
		return false
	}
}

// Stop says how a server ends.
type Stop struct {
	// Grace bounds the whole of it. Calls that still run in its last tenth (at most half a second) are cut off.
	Grace time.Duration
	// Delay is how long NOT_SERVING is shown before calls are refused, for balancers that poll. It is part of Grace.
	Delay time.Duration
}

// CutOffError says that the grace was over before the calls were. Their effects may have happened: a retry finds out.
type CutOffError struct {
	Calls int64
}

func (e *CutOffError) Error() string {
	return fmt.Sprintf("%d calls were cut off when the grace was over", e.Calls)
}

// Serve answers calls on lis until ctx ends, and then stops in this order: health says NOT_SERVING; after stop.Delay no new
// call is taken (it gets UNAVAILABLE, from the refused connection or the client's own transport); streams without an end
// of their own are ended; calls in flight finish. It returns within stop.Grace after ctx ended, in any case: with nil when
// every call finished, else with a CutOffError. s must be made with t's ServerOptions.
func (t *Transport) Serve(ctx context.Context, lis net.Listener, s *grpc.Server, health *Health, stop Stop) error {
	connections := &handshakes{Listener: lis, open: map[*handshake]struct{}{}}
	served := make(chan struct{})
	var serveErr error
	go func() {
		defer close(served)
		serveErr = s.Serve(connections)
	}()
	var failure error
	select {
	case <-served:
		failure = fmt.Errorf("gRPC server: %w", serveErr)
	case <-ctx.Done():
	}
	return errors.Join(failure, t.stop(connections, s, health, stop))
}

// stop is Serve's end.
func (t *Transport) stop(connections *handshakes, s *grpc.Server, health *Health, stop Stop) error {
	over, cancel := context.WithTimeout(context.Background(), stop.Grace)
	defer cancel()
	cut, cancel := context.WithTimeout(over, stop.Grace-min(stop.Grace/10, 500*time.Millisecond))
	defer cancel()
	t.log.Info("stopping", "calls_in_flight", t.InFlight(), "calls_end_within", stop.Grace.String())
	close(t.stopping)
	health.shutdown()
	if stop.Delay > 0 {
		select {
		case <-time.After(stop.Delay):
		case <-cut.Done():
		}
	}

	// GracefulStop waits for handshakes before it tells any client, so one that has connected and says nothing would keep
	// the others from hearing.
	connections.closeHandshaking()
	close(t.draining)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.GracefulStop()
	}()
	select {
	case <-stopped:
		return nil
	case <-cut.Done():
	}

	calls := t.InFlight()
	go s.Stop()
	select {
	case <-stopped:
	case <-over.Done():
	}
	if calls == 0 {
		return nil
	}
	return &CutOffError{Calls: calls}
}

// handshakes is a listener that knows which of its connections have not finished their handshake.
type handshakes struct {
	net.Listener
	mu      sync.Mutex
	open    map[*handshake]struct{}
	closing bool
}

func (l *handshakes) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &handshake{Conn: conn, listener: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		// gRPC finds it closed, and forgets it.
		conn.Close()
	} else {
		l.open[c] = struct{}{}
	}
	return c, nil
}

// closeHandshaking closes the connections whose handshake is not over, and those still to come.
func (l *handshakes) closeHandshaking() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closing = true
	for c := range l.open {
		c.Conn.Close()
	}
}

func (l *handshakes) forget(c *handshake) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, c)
}

type handshake struct {
	net.Conn
	listener *handshakes
}

// SetDeadline is called by gRPC with the time that a handshake has and, when the handshake is over, with none.
func (c *handshake) SetDeadline(deadline time.Time) error {
	if deadline.IsZero() {
		c.listener.forget(c)
	}
	return c.Conn.SetDeadline(deadline)
}

func (c *handshake) Close() error {
	c.listener.forget(c)
	return c.Conn.Close()
}
