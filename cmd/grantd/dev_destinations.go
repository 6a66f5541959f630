package main

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"

	"github.com/grantd/grantd/outbox"
)

const (
	devWebhookName = "dev-webhook"
	devNATSName    = "dev-nats"
)

// localDestinations starts the destinations that `grantd dev` brings along. stop ends them.
func (c *devCmd) localDestinations(dir string, io stdio) (_ []outbox.Destination, stop func(), err error) {
	var stops []func()
	stop = func() {
		for _, s := range stops {
			s()
		}
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	var file strings.Builder
	if c.Webhook {
		receiver, err := startDevWebhook(filepath.Join(dir, "webhook-secret"), io.stdout)
		if err != nil {
			return nil, stop, fmt.Errorf("the webhook receiver: %w", err)
		}
		stops = append(stops, receiver.stop)
		fmt.Fprintf(io.stdout, "Webhook receiver on %s, its secret in %s\n", receiver.url, receiver.secretFile)
		fmt.Fprintf(&file, devWebhookText, devWebhookName, receiver.url, receiver.secretFile)
	}
	if c.NATS {
		broker, err := startDevNATS(c.NATSAddr, filepath.Join(dir, "nats"))
		if err != nil {
			return nil, stop, fmt.Errorf("the NATS server: %w", err)
		}
		stops = append(stops, broker.stop)
		fmt.Fprintf(io.stdout, "NATS on %s, stream %s\n  nats --server %[1]s stream view %[2]s\n", broker.url, devStream)
		fmt.Fprintf(&file, devNATSText, devNATSName, broker.url, devSubject, devStream)
	}
	if file.Len() == 0 {
		return nil, stop, nil
	}
	all, err := outbox.ParseDestinations("grantd dev", []byte("destinations:\n"+file.String()))
	return all, stop, err
}

// devWebhookText takes the name, the URL and the secret's file.
const devWebhookText = `
  - name: %q
    kind: webhook
    internal: true
    deduplicates: true
    retry: {max_delay: 5s}
    webhook:
      url: %q
      secrets: [{file: %q}]
`

// devNATSText takes the name, the URL, the subject and the stream.
const devNATSText = `
  - name: %q
    kind: nats
    internal: true
    retry: {max_delay: 5s}
    nats:
      servers: [%q]
      subject: %q
      stream: %q
`

// lockedWriter keeps lines whole that several goroutines write.
type lockedWriter struct {
	mu  sync.Mutex
	out io.Writer
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}
