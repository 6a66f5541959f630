package outbox

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

const (
	// minSecretBytes is Standard Webhooks' own.
	minSecretBytes = 24
	secretPrefix   = "whsec_"
)

// signers are made from the secrets as they were read last.
type signers struct {
	sources []source
	all     []*standardwebhooks.Webhook
}

// source is where a secret was read, and what tells whether it is still the same: a variable's text, or the file itself.
type source struct {
	text string
	file os.FileInfo
}

// settledAfter is how long a file must have been left alone for its time to tell one content from the next.
const settledAfter = 2 * time.Second

// same says that the secret cannot have changed.
func (s *source) same(of secret, getenv func(string) string) bool {
	if of.env != "" {
		return strings.TrimSpace(getenv(of.env)) == s.text
	}
	now, err := os.Stat(of.file)
	return err == nil && s.file != nil && os.SameFile(now, s.file) && now.Size() == s.file.Size() && now.ModTime().Equal(s.file.ModTime())
}

// sign sets Standard Webhooks' headers: the id is the delivery's key, the time is now, and there is a signature for each of the
// secrets, so that a receiver may change from one to the next whenever it likes.
func (s *webhookSender) sign(request *http.Request, id string, payload []byte) error {
	all, err := s.currentSigners()
	if err != nil {
		return err
	}
	now := s.in.now()
	signatures := make([]string, len(all))
	for i, w := range all {
		if signatures[i], err = w.Sign(id, now, payload); err != nil {
			return err
		}
	}
	request.Header.Set(standardwebhooks.HeaderWebhookID, id)
	request.Header.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(now.Unix(), 10))
	request.Header.Set(standardwebhooks.HeaderWebhookSignature, strings.Join(signatures, " "))
	return nil
}

// currentSigners are those of the secrets as they are now, which are read again when they may have changed. No error holds any part of
// one.
func (s *webhookSender) currentSigners() ([]*standardwebhooks.Webhook, error) {
	if last := s.signers.Load(); last != nil {
		same := true
		for i := range last.sources {
			same = same && last.sources[i].same(s.section.secrets[i], s.in.getenv)
		}
		if same {
			return last.all, nil
		}
	}
	made := &signers{}
	for _, secret := range s.section.secrets {
		var from source
		if secret.env == "" {
			// Before it is read: a change in between must not be missed.
			if file, err := os.Stat(secret.file); err == nil && time.Since(file.ModTime()) > settledAfter {
				from.file = file
			}
		}
		text, err := secret.read(s.in.getenv)
		if err != nil {
			return nil, err
		}
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(text, secretPrefix))
		if err != nil || len(key) < minSecretBytes {
			return nil, fmt.Errorf("the %s must hold %s and the base64 of %d bytes at least", secret, secretPrefix, minSecretBytes)
		}
		w, err := standardwebhooks.NewWebhookRaw(key)
		if err != nil {
			return nil, err
		}
		from.text = text
		made.sources, made.all = append(made.sources, from), append(made.all, w)
	}
	s.signers.Store(made)
	return made.all, nil
}
