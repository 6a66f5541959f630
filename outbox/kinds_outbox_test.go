package outbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// mailHook is the text of one destination of kind smtp.
func mailHook(name, addr string) string {
	return fmt.Sprintf(`
- name: %s
  kind: smtp
  deadline: 5s
  retry: {limit: 5, min_delay: 10ms, max_delay: 50ms}
  smtp: {addr: %q, tls: none, from: billing@shop.example}
`, name, addr)
}

func grantAndTell(invoice, recipient string) store.Command {
	c := grant("acme", invoice, "team_access")
	c.Notify = &store.Notify{Recipient: recipient, Locale: "en"}
	return c
}

// The server takes the mail, and its answer is lost. grantd cannot know. Neither time, nor another replica, nor other mails make it send
// again; an operator decides, and then the same bytes go out.
func TestOutbox_MailOfUnknownFateIsNotRepeated(t *testing.T) {
	var once sync.Map
	m := &mailServer{onData: func(s *mailSession) error {
		if _, again := once.LoadOrStore(s.mail.to, true); again || s.mail.to == "other@example.com" {
			return nil
		}
		s.accept()
		s.conn.Conn().Close()
		return errors.New("nobody hears this")
	}}
	serveMail(t, m, nil, false)
	b := setup(t, "destinations:"+mailHook("customer", m.addr))
	b.start()
	b.start(b.another)
	b.apply(grantAndTell("INV-1", "ann@example.com"))
	b.apply(grantAndTell("INV-2", "bob@example.com"))
	b.awaitState("customer", unknown, 2)
	for i := range 5 {
		b.apply(grantAndTell(fmt.Sprint("INV-other-", i), "other@example.com"))
		b.awaitState("customer", delivered, i+1)
	}
	b.awaitState("customer", unknown, 2)
	taken := func(to string) (contents [][]byte) {
		for _, mail := range m.received() {
			if mail.to == to {
				contents = append(contents, mail.content)
			}
		}
		return contents
	}
	resolve := func(to string, resolution entitlementv1.DeliveryResolution) {
		t.Helper()
		for _, d := range b.list("acme", "customer") {
			if d.Notify.Recipient != to {
				continue
			}
			answer, err := b.store.Resolve(t.Context(), store.DeliveryOrder{
				TenantID: "acme", Delivery: store.DeliveryName{ID: d.ID}, Actor: "jo", Reason: "looked into the server's log",
			}, resolution)
			if err != nil || answer.Outcome != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
				t.Fatalf("%v, %v", answer, err)
			}
		}
	}
	resolve("ann@example.com", entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED)
	resolve("bob@example.com", entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN)
	b.awaitState("customer", delivered, 7)
	if n := len(taken("ann@example.com")); n != 1 {
		t.Errorf("ann got %d mails", n)
	}
	if got := taken("bob@example.com"); len(got) != 2 || !bytes.Equal(got[0], got[1]) {
		t.Errorf("bob got %d mails, and not the same twice: %s", len(got), got)
	}
}

// A worker records its attempt and is killed, before its call or in it: whoever comes next cannot tell.
func TestOutbox_MailOfDeadWorkerIsUnknown(t *testing.T) {
	m := &mailServer{}
	serveMail(t, m, nil, false)
	b := setup(t, "destinations:"+mailHook("customer", m.addr))
	b.apply(grantAndTell("INV-1", "ann@example.com"))
	claimed, err := b.store.Claim(t.Context(), "customer", "killed", time.Millisecond, 1, func(*store.Delivery) ([]byte, string, error) {
		return []byte("body"), "message/rfc822", nil
	})
	if err != nil || len(claimed) != 1 {
		t.Fatalf("%d claimed, %v", len(claimed), err)
	}
	b.start()
	b.awaitState("customer", unknown, 1)
	if n := len(m.received()); n != 0 {
		t.Errorf("%d mails were sent", n)
	}
}

