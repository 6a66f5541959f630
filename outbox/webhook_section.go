package outbox

import (
	"crypto/tls"
	"fmt"
	"net/url"
	"strings"
)

// webhookSection is what the file says of one webhook.
type webhookSection struct {
	url *url.URL
	// lookupURL has keyPlaceholder where the delivery's key goes; empty where the receiver cannot be asked.
	lookupURL string
	secrets   []secret
	// ca names the authorities that the receiver's certificate may come from, those of the system where it is empty; cert and key
	// the certificate that is shown to it.
	ca, cert, key string
}

const (
	keyPlaceholder = "{key}"
	maxSecrets     = 8
	knownWebhook   = "url, lookup_url, secrets, tls and insecure_plaintext"
	rulePlaintext  = "must be https, except for loopback or with insecure_plaintext: true"
)

func readWebhook(f field) section {
	var w webhookSection
	var plaintext bool
	var at, lookupAt *field
	f.fields(knownWebhook, func(name string, f field) bool {
		switch name {
		case "url":
			w.url, at = f.url("https", "http"), &f
		case "lookup_url":
			lookupAt = &f
			if f.url("https", "http") != nil {
				w.lookupURL = f.value.Value
			}
		case "secrets":
			f.items(func(f field) { w.secrets = append(w.secrets, f.secret()) })
			if len(w.secrets) > maxSecrets {
				f.refuse(fmt.Sprintf("must be %d at most", maxSecrets))
			}
		case "tls":
			readTLSFiles(f, &w.ca, &w.cert, &w.key)
		case "insecure_plaintext":
			plaintext = f.bool()
		default:
			return false
		}
		return true
	})
	if w.url == nil {
		f.missing("url")
	}
	if len(w.secrets) == 0 {
		f.missing("secrets")
	}
	if w.url != nil && !plaintext && exposed(w.url) {
		at.refuse(rulePlaintext)
	}
	if w.lookupURL != "" {
		lookup, _ := url.Parse(w.lookupURL)
		switch {
		case !strings.Contains(w.lookupURL, keyPlaceholder) || strings.Contains(lookup.Host, keyPlaceholder):
			lookupAt.refuse("must have " + keyPlaceholder + " in its path or query, where the delivery's key goes")
		case !plaintext && exposed(lookup):
			lookupAt.refuse(rulePlaintext)
		}
	}
	return &w
}

// exposed says whether others could read what is sent to the URL.
func exposed(u *url.URL) bool {
	return u.Scheme != "https" && !isLoopback(u.Hostname())
}

func (w *webhookSection) open(d *Destination, in surroundings) (sender, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	var err error
	if w.ca != "" {
		if config.RootCAs, err = readAuthorities(w.ca); err != nil {
			return nil, err
		}
	}
	if w.cert != "" {
		if _, err := tls.LoadX509KeyPair(w.cert, w.key); err != nil {
			return nil, err
		}
		// It is read again for each connection, since it may be renewed.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(w.cert, w.key)
			return &pair, err
		}
	}
	s := newWebhookSender(d, w, in, config)
	// A secret that is missing or unreadable is better known now than at the first event.
	if _, err := s.currentSigners(); err != nil {
		return nil, err
	}
	return s, nil
}
