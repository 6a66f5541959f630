package outbox_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/cloudevents/sdk-go/v2/event"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
)

// A bug makes one tenant's deliveries panic, at each step of their way. It is theirs alone: the process lives, and delivers what comes after.
func TestOutbox_PanicIsOfOneDelivery(t *testing.T) {
	for step, want := range map[string]struct {
		state     entitlementv1.DeliveryState
		lastError string
	}{
		"render": {dead, "render: it ended in a panic"},
		"send":   {unknown, "it ended in a panic"},
		"ask":    {unknown, "502"},
	} {
		t.Run(step, func(t *testing.T) {
			in := newInbox(t, func(w http.ResponseWriter, _ *http.Request, e *event.Event, _ int) bool {
				if e.Extensions()["tenantid"] == "buggy" {
					w.WriteHeader(http.StatusBadGateway)
				}
				return e.Extensions()["tenantid"] == "buggy"
			})
			asked := make(chan struct{}, 8)
			lookups := newReceiver(t, func(_ http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				asked <- struct{}{}
			})
			lookup := ""
			if step == "ask" {
				lookup = "lookup_url: " + lookups.URL + "/{key}"
			}
			b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, "", lookup))
			outbox.Panicking(&b.destinations[0], step, "buggy")
			b.grant("buggy", "INV-1", "team_access")
			if step == "render" {
				// As if the entry had been one of very many.
				b.exec(`UPDATE deliveries SET body = NULL WHERE tenant_id = 'buggy'`)
			}
			b.start()
			b.awaitState("crm", want.state, 1)
			b.grant("acme", "INV-1", "team_access")
			b.awaitState("crm", delivered, 1)
			if step == "ask" {
				// It panics once more before anybody else is asked about.
				b.exec(`
WITH moved AS (DELETE FROM settled_deliveries WHERE tenant_id = 'acme' RETURNING *)
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, due_at, created_at)
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, 3, attempts, clock_timestamp(), created_at FROM moved`)
				b.exec(`UPDATE deliveries SET due_at = clock_timestamp() - interval '1 s' WHERE tenant_id = 'buggy'`)
				<-asked
				b.awaitState("crm", delivered, 1)
			}
			if d := b.list("buggy", "crm")[0]; d.State != want.state || !strings.Contains(d.LastError, want.lastError) {
				t.Errorf("%v: %s", d.State, d.LastError)
			}
		})
	}
}