// One mail per recipient, template and event: the request comes again, under another key and with another recipient; two replicas and
// a second destination are at hand. Without anybody to notify there is no mail.
func TestOutbox_OneMail(t *testing.T) {
	m := &mailServer{}
	serveMail(t, m, nil, false)
	b := setup(t, "destinations:"+mailHook("customer", m.addr)+mailHook("also_customer", m.addr))
	b.start()
	b.start(b.another)
	const invoices = 20
	for i := range invoices {
		c := grantAndTell(fmt.Sprint("INV-", i), "ann@example.com")
		b.apply(c)
		c.Notify = &store.Notify{Recipient: "eve@example.com", Locale: "en"}
		for _, key := range []string{c.IdempotencyKey, "again:" + c.IdempotencyKey} {
			c.IdempotencyKey = key
			if a, err := b.store.Apply(t.Context(), &c); err != nil || a.Outcome != entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED {
				t.Fatalf("%v, %v", a, err)
			}
		}
	}
	b.grant("acme", "INV-quiet", "team_access")
	b.await("nothing is under way", `SELECT count(*) = 0 FROM all_deliveries WHERE settled_at IS NULL`)
	ids := make(map[string]bool)
	for _, mail := range m.received() {
		if mail.to != "ann@example.com" {
			t.Errorf("%s got a mail", mail.to)
		}
		_, after, _ := bytes.Cut(mail.content, []byte("\r\nMessage-ID: <"))
		id, _, _ := bytes.Cut(after, []byte("@shop.example>\r\n"))
		ids[string(id)] = true
	}
	if len(m.received()) != invoices || len(ids) != invoices {
		t.Errorf("%d mails with %d ids, want %d", len(m.received()), len(ids), invoices)
	}
}

// The broker is stopped and started while two replicas publish: as many messages as entries, each with a key of its own, none missing,
// in order for each entitlement; and the outage counts against no event.
func TestOutbox_BrokerStopsMeanwhile(t *testing.T) {
	broker := newBroker(t, nil)
	broker.stream(t, broker.jetStream(t), nil)
	b := setup(t, fmt.Sprintf(`
destinations:
- name: products
  kind: nats
  timeout: 2s
  retry: {limit: 3, min_delay: 10ms, max_delay: 200ms}
  nats: {servers: [%q], subject: "entitlements.{event}", stream: EVENTS}
`, broker.url()))
	b.start()
	b.start(b.another)
	const invoices, rounds = 60, 3
	for round := range rounds {
		var commands []store.Command
		for i := range invoices {
			invoice := fmt.Sprintf("INV-%d-%d", round, i)
			commands = append(commands, grant("acme", invoice, "team_access"), refund("acme", invoice))
		}
		if round > 0 {
			broker.stop()
		}
		b.applyAll(commands)
		if round > 0 {
			b.await("an attempt fails", `SELECT count(*) > 0 FROM deliveries WHERE state = 1 AND attempts > 0`)
			broker.start(t)
		}
		b.awaitState("products", delivered, 2*invoices*(round+1))
	}
	stream, err := broker.jetStream(t).Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	keys := make(map[string]bool)
	var order []string
	for n := range stored(t, stream) {
		m, err := stream.GetMsg(t.Context(), n+1)
		if err != nil {
			t.Fatal(err)
		}
		keys[m.Header.Get("Nats-Msg-Id")] = true
		order = append(order, m.Header.Get("Grantd-Operation-Key"))
	}
	if entries := b.entries(); len(order) != entries || len(keys) != entries {
		t.Errorf("%d messages with %d keys for %d entries", len(order), len(keys), entries)
	}
	for round := range rounds {
		for i := range invoices {
			invoice := fmt.Sprintf("INV-%d-%d", round, i)
			granted, refunded := slices.Index(order, "grant:"+invoice+":team_access"), slices.Index(order, "refund:"+invoice)
			if granted < 0 || refunded < granted {
				t.Errorf("%s: granted at %d, refunded at %d", invoice, granted, refunded)
			}
		}
	}
	if !b.is(`SELECT sum(poison) = 0 FROM all_deliveries`) {
		t.Errorf("the outage counted:\n%s", b.states())
	}
}
