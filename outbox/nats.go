package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/propagation"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// natsSettings is what a destination of kind nats is made of, already checked.
type natsSettings struct {
	// servers are URLs without credentials, so that they may be logged.
	servers []string
	// subject is where the events go, with {event} for the kind in lower case: granted, reversed or reinstated.
	subject string
	// stream is the one that must take them; empty takes any.
	stream string
	// uniqueSubjects appends the delivery key to the subject and has the stream refuse a second message there. So it deduplicates for
	// as long as the stream keeps the first, not only within its window.
	uniqueSubjects bool
	// options hold credentials, TLS and names.
	options []nats.Option
	// ackTimeout bounds the wait for the stream's acknowledgement.
	ackTimeout time.Duration
}

// natsSender publishes to JetStream. One connection serves every attempt of the destination; it connects again by itself, and
// publishes nothing late: what cannot leave at once fails at once, since the store is the only queue.
type natsSender struct {
	destination *Destination
	settings    natsSettings
	asyncError  atomic.Pointer[error]

	log *slog.Logger

	// connecting guards what follows. It is a channel, so that one attempt connects while the others wait no longer than their deadlines.
	connecting chan struct{}
	conn       *nats.Conn
	js         jetstream.JetStream
	closed     atomic.Bool
}

func newNATSSender(d *Destination, settings natsSettings, log *slog.Logger) *natsSender {
	s := &natsSender{destination: d, settings: settings, log: log, connecting: make(chan struct{}, 1)}
	s.settings.options = append([]nats.Option{
		nats.Name("grantd " + d.Name),
		nats.Timeout(d.Timeout),
		// A connection that the network has forgotten is noticed after three times the timeout.
		nats.PingInterval(d.Timeout),
		nats.MaxPingsOutstanding(1),
		nats.FlusherTimeout(min(d.Timeout, natsWriteTimeout)),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(natsReconnectWait),
		nats.ReconnectJitter(natsReconnectWait, natsReconnectWait),
		nats.ReconnectBufSize(-1),
		// Credentials that the servers do not take today may be right tomorrow.
		nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { s.asyncError.Store(&err) }),
	}, settings.options...)
	return s
}

const (
	// natsReconnectWait is the pause before the same server is tried again.
	natsReconnectWait = time.Second
	// natsWriteTimeout bounds a write, for which all that is published meanwhile waits, without a context.
	natsWriteTimeout = 5 * time.Second
)

func (s *natsSender) render(d *store.Delivery) ([]byte, string, error) { return renderEvent(d) }

func (s *natsSender) close() {
	s.closed.Store(true)
	s.disconnect()
}

// disconnect is for good. While a connection is being made it does nothing, and whoever makes it comes here next.
func (s *natsSender) disconnect() {
	select {
	case s.connecting <- struct{}{}:
		if s.conn != nil {
			s.conn.Close()
		}
	default:
	}
}

func (s *natsSender) send(ctx context.Context, d *store.Delivery) result {
	ctx, cancel := context.WithTimeout(ctx, s.settings.ackTimeout)
	defer cancel()
	js, err := s.jetStream(ctx)
	if err != nil {
		return result{verdict: transient, unreachable: true, reason: fmt.Sprintf("not connected: %v", err)}
	}
	before := s.asyncError.Load()
	message, options := s.message(ctx, d)
	ack, err := js.PublishMsg(ctx, message, options...)
	r := natsResult(ack, err)
	// A publish that is not permitted is never answered: the server says so on the side.
	if after := s.asyncError.Load(); r.verdict == uncertain && after != before {
		r.reason += fmt.Sprintf(" (the server said: %v)", *after)
	}
	return r
}

