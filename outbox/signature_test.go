package outbox_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/grantd/grantd/outbox"
)

// Case 16: a receiver with the reference verifier fails three times over an hour, with a new build and a rotation of secrets in between. Every
// attempt brings the same body and id, a fresh timestamp and fresh signatures; during the rotation both secrets verify. A redirect is
// neither followed nor counted as delivered.
func TestSignature_AttemptsOverAnHour(t *testing.T) {
	arrived := make(chan received)
	proceed := make(chan int)
	r := newReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		arrived <- received{r.Header.Clone(), body}
		w.Header().Set("Location", "/events")
		w.WriteHeader(<-proceed)
	})
	old, next := newSecret(), newSecret()
	file := filepath.Join(t.TempDir(), "secret")
	write := func(secret string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(old)
	b := setup(t, fmt.Sprintf(`
destinations:
- name: crm
  kind: webhook
  retry: {min_delay: 24h, max_delay: 24h}
  webhook: {url: %s/events, tls: {ca_file: %s}, secrets: [{env: SECRET}, {file: %s}]}
`, r.URL, r.ca, file))
	b.secret = old
	var ahead atomic.Int64
	clock := func(c *outbox.Config) {
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	}
	// verifies is the reference verifier's judgement, at the receiver's time.
	verifies := func(got received, secret string) bool {
		w, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			t.Fatal(err)
		}
		unix, err := strconv.ParseInt(got.header.Get(standardwebhooks.HeaderWebhookTimestamp), 10, 64)
		if err != nil {
			t.Error(err)
		}
		age := time.Now().Add(time.Duration(ahead.Load())).Sub(time.Unix(unix, 0)).Abs()
		return w.VerifyIgnoringTimestamp(got.body, got.header) == nil && age < 5*time.Minute
	}
	replica := b.start(clock)
	b.grant("acme", "INV-1", "team_access")
	attempts := []struct {
		status   int
		oldIsIn  bool
		newIsIn  bool
		restarts bool
		rotates  func()
	}{
		{500, true, false, false, nil},
		{500, true, true, true, func() { write(next) }},
		{500, true, true, false, nil},
		{302, false, true, true, func() { b.secret = next }},
		{200, false, true, false, nil},
	}
	var all []received
	for i, attempt := range attempts {
		if i > 0 {
			ahead.Add(int64(20 * time.Minute))
			b.await("the failure is on record", `SELECT count(*) = $1 AND min(d.state) = 1 FROM all_delivery_attempts a CROSS JOIN all_deliveries d WHERE a.outcome <> 0`, i)
			if attempt.rotates != nil {
				attempt.rotates()
			}
			if attempt.restarts {
				replica.stop()
				replica = b.start(b.another, clock)
			}
			b.exec(`UPDATE deliveries SET due_at = clock_timestamp() WHERE tenant_id = 'acme'`)
		}
		got := <-arrived
		proceed <- attempt.status
		if verifies(got, old) != attempt.oldIsIn || verifies(got, next) != attempt.newIsIn {
			t.Errorf("attempt %d: the old secret verifies: %t, the new one: %t", i+1, verifies(got, old), verifies(got, next))
		}
		all = append(all, got)
	}
	b.awaitState("crm", delivered, 1)
	d := b.list("acme", "crm")[0]
	if d.Attempts != int64(len(attempts)) {
		t.Errorf("%d attempts", d.Attempts)
	}
	var signatures, times []string
	for i, got := range all {
		if !bytes.Equal(got.body, all[0].body) || int64(len(got.body)) != d.BodyBytes {
			t.Errorf("attempt %d has another body:\n%s\n%s", i+1, got.body, all[0].body)
		}
		for _, name := range []string{standardwebhooks.HeaderWebhookID, "Idempotency-Key"} {
			if id := got.header.Get(name); id != d.Key {
				t.Errorf("attempt %d: %s is %s", i+1, name, id)
			}
		}
		signatures = append(signatures, got.header.Get(standardwebhooks.HeaderWebhookSignature))
		times = append(times, got.header.Get(standardwebhooks.HeaderWebhookTimestamp))
	}
	for _, fresh := range [][]string{signatures, times} {
		slices.Sort(fresh)
		if n := len(slices.Compact(fresh)); n != len(attempts) {
			t.Errorf("%d different ones in %v", n, fresh)
		}
	}
}
