package main

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

const (
	devWebhookPath     = "/events"
	devWebhookMaxBytes = 1 << 20
	devSecretBytes     = 32
)

// devWebhook is the receiver of `grantd dev`: it does what a receiver should, and prints a line for each delivery.
type devWebhook struct {
	url        string
	secretFile string
	verifier   *standardwebhooks.Webhook
	server     *http.Server
	out        io.Writer

	mu   sync.Mutex
	seen map[string]bool
}

// startDevWebhook makes a secret for this run, which others find in secretFile.
func startDevWebhook(secretFile string, out io.Writer) (*devWebhook, error) {
	key := make([]byte, devSecretBytes)
	rand.Read(key)
	secret := "whsec_" + base64.StdEncoding.EncodeToString(key)
	if err := os.WriteFile(secretFile, []byte(secret+"\n"), 0o600); err != nil {
		return nil, err
	}
	verifier, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &devWebhook{
		url: "http://" + listener.Addr().String() + devWebhookPath, secretFile: secretFile, verifier: verifier, out: out,
		seen: make(map[string]bool),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+devWebhookPath, w.receive)
	w.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go w.server.Serve(listener)
	return w, nil
}

// receive verifies first, deduplicates by the key, and only then has its effect, here the printing.
func (w *devWebhook) receive(answer http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(answer, request.Body, devWebhookMaxBytes))
	if err != nil {
		http.Error(answer, "the body cannot be read", http.StatusBadRequest)
		return
	}
	if err := w.verifier.Verify(body, request.Header); err != nil {
		fmt.Fprintf(w.out, "webhook: refused, the signature is not right: %v\n", err)
		http.Error(answer, "the signature is not right", http.StatusUnauthorized)
		return
	}
	e := event.New()
	if err := e.UnmarshalJSON(body); err != nil {
		fmt.Fprintf(w.out, "webhook: refused, not a CloudEvent: %v\n", err)
		http.Error(answer, "not a CloudEvent", http.StatusBadRequest)
		return
	}
	key := request.Header.Get("Idempotency-Key")
	w.mu.Lock()
	again := w.seen[key]
	w.seen[key] = true
	w.mu.Unlock()
	note := ""
	if again {
		note = "  (again, ignored)"
	}
	fmt.Fprintf(w.out, "webhook: %-22s %s for %v  event %s  key %.12s…%s\n", e.Type(), e.Subject(), e.Extensions()["tenantid"], e.ID(), key, note)
	answer.WriteHeader(http.StatusNoContent)
}

func (w *devWebhook) stop() { w.server.Close() }
