package outbox

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"go.opentelemetry.io/otel/propagation"

	"github.com/grantd/grantd/store"
)

const (
	// headerIdempotencyKey has the delivery's key, which the receiver deduplicates by; headerOperationKey that of the
	// operation behind it, which several deliveries may share.
	headerIdempotencyKey = "Idempotency-Key"
	headerOperationKey   = "Grantd-Operation-Key"

	maxAnswerBytes       = 4 << 10
	maxAnswerHeaderBytes = 64 << 10

	// minSecretBytes is Standard Webhooks' own.
	minSecretBytes = 24
	secretPrefix   = "whsec_"
)

// webhookSender posts each delivery as a signed CloudEvent.
type webhookSender struct {
	destination *Destination
	section     *webhookSection
	in          surroundings
	client      *http.Client
}

func newWebhookSender(d *Destination, section *webhookSection, in surroundings, config *tls.Config) *webhookSender {
	dialer := &net.Dialer{Timeout: d.Timeout, KeepAlive: 15 * time.Second}
	return &webhookSender{destination: d, section: section, in: in, client: &http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true,
			TLSClientConfig: config, TLSHandshakeTimeout: d.Timeout,
			ResponseHeaderTimeout: d.Timeout, MaxResponseHeaderBytes: maxAnswerHeaderBytes,
			MaxIdleConns: d.Concurrency, MaxIdleConnsPerHost: d.Concurrency, IdleConnTimeout: 30 * time.Second,
			DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

func (s *webhookSender) close() { s.client.CloseIdleConnections() }

func (s *webhookSender) render(d *store.Delivery) ([]byte, string, error) { return renderEvent(d) }

func (s *webhookSender) send(ctx context.Context, d *store.Delivery) result {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.section.url.String(), bytes.NewReader(d.Body))
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

	var wrote atomic.Bool
	request = request.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { wrote.Store(true) }}))
	answer, err := s.client.Do(request)
	if err != nil {
		return failedCall(ctx, err, wrote.Load())
	}
	defer answer.Body.Close()
	// What cannot be read in time changes nothing: the status is the answer.
	text, _ := io.ReadAll(io.LimitReader(answer.Body, maxAnswerBytes))
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

// failedCall classifies a call without an answer. Before the request's headers were written, the receiver cannot have had the
// event; after that it may.
func failedCall(ctx context.Context, err error, wrote bool) result {
	// The URL that net/http puts in front may hold what is not for every operator's eyes in its query.
	if at := new(url.Error); errors.As(err, &at) {
		err = at.Err
	}
	reason := err.Error()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		reason = "no answer within the deadline"
	}
	if wrote {
		return result{verdict: uncertain, reason: reason}
	}
	return result{verdict: transient, unreachable: true, reason: reason}
}

// sign sets Standard Webhooks' headers: the id is the delivery's key, the time is now, and there is a signature for each of the
// secrets, so that a receiver may change from one to the next whenever it likes.
func (s *webhookSender) sign(request *http.Request, id string, payload []byte) error {
	keys, err := s.keys()
	if err != nil {
		return err
	}
	now := s.in.now()
	signatures := make([]string, len(keys))
	for i, key := range keys {
		w, err := standardwebhooks.NewWebhookRaw(key)
		if err != nil {
			return err
		}
		if signatures[i], err = w.Sign(id, now, payload); err != nil {
			return err
		}
	}
	request.Header.Set(standardwebhooks.HeaderWebhookID, id)
	request.Header.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(now.Unix(), 10))
	request.Header.Set(standardwebhooks.HeaderWebhookSignature, strings.Join(signatures, " "))
	return nil
}

// keys reads the secrets as they are now. No error holds any part of one.
func (s *webhookSender) keys() ([][]byte, error) {
	keys := make([][]byte, len(s.section.secrets))
	for i, secret := range s.section.secrets {
		text, err := secret.read(s.in.getenv)
		if err != nil {
			return nil, err
		}
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(text, secretPrefix))
		if err != nil || len(key) < minSecretBytes {
			return nil, fmt.Errorf("the %s must hold %s and the base64 of %d bytes at least", secret, secretPrefix, minSecretBytes)
		}
		keys[i] = key
	}
	return keys, nil
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
	answer, err := s.client.Do(request)
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