func (s *natsSender) message(ctx context.Context, d *store.Delivery) (*nats.Msg, []jetstream.PublishOpt) {
	subject := strings.ReplaceAll(s.settings.subject, "{event}", natsEvent(d.Event.Entry.Kind))
	options := []jetstream.PublishOpt{jetstream.WithMsgID(d.Key)}
	if s.settings.stream != "" {
		options = append(options, jetstream.WithExpectStream(s.settings.stream))
	}
	if s.settings.uniqueSubjects {
		subject += "." + d.Key
		options = append(options, jetstream.WithExpectLastSequencePerSubject(0))
	}
	m := nats.NewMsg(subject)
	m.Data = d.Body
	m.Header.Set("Content-Type", d.ContentType)
	m.Header.Set(headerIdempotencyKey, d.Key)
	m.Header.Set(headerOperationKey, d.Event.Entry.OperationKey)
	s.destination.carry(ctx, natsHeaders(m.Header))
	return m, options
}

func natsEvent(k entitlementv1.EntryKind) string { return strings.ToLower(plainEvent(k)) }

// jetStream connects where there is no connection yet. One that was made finds its way back by itself, unless nats.go gave it up.
func (s *natsSender) jetStream(ctx context.Context) (jetstream.JetStream, error) {
	select {
	case s.connecting <- struct{}{}:
	case <-ctx.Done():
		return nil, errNotInTime
	}
	if s.js != nil && !s.conn.IsClosed() {
		defer func() { <-s.connecting }()
		if s.conn.IsConnected() {
			return s.js, nil
		}
		if err := s.conn.LastError(); err != nil {
			return nil, err
		}
		return nil, nats.ErrDisconnected
	}
	// nats.go heeds no context here, and may need the timeout more than once. Who cannot wait leaves; the connection is for those who come next.
	type connection struct {
		js  jetstream.JetStream
		err error
	}
	made := make(chan connection, 1)
	go func() {
		js, err := s.connect()
		<-s.connecting
		made <- connection{js, err}
		if s.closed.Load() {
			s.disconnect()
		}
	}()
	select {
	case c := <-made:
		return c.js, c.err
	case <-ctx.Done():
		return nil, errNotInTime
	}
}

var errNotInTime = errors.New("there is no connection in time")

func (s *natsSender) connect() (js jetstream.JetStream, err error) {
	defer caught(s.log, "a connection", "", &err)
	conn, err := nats.Connect(strings.Join(s.settings.servers, ","), s.settings.options...)
	if err != nil {
		return nil, err
	}
	js, err = jetstream.New(conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	s.conn, s.js = conn, js
	return js, nil
}

// natsHeaders writes header names as they are: NATS compares them as bytes, and trace context's are in lower case.
type natsHeaders nats.Header

var _ propagation.TextMapCarrier = natsHeaders(nil)

func (h natsHeaders) Get(key string) string { return nats.Header(h).Get(key) }
func (h natsHeaders) Set(key, value string) { nats.Header(h).Set(key, value) }
func (h natsHeaders) Keys() []string {
	keys := make([]string, 0, len(h))
	for key := range h {
		keys = append(keys, key)
	}
	return keys
}

// natsResult says what a publish came to. Only a message that is too large is refused for what it is. All else is about the way or
// the stream: there is no broker, no stream that listens, no right to publish, or the stream is full. An operator mends these,
// and then the events must still be there; so none of them is permanent, and none counts against the event.
func natsResult(ack *jetstream.PubAck, err error) result {
	var refused *jetstream.APIError
	switch {
	case err == nil && ack.Duplicate:
		return result{verdict: delivered, note: noteDuplicate}
	case err == nil:
		return result{verdict: delivered}
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, jetstream.ErrStreamMessageExceedsMaximum):
		return result{verdict: permanent, reason: err.Error()}
	case errors.As(err, &refused):
		// Under a unique subject: it stands there. The neighbouring code 10164 only says that one is on its way.
		if refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
			return result{verdict: delivered, note: noteDuplicate}
		}
		return result{verdict: transient, unreachable: true, statusCode: refused.Code, reason: err.Error()}
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		return result{verdict: transient, unreachable: true, reason: "no stream takes the subject"}
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrDisconnected):
		return result{verdict: transient, unreachable: true, reason: err.Error()}
	}
	return result{verdict: uncertain, unreachable: true, reason: fmt.Sprintf("no acknowledgement: %v", err)}
}

const noteDuplicate = "duplicate"
