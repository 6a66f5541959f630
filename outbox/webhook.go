package outbox

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/grantd/grantd/store"
)

const (
	// headerIdempotencyKey has the delivery's key, which the receiver deduplicates by; headerOperationKey that of the
	// operation behind it, which several deliveries may share.
	headerIdempotencyKey = "Idempotency-Key"
	headerOperationKey   = "Grantd-Operation-Key"

	// answerTimeout and maxAnswerBytes bound what is read of an answer's text.
	answerTimeout        = time.Second
	maxAnswerBytes       = 4 << 10
	maxAnswerHeaderBytes = 64 << 10
)

// webhookSender posts each delivery as a signed CloudEvent.
type webhookSender struct {
	destination *Destination
	section     *webhookSection
	in          surroundings
	// transport follows no redirects, knows no cookies, and has no time limit but the context's.
	transport *http.Transport
	signers   atomic.Pointer[signers]
}

func newWebhookSender(d *Destination, section *webhookSection, in surroundings, config *tls.Config) *webhookSender {
	dialer := &net.Dialer{Timeout: d.Timeout, KeepAlive: 15 * time.Second}
	return &webhookSender{destination: d, section: section, in: in, transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true,
		TLSClientConfig: config, TLSHandshakeTimeout: d.Timeout,
		ResponseHeaderTimeout: d.Timeout, MaxResponseHeaderBytes: maxAnswerHeaderBytes,
		MaxIdleConns: d.Concurrency, MaxIdleConnsPerHost: d.Concurrency, IdleConnTimeout: 30 * time.Second,
		DisableCompression: true,
		// A connection that was idle may be closed by the receiver at the moment when it is used again, and then nobody knows whether
		// the event was read. Where that would be for an operator to find out, each call has a connection of its own.
		DisableKeepAlives: !d.Deduplicates,
		// An HTTP/2 connection is used on after a call on it has timed out. Where nothing comes back on it any more, it is given up.
		HTTP2: &http.HTTP2Config{SendPingTimeout: d.Timeout, PingTimeout: d.Timeout},
	}}
}

func (s *webhookSender) close() { s.transport.CloseIdleConnections() }

func (s *webhookSender) render(d *store.Delivery) ([]byte, string, error) { return renderEvent(d) }

func (s *webhookSender) send(ctx context.Context, d *store.Delivery) result {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wrote atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { wrote.Store(true) }})
	request, err := http.NewRequestWithContext(traced, http.MethodPost, s.section.url.String(), bytes.NewReader(d.Body))
	if err != nil {
		return result{verdict: permanent, reason: err.Error()}
	}
	if !s.destination.Deduplicates {
		// With a body that can be had again and an Idempotency-Key, net/http repeats a request by itself when its connection
		// breaks.
		request.GetBody = nil
	}
	request.Header.Set("Content-Type", d.ContentType)
	request.Header.Set(headerIdempotencyKey, d.Key)
	request.Header.Set(headerOperationKey, d.Event.Entry.OperationKey)
	if err := s.sign(request, d.Key, d.Body); err != nil {
		return result{verdict: transient, unreachable: true, reason: err.Error()}
	}
	s.destination.carry(ctx, propagation.HeaderCarrier(request.Header))

	answer, err := s.transport.RoundTrip(request)
	if err != nil {
		return failedCall(ctx, err, wrote.Load())
	}
	defer answer.Body.Close()
	var text []byte
	if answer.StatusCode != http.StatusSwitchingProtocols && answer.Body != http.NoBody {
		// What cannot be read in time changes nothing: the status is the answer, and is to be recorded soon. After 101 what follows is no text,
		// and no context ends the wait.
		defer time.AfterFunc(answerTimeout, cancel).Stop()
		text, _ = io.ReadAll(io.LimitReader(answer.Body, maxAnswerBytes))
	}
	r := classifyHTTP(answer.StatusCode)
	if r.verdict == delivered {
		return r
	}
	r.retryAfter = retryAfter(answer.Header.Get("Retry-After"), s.in.now())
	if len(text) > 0 {
		r.reason += ": " + string(text)
	}
	return r
}

// notLookedAt is what an error of net/http says where the receiver has refused an HTTP/2 stream without looking at it, by GOAWAY or
// REFUSED_STREAM, and the request is not one that net/http may repeat. PROTOCOL_ERROR, which it would repeat too, says no such thing.
var notLookedAt = regexp.MustCompile(`cannot retry err \[.*(GOAWAY|REFUSED_STREAM)`)

// failedCall classifies a call without an answer. Before the request's headers were written, the receiver cannot have had the
// event; after that it may, unless it says otherwise.
func failedCall(ctx context.Context, err error, wrote bool) result {
	reason := err.Error()
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		reason = "no answer within the deadline"
	case strings.HasSuffix(reason, "timeout awaiting response headers"):
		reason = "no answer began within the timeout"
	}
	if wrote && !notLookedAt.MatchString(reason) {
		return result{verdict: uncertain, reason: reason}
	}
	return result{verdict: transient, unreachable: true, reason: reason}
}

func (s *webhookSender) canAsk() bool { return s.section.lookupURL != "" }

// ask gets the look-up URL, signed like an event with an empty body: any 2xx says that the delivery with this key arrived, 404 that it did
// not. Everything else is no answer.
func (s *webhookSender) ask(ctx context.Context, d *store.Delivery) (arrived bool, err error) {
	at := strings.ReplaceAll(s.section.lookupURL, keyPlaceholder, d.Key)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return false, err
	}
	request.Header.Set(headerIdempotencyKey, d.Key)
	if err := s.sign(request, d.Key, nil); err != nil {
		return false, err
	}
	s.destination.carry(ctx, propagation.HeaderCarrier(request.Header))
	answer, err := s.transport.RoundTrip(request)
	if err != nil {
		return false, errors.New(failedCall(ctx, err, true).reason)
	}
	answer.Body.Close()
	switch {
	case answer.StatusCode >= 200 && answer.StatusCode < 300:
		return true, nil
	case answer.StatusCode == http.StatusNotFound:
		return false, nil
	default:
		return false, fmt.Errorf("the look-up was answered %d", answer.StatusCode)
	}
}
