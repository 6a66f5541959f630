package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/grantd/grantd/internal/pgdev"
)

// awaited is an output that can be waited for.
type awaited struct {
	lockedWriter
	written chan struct{}
	buffer  bytes.Buffer
}

func newAwaited() *awaited {
	a := &awaited{written: make(chan struct{}, 1)}
	a.out = &a.buffer
	return a
}

func (a *awaited) Write(p []byte) (int, error) {
	n, err := a.lockedWriter.Write(p)
	select {
	case a.written <- struct{}{}:
	default:
	}
	return n, err
}

func (a *awaited) text() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.buffer.String()
}

// wait returns the first submatch of the pattern once the output has it.
func (a *awaited) wait(t *testing.T, ctx context.Context, pattern string) string {
	t.Helper()
	for {
		if m := regexp.MustCompile(pattern).FindStringSubmatch(a.text()); m != nil {
			return m[1]
		}
		select {
		case <-a.written:
		case <-ctx.Done():
			t.Fatalf("the output never matched %s:\n%s", pattern, a.text())
		}
	}
}

// One event arrives twice, and each of the two destinations hears of it once.
func TestDev_OneEventForTwoArrivals(t *testing.T) {
	temp, err := pgdev.TempDir(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(temp, "grantd-dev-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"dev", "--data-dir", filepath.Join(dir, "data"),
		"--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--nats-addr", "127.0.0.1:0",
	}
	if bin := os.Getenv("GRANTD_PG_BIN"); bin != "" {
		args = append(args, "--pg-bin", bin)
	}
	ctx, stop := context.WithCancel(t.Context())
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	stdout, stderr := newAwaited(), newAwaited()
	var ended sync.WaitGroup
	ended.Go(func() {
		defer cancel()
		if err := run(ctx, args, nil, stdout, stderr); err != nil {
			t.Errorf("grantd dev ended with %v\n%s", err, stderr.text())
		}
	})
	defer ended.Wait()
	defer stop()

	id := stdout.wait(t, limit, `webhook: entitlement\.granted +team_access for demo  event (\S+/1)  key `)
	conn, err := nats.Connect(stdout.wait(t, limit, `NATS on (\S+),`))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := js.OrderedConsumer(limit, "ENTITLEMENTS", jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := consumer.Next(jetstream.FetchMaxWait(30 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if m.Subject() != "entitlements.granted" || !strings.Contains(string(m.Data()), strconv.Quote(id)) {
		t.Errorf("NATS has %s\n%s, the webhook %s", m.Subject(), m.Data(), id)
	}
	// Both are told by the same commit, and nothing else is on its way.
	if n := strings.Count(stdout.text(), "webhook: "); n != 1 {
		t.Errorf("the webhook got %d events:\n%s", n, stdout.text())
	}
	if meta, err := m.Metadata(); err != nil || meta.NumPending != 0 {
		t.Errorf("the stream holds %d more: %v", meta.NumPending, err)
	}
}

func TestDev_WebhookReceiver(t *testing.T) {
	out := newAwaited()
	secretFile := filepath.Join(t.TempDir(), "secret")
	w, err := startDevWebhook(secretFile, out)
	if err != nil {
		t.Fatal(err)
	}
	defer w.stop()
	secret, err := os.ReadFile(secretFile)
	if err != nil {
		t.Fatal(err)
	}
	right, err := standardwebhooks.NewWebhook(strings.TrimSpace(string(secret)))
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := standardwebhooks.NewWebhookRaw(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	const event = `{"specversion":"1.0","id":"e/1","source":"/s","type":"entitlement.granted","subject":"team_access","tenantid":"demo"}`
	for _, test := range []struct {
		name   string
		signer *standardwebhooks.Webhook
		body   string
		status int
		line   string
	}{
		{"first", right, event, http.StatusNoContent, "entitlement.granted"},
		{"again", right, event, http.StatusNoContent, "again, ignored"},
		{"wrong secret", wrong, event, http.StatusUnauthorized, "the signature is not right"},
		{"no event", right, "[]", http.StatusBadRequest, "not a CloudEvent"},
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url, strings.NewReader(test.body))
		if err != nil {
			t.Fatal(err)
		}
		now := time.Now()
		signature, err := test.signer.Sign("key", now, []byte(test.body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Idempotency-Key", "key")
		request.Header.Set("Webhook-Id", "key")
		request.Header.Set("Webhook-Timestamp", strconv.FormatInt(now.Unix(), 10))
		request.Header.Set("Webhook-Signature", signature)
		before := len(out.text())
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if line := out.text()[before:]; answer.StatusCode != test.status || !strings.Contains(line, test.line) {
			t.Errorf("%s: got %d and %q, want %d and %q", test.name, answer.StatusCode, line, test.status, test.line)
		}
	}
}

// A developer has a NATS server of their own on the usual port.
func TestDev_NATSPortIsTaken(t *testing.T) {
	first, err := startDevNATS("127.0.0.1:0", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer first.stop()
	second, err := startDevNATS(strings.TrimPrefix(first.url, "nats://"), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer second.stop()
	if first.url == second.url {
		t.Errorf("both are on %s", first.url)
	}
	if other, err := startDevNATS("0.0.0.0:0", t.TempDir()); err == nil {
		other.stop()
		t.Error("it serves everybody")
	}
}
