package outbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
)

const (
	pending   = entitlementv1.DeliveryState_DELIVERY_STATE_PENDING
	sending   = entitlementv1.DeliveryState_DELIVERY_STATE_SENDING
	unknown   = entitlementv1.DeliveryState_DELIVERY_STATE_UNKNOWN
	delivered = entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED
	dead      = entitlementv1.DeliveryState_DELIVERY_STATE_DEAD
)

// bundle is a database with the destinations of one file, and a session beside those of the stores.
type bundle struct {
	t            *testing.T
	url          string
	sql          *pgx.Conn
	secret       string
	text         string
	destinations []outbox.Destination
	// store is where the tests grant, and read what became of deliveries.
	store *store.Store
}

func setup(t *testing.T, text string) *bundle {
	t.Helper()
	all, err := outbox.ParseDestinations("destinations.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	b := &bundle{t: t, url: pgtest.New(t), secret: newSecret(), text: text, destinations: all}
	cfg, err := pgx.ParseConfig(b.url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["search_path"] = "grantd"
	if b.sql, err = pgx.ConnectConfig(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.sql.Close(context.Background()) })
	b.store = b.openStore()
	return b
}

func (b *bundle) log() *slog.Logger { return slog.New(slog.NewTextHandler(b.t.Output(), nil)) }

func (b *bundle) openStore() *store.Store {
	b.t.Helper()
	s, err := store.Open(context.Background(), store.Config{DatabaseURL: b.url, Destinations: outbox.Stored(b.destinations), Log: b.log()})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(s.Close)
	return s
}

// replica is one process's outbox, that runs until it is stopped or the test ends.
type replica struct {
	*outbox.Outbox
	// stop returns when the outbox has.
	stop func()
}

// start runs a replica on a store of its own, or on that of the bundle, where changes say so.
func (b *bundle) start(changes ...func(*outbox.Config)) *replica {
	b.t.Helper()
	cfg := outbox.Config{
		Store: b.store, Destinations: b.destinations, Log: b.log(), Grace: 5 * time.Second,
		Getenv: func(string) string { return b.secret },
	}
	for _, change := range changes {
		change(&cfg)
	}
	o, err := outbox.New(cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); o.Run(ctx) }()
	r := &replica{Outbox: o, stop: func() { cancel(); <-done }}
	b.t.Cleanup(r.stop)
	return r
}

// another gives a replica a store of its own.
func (b *bundle) another(cfg *outbox.Config) { cfg.Store = b.openStore() }

// apply has a command take effect.
func (b *bundle) apply(c store.Command) {
	b.t.Helper()
	a, err := b.store.Apply(b.t.Context(), &c)
	if err != nil || a.Outcome != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		b.t.Fatalf("%s: %v, %v", c.IdempotencyKey, a.Outcome, err)
	}
}

func (b *bundle) grant(tenant, invoice, entitlementType string) {
	b.t.Helper()
	b.apply(grant(tenant, invoice, entitlementType))
}

func (b *bundle) refund(tenant, invoice string) { b.t.Helper(); b.apply(refund(tenant, invoice)) }

func grant(tenant, invoice, entitlementType string) store.Command {
	return store.Command{
		Kind: entitlementv1.OperationKind_OPERATION_KIND_GRANT, TenantID: tenant, IdempotencyKey: "grant:" + invoice + ":" + entitlementType,
		Grant:   store.Grant{TenantID: tenant, InvoiceID: invoice, EntitlementType: entitlementType, Scope: map[string]string{"seats": "10"}},
		Invoice: store.InvoiceVersion{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
	}
}

func refund(tenant, invoice string) store.Command {
	return store.Command{
		Kind: entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE, TenantID: tenant, IdempotencyKey: "refund:" + invoice,
		InvoiceID: invoice, Invoice: store.InvoiceVersion{State: entitlementv1.InvoiceState_INVOICE_STATE_REFUNDED, Version: 2},
	}
}

// applyAll is for many commands, which all take effect.
func (b *bundle) applyAll(commands []store.Command) {
	b.t.Helper()
	results, err := b.store.ApplyAll(b.t.Context(), commands, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	for i := range results {
		if results[i].Err != nil || results[i].Answer.Outcome != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
			b.t.Fatalf("%s: %v, %v", commands[i].IdempotencyKey, results[i].Answer.Outcome, results[i].Err)
		}
	}
}

// patience is how long a test waits for what must come.
const patience = 60 * time.Second

// await waits until the query selects true.
func (b *bundle) await(what, query string, args ...any) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if b.is(query, args...) {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("still not: %s\n%s", what, b.states())
		}
	}
}

func (b *bundle) is(query string, args ...any) bool {
	b.t.Helper()
	var yes bool
	if err := b.sql.QueryRow(b.t.Context(), query, args...).Scan(&yes); err != nil {
		b.t.Fatalf("%s: %v", query, err)
	}
	return yes
}

func (b *bundle) exec(statement string, args ...any) {
	b.t.Helper()
	if _, err := b.sql.Exec(b.t.Context(), statement, args...); err != nil {
		b.t.Fatalf("%s: %v", statement, err)
	}
}

// awaitStop stops the replica, which must end.
func (r *replica) awaitStop(t *testing.T) {
	t.Helper()
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	waitFor(t, func() (string, bool) {
		select {
		case <-stopped:
			return "", true
		default:
			return "the outbox goes on", false
		}
	})
}

// awaitState waits until this many deliveries to the destination are in the state.
func (b *bundle) awaitState(destination string, state entitlementv1.DeliveryState, count int) {
	b.t.Helper()
	b.await(fmt.Sprintf("%d of %s are %v", count, destination, state),
		`SELECT count(*) = $3 FROM all_deliveries WHERE destination = $1 AND state = $2`, destination, int16(state), count)
}

// states is what a failed test shows.
func (b *bundle) states() (text string) {
	rows, err := b.sql.Query(b.t.Context(),
		`SELECT destination || ' ' || state || ' ' || count(*) || ' attempts ' || sum(attempts) || ' poison ' || sum(poison) || ' ' || coalesce(max(last_error), '')
		   FROM all_deliveries GROUP BY destination, state ORDER BY 1`)
	if err != nil {
		return err.Error()
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	for _, line := range lines {
		text += line + "\n"
	}
	return text
}

// list returns a tenant's deliveries to a destination, in the order of their making.
func (b *bundle) list(tenant, destination string) []*store.Delivery {
	b.t.Helper()
	all, _, err := b.store.Deliveries(b.t.Context(), store.DeliveryFilter{TenantID: tenant, Destination: destination}, store.Page{Size: 1000})
	if err != nil {
		b.t.Fatal(err)
	}
	return all
}

// hook is the text of one webhook destination. options are its own lines, section those of its webhook.
func hook(name, url, ca, options, section string) string {
	return fmt.Sprintf(`
- name: %s
  kind: webhook
  %s
  webhook:
    url: %s/events
    tls: {ca_file: %s}
    secrets: [{env: SECRET}]
    %s
`, name, options, url, ca, section)
}

// fast are options of a destination that deduplicates, and of which much goes wrong.
const fast = `deduplicates: true
  deadline: 2s
  retry: {limit: 5, min_delay: 10ms, max_delay: 50ms}`

// listenOn listens on an address where something listened before.
func listenOn(t *testing.T, addr string) net.Listener {
	t.Helper()
	lis, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return lis
}

// waitFor tries until it is done, and fails with the last state after half a minute.
func waitFor(t *testing.T, try func() (state string, done bool)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		state, done := try()
		if done {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("still: %s", state)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
