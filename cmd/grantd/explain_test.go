package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	winnerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	replayTrace = "0af7651916cd43dd8448eb211c80319c"
	theKey      = "billing:grant:INV-1:team_access"
	aliasKey    = "billing:again:INV-1:team_access"
	reverseKey  = "billing:reverse:INV-1:team_access"
	// hostile tries to colour a terminal, to turn its writing round and to pass for other details.
	hostile = "evt\x1b[31m \u202e, key forged\u009b2J"
)

// explained is a server with one webhook, which answers whatever the test sets.
type explained struct {
	entitlementv1.EntitlementServiceClient
	addr   string
	status atomic.Int32
}

func setupExplained(t *testing.T) *explained {
	t.Helper()
	e := &explained{}
	e.status.Store(http.StatusNoContent)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(e.status.Load())) }))
	t.Cleanup(receiver.Close)
	dir := t.TempDir()
	secret, file := filepath.Join(dir, "secret"), filepath.Join(dir, "destinations.yaml")
	for name, content := range map[string]string{
		secret: "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 32)),
		file:   "destinations:" + fmt.Sprintf(devWebhookText, "crm", receiver.URL, secret),
	} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.addr, _ = startServe(t, "--destinations", file)
	conn, err := grpc.NewClient(e.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultServiceConfig(client.ServiceConfig()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	e.EntitlementServiceClient = entitlementv1.NewEntitlementServiceClient(conn)
	return e
}

// grant sends one for ten seats, with changes, and checks what it is told.
func (e *explained) grant(t *testing.T, trace, key, event string, want entitlementv1.Outcome, changes ...func(*entitlementv1.GrantEntitlementRequest)) {
	t.Helper()
	request := &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: key,
		Grant: &entitlementv1.Grant{
			TenantId: "acme", InvoiceId: "INV-1", EntitlementType: "team_access", Scope: map[string]string{"seats": "10"},
		},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
		EventId: event, Source: "stripe",
	}
	for _, change := range changes {
		change(request)
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-00f067aa0ba902b7-01")
	answer, err := e.GrantEntitlement(ctx, request)
	if err != nil || answer.GetOutcome() != want {
		t.Fatalf("%s is told %v (%v), want %v", key, answer, err, want)
	}
}

// settle waits until the last delivery of the operation is in a state.
func (e *explained) settle(t *testing.T, key string, deliveries int, want entitlementv1.DeliveryState) *entitlementv1.Delivery {
	t.Helper()
	request := &entitlementv1.GetOperationRequest{
		TenantId: "acme", Name: &entitlementv1.GetOperationRequest_IdempotencyKey{IdempotencyKey: key},
		View: entitlementv1.OperationView_OPERATION_VIEW_FULL,
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		found, err := e.GetOperation(ctx, request)
		if err != nil {
			t.Fatal(err)
		}
		if all := found.GetDeliveries(); len(all) == deliveries && all[len(all)-1].GetDelivery().GetState() == want {
			return all[len(all)-1].GetDelivery()
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func unpaid(r *entitlementv1.GrantEntitlementRequest) {
	r.Invoice.State = entitlementv1.InvoiceState_INVOICE_STATE_OPEN
}

func moreSeats(r *entitlementv1.GrantEntitlementRequest) {
	r.Grant.Scope = map[string]string{"seats": "500"}
}

// live has an entitlement live through everything: refused, granted, its delivery dead, replayed, asked for under another key, in conflict,
// redelivered, reversed.
func (e *explained) live(t *testing.T) {
	t.Helper()
	const (
		newly    = entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED
		already  = entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED
		conflict = entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD
		rejected = entitlementv1.Outcome_OUTCOME_REJECTED
	)
	e.status.Store(http.StatusUnprocessableEntity)
	e.grant(t, replayTrace, theKey, "evt_0", rejected, unpaid)
	e.grant(t, winnerTrace, theKey, "evt_1", newly)
	dead := e.settle(t, theKey, 1, entitlementv1.DeliveryState_DELIVERY_STATE_DEAD)
	e.grant(t, replayTrace, theKey, hostile, already)
	e.grant(t, replayTrace, aliasKey, "evt_2", already)
	e.grant(t, replayTrace, theKey, "evt_1", conflict, moreSeats)
	e.grant(t, replayTrace, "billing:other:INV-1", "evt_1", conflict, moreSeats)
	e.status.Store(http.StatusNoContent)
	var out bytes.Buffer
	args := []string{"deliveries", "redeliver", dead.GetDeliveryId(), "--addr", e.addr, "--tenant", "acme", "--actor", "ana", "--reason", "CRM is repaired"}
	if err := run(t.Context(), args, nil, &out, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	e.settle(t, theKey, 1, entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED)
	answer, err := e.ReverseEntitlement(t.Context(), &entitlementv1.ReverseEntitlementRequest{
		IdempotencyKey: reverseKey, TenantId: "acme", Actor: "ana", Reason: "chargeback", EventId: "evt_3",
		Target: &entitlementv1.ReverseEntitlementRequest_BusinessKey{BusinessKey: &entitlementv1.BusinessKey{
			InvoiceId: "INV-1", EntitlementType: "team_access",
		}},
	})
	if err != nil || answer.GetOutcome() != newly {
		t.Fatalf("the reversal is told %v (%v)", answer, err)
	}
	e.settle(t, theKey, 2, entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED)
}

// explain runs `grantd explain` for tenant acme.
func (e *explained) explain(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	err := run(t.Context(), append([]string{"explain", "--addr", e.addr, "--tenant", "acme"}, args...), nil, &stdout, &stderr)
	wantPlain(t, stdout.String())
	return stdout.String(), err
}

// acmeNext is for tests without a server.
var acmeNext = &followUps{target: &target{Addr: defaultAddr}, tenant: "acme"}

var printedCommand = regexp.MustCompile(`(?m)^ *grantd (?:.*\\\n)*.*`)

// wantPlain checks that a terminal has nothing to obey.
func wantPlain(t *testing.T, out string) {
	t.Helper()
	if i := strings.IndexFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("the output has %q", out[i:min(len(out), i+20)])
	}
}

var happeningLine = regexp.MustCompile(`(?m)^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}Z) .{8}  (.*)$`)

// happened lists what a text says, without the times, and checks that these do not go back.
func happened(t *testing.T, out string) (all []string) {
	t.Helper()
	before := ""
	for _, m := range happeningLine.FindAllStringSubmatch(out, -1) {
		if m[1] < before {
			t.Errorf("%s comes after %s", m[1], before)
		}
		before = m[1]
		all = append(all, m[2])
	}
	return all
}

// flat joins the lines of a text.
func flat(out string) string { return strings.Join(strings.Fields(out), " ") }

func wantAll(t *testing.T, out string, all ...string) {
	t.Helper()
	for _, want := range all {
		if !strings.Contains(flat(out), want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
}

var wholeStory = []string{
	"attempt: REJECTED", "attempt: NEWLY_APPLIED", "entry 1: GRANTED", "delivery to crm", "delivery attempt 1: DEAD 422",
	"attempt: ALREADY_APPLIED", "attempt: ALREADY_APPLIED", "alias: bound", "attempt: CONFLICTING_PAYLOAD",
	"operator: REDELIVER", "delivery attempt 2: DELIVERED 204", "entry 2: REVERSED", "delivery to crm", "delivery attempt 1: DELIVERED 204",
}

func TestExplain_TellsTheWholeStory(t *testing.T) {
	t.Parallel()
	e := setupExplained(t)
	e.live(t)

	t.Run("by key", func(t *testing.T) {
		out, err := e.explain(t, "--key", theKey)
		if err != nil {
			t.Fatal(err)
		}
		if got := happened(t, out); !slices.Equal(got, wholeStory) {
			t.Errorf("the story is %q, want %q", got, wholeStory)
		}
		wantAll(t, out, "Operation "+theKey+" of tenant acme", "now REVERSED at entry 2", "trace "+winnerTrace, "trace "+replayTrace,
			"winner's trace "+winnerTrace, "GRANT, INVOICE_NOT_PAID", "event evt_0, source stripe", "differs in scope.seats", "scope.seats=10",
			"key "+aliasKey, `DEAD to PENDING after 1 attempt, actor ana, reason "CRM is repaired"`, "actor ana, reason chargeback",
			"no replay gives it back", `event "evt\x1b[31m \u202e, key forged\u009b2J"`)
	})
	t.Run("by alias", func(t *testing.T) {
		out, err := e.explain(t, "--key", aliasKey)
		if err != nil {
			t.Fatal(err)
		}
		if got := happened(t, out); !slices.Equal(got, wholeStory) {
			t.Errorf("the story is %q, want %q", got, wholeStory)
		}
		wantAll(t, out, "Operation "+theKey+" of", aliasKey+" is an alias of it")
	})
	t.Run("by effect", func(t *testing.T) {
		out, err := e.explain(t, "--invoice", "INV-1", "--type", "team_access")
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Insert(slices.Clone(wholeStory), 9, "attempt: CONFLICTING_PAYLOAD")
		if got := happened(t, out); !slices.Equal(got, want) {
			t.Errorf("the story is %q, want %q", got, want)
		}
		wantAll(t, out, "key billing:other:INV-1", "Another grant of this effect is told CONFLICTING_PAYLOAD.")
		if _, err := e.explain(t, "--invoice", "INV-1", "--type", "team_access", "--operation-version", "1"); err == nil {
			t.Error("another operation version has the same story")
		}
	})
	t.Run("by event", func(t *testing.T) {
		out, err := e.explain(t, "--event", "evt_1")
		if err != nil {
			t.Fatal(err)
		}
		wantAll(t, out, "stories told: 2", "Operation "+theKey+" of", "Key billing:other:INV-1 of tenant acme: nothing was applied under it",
			"grantd explain --tenant=acme --invoice=INV-1 --addr="+e.addr)
		if out, err = e.explain(t, "--event", "evt_1", "--limit", "1"); err != nil {
			t.Fatal(err)
		}
		wantAll(t, out, "stories told: 1", "There are more: raise --limit.")
		if out, err = e.explain(t, "--event", hostile); err != nil {
			t.Fatal(err)
		}
		wantAll(t, out, "Operation "+theKey+" of")
	})
	t.Run("a reversal", func(t *testing.T) {
		out, err := e.explain(t, "--key", reverseKey)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			"entry 1: GRANTED", "delivery to crm", "delivery attempt 1: DEAD 422", "operator: REDELIVER", "delivery attempt 2: DELIVERED 204",
			"attempt: NEWLY_APPLIED", "entry 2: REVERSED", "delivery to crm", "delivery attempt 1: DELIVERED 204",
		}
		if got := happened(t, out); !slices.Equal(got, want) {
			t.Errorf("the story is %q, want %q", got, want)
		}
		wantAll(t, out, "Operation "+reverseKey+" of", "REVERSE of team_access, operation version 0, invoice INV-1", "event evt_3")
	})
	t.Run("JSON", func(t *testing.T) { e.wantSameFacts(t) })
}

// wantSameFacts compares the JSON form with the text.
func (e *explained) wantSameFacts(t *testing.T) {
	var told struct {
		Stories []struct {
			IdempotencyKey, Replay string
			Found                  json.RawMessage
		}
		More bool
	}
	out, err := e.explain(t, "--key", theKey, "--json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := e.explain(t, "--key", theKey)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &told); err != nil || len(told.Stories) != 1 || told.More {
		t.Fatalf("%v: %s", err, out)
	}
	var found entitlementv1.GetOperationResponse
	if err := protojson.Unmarshal(told.Stories[0].Found, &found); err != nil {
		t.Fatal(err)
	}
	facts := []string{told.Stories[0].Replay, found.GetOperation().GetEntitlementId()}
	for _, a := range found.GetAttempts() {
		facts = append(facts, stored(a.GetAt()), a.GetIdempotencyKey(), a.GetTraceId(), a.GetSpanId())
	}
	for _, n := range found.GetEntries() {
		facts = append(facts, stored(n.GetAt()), n.GetIdempotencyKey())
	}
	happenings := len(found.GetAttempts()) + len(found.GetEntries()) + len(found.GetAliases())
	for _, d := range found.GetDeliveries() {
		facts = append(facts, stored(d.GetDelivery().GetCreatedAt()), d.GetDelivery().GetDeliveryKey())
		for _, a := range d.GetAttempts() {
			facts = append(facts, stored(a.GetStartedAt()))
		}
		happenings += 1 + len(d.GetAttempts()) + len(d.GetActions())
	}
	wantAll(t, text, facts...)
	if n := len(happened(t, text)); n != happenings || n != len(wholeStory) {
		t.Errorf("the text tells of %d, the JSON of %d", n, happenings)
	}
	if event := found.GetAttempts()[2].GetEventId(); event != hostile {
		t.Errorf("the JSON has event %q, want %q", event, hostile)
	}
}

func TestExplain_WhatWasNeverApplied(t *testing.T) {
	t.Parallel()
	e := setupExplained(t)
	e.grant(t, winnerTrace, theKey, "evt_0", entitlementv1.Outcome_OUTCOME_REJECTED, unpaid)
	for _, args := range [][]string{{"--key", theKey}, {"--event", "evt_0"}, {"--invoice", "INV-1", "--type", "team_access"}} {
		out, err := e.explain(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		if got := happened(t, out); !slices.Equal(got, []string{"attempt: REJECTED"}) {
			t.Errorf("%v: the story is %q", args, got)
		}
		wantAll(t, out, "INVOICE_NOT_PAID, invoice INV-1, type team_access", "Nothing is committed as of this read", "It is refused until")
	}
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"key":     {[]string{"--key", "none"}, "nothing is known of key none of tenant acme"},
		"event":   {[]string{"--event", "\x1b[31m"}, `nothing is known of event "\x1b[31m" of tenant acme`},
		"effect":  {[]string{"--invoice", "INV-2", "--type", "sso"}, "nothing is known of invoice INV-2, type sso, operation version 0"},
		"no name": {nil, "says what to explain"},
		"invoice": {[]string{"--invoice", "INV-2"}, "nothing is known of invoice INV-2 of tenant acme"},
		"type":    {[]string{"--type", "sso", "--key", "k"}, "--type goes with --invoice"},
		"both":    {[]string{"--key", "k", "--event", "e"}, "can't be used together"},
		"version": {[]string{"--key", "k", "--operation-version", "1"}, "--operation-version goes with"},
		"limit":   {[]string{"--event", "e", "--limit", "0"}, "--limit must be positive"},
		"invalid": {[]string{"--key", "a b"}, "idempotency_key"},
	} {
		out, err := e.explain(t, test.args...)
		if err == nil || !strings.Contains(err.Error(), test.want) || out != "" {
			t.Errorf("%s: %q, error %v, want %q", name, out, err, test.want)
		}
	}
	out, err := e.explain(t, "--key", "none", "--json")
	if err == nil || !strings.Contains(out, `"OUTCOME_NOT_APPLIED"`) || !json.Valid([]byte(out)) {
		t.Errorf("an unknown key as JSON: %v\n%s", err, out)
	}
}

// A refund that came before its payment is under another key than the grant that it refuses, and was told of by another event: from the
// refused key one is led to the invoice, and there to the refund.
func TestExplain_RefundBeforePayment(t *testing.T) {
	t.Parallel()
	e := setupExplained(t)
	refund := &entitlementv1.RecordInvoiceStateRequest{
		IdempotencyKey: "billing:invoice:INV-1:2", TenantId: "acme", InvoiceId: "INV-1", EventId: "evt_2",
		State: entitlementv1.InvoiceState_INVOICE_STATE_REFUNDED, Version: 2,
	}
	if answer, err := e.RecordInvoiceState(t.Context(), refund); err != nil || answer.GetOutcome() != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
		t.Fatalf("the refund is told %v (%v)", answer, err)
	}
	e.grant(t, replayTrace, theKey, "evt_1", entitlementv1.Outcome_OUTCOME_REJECTED)
	out, err := e.explain(t, "--event", "evt_1")
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, out, "GRANT, INVOICE_REVERSED, invoice INV-1", "says PAID; the invoice's story tells what reversed it.")
	out, err = runPrinted(t, out, "explain", "")
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, out, "Invoice INV-1 of tenant acme, stories told: 2", "Key "+theKey+" of tenant acme: nothing was applied under it",
		"Operation billing:invoice:INV-1:2 of tenant acme RECORD_INVOICE_STATE, invoice INV-1 REFUNDED at version 2", "event evt_2")
}

func onInvoice(id string) func(*entitlementv1.GrantEntitlementRequest) {
	return func(r *entitlementv1.GrantEntitlementRequest) { r.Grant.InvoiceId = id }
}

// Nothing is so long that it does not fit, and nothing that is told gets lost in between. The winner's attempt was removed after its retention.
func TestExplain_LinesFitTheTerminal(t *testing.T) {
	at := timestamppb.New(time.Unix(1767323045, 123456000))
	delivery := stuckDelivery()
	s := story{key: strings.Repeat("a", 200), found: &entitlementv1.GetOperationResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED, Truncated: true,
		Operation: &entitlementv1.Operation{
			TenantId: "acme", IdempotencyKey: strings.Repeat("k", 200), Kind: entitlementv1.OperationKind_OPERATION_KIND_GRANT,
			InvoiceId: strings.Repeat("I", 128), EntitlementId: theEntitlement, AppliedAt: at, AttemptId: "gone", Caller: strings.Repeat("c", 200),
		},
		Attempts: []*entitlementv1.Attempt{{
			At: at, Outcome: entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD, PreviousTries: 2, EventId: strings.Repeat("\u202e", 66),
			DifferingFields: slices.Repeat([]string{"scope." + strings.Repeat("s", 63)}, 64),
		}},
		Deliveries: []*entitlementv1.DeliveryStory{{Delivery: delivery, Attempts: []*entitlementv1.DeliveryAttempt{{
			AttemptNumber: 3, StartedAt: at, Error: strings.Repeat("x", 1024),
		}}}},
		Notifications: []*entitlementv1.Notification{{
			EntitlementId: theEntitlement, EntryNumber: 1, Template: "granted", RequestedAt: at, SentAt: timestamppb.New(at.AsTime().Add(90 * time.Second)),
			Notify: &entitlementv1.Notify{Recipient: "a@example.com", Locale: "en"}, Destination: "mail",
		}},
	}}
	var out bytes.Buffer
	if err := writeStories(&out, &explainCmd{Tenant: "acme"}, acmeNext, []story{s}, false); err != nil {
		t.Fatal(err)
	}
	wantPlain(t, out.String())
	for line := range strings.Lines(out.String()) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > storyColumns {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
	wantAll(t, out.String(), "2026-01-02 03:04:05.123456Z", "operation: applied", "its attempt is not shown", "no result is recorded",
		"grantd deliveries redeliver "+theDelivery, "notification: wanted", "+90 s notification: sent", "to a@example.com, in en", "Only the latest of it", "try 3 of one call")
	if n := strings.Count(out.String(), "x"); n < 1024 {
		t.Errorf("%d of the error's 1024 characters are shown", n)
	}
}

// A destination was down for a weekend, and the one line that mattered stood behind two hundred that said the same.
func TestExplain_FoldsEqualRetries(t *testing.T) {
	const (
		retry   = entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_RETRY
		unknown = entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_UNKNOWN
	)
	start := time.Unix(1767323045, 0)
	at := func(minute int) *timestamppb.Timestamp {
		return timestamppb.New(start.Add(time.Duration(minute) * time.Minute))
	}
	delivery := &entitlementv1.DeliveryStory{
		Delivery: &entitlementv1.Delivery{
			DeliveryId: theDelivery, Destination: "crm", EntitlementId: theEntitlement, EntryNumber: 1, CreatedAt: at(0),
			State: entitlementv1.DeliveryState_DELIVERY_STATE_UNKNOWN,
		},
		Actions: []*entitlementv1.OperatorAction{{
			At: timestamppb.New(start.Add(74*time.Minute + time.Second)), Kind: entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_REDELIVER, Attempts: 74,
		}},
	}
	attempt := func(outcome entitlementv1.DeliveryAttemptOutcome, code int32) {
		n := len(delivery.Attempts) + 1
		delivery.Attempts = append(delivery.Attempts, &entitlementv1.DeliveryAttempt{
			AttemptNumber: int64(n), StartedAt: at(n), EndedAt: at(n), Outcome: outcome, StatusCode: code, Error: fmt.Sprintf("failure-%d", n),
		})
	}
	for range 74 {
		attempt(retry, 503)
	}
	attempt(retry, 503)
	attempt(retry, 503)
	attempt(retry, 429)
	attempt(unknown, 0)
	attempt(unknown, 0)
	s := story{key: theKey, found: &entitlementv1.GetOperationResponse{
		Operation:  &entitlementv1.Operation{IdempotencyKey: theKey, EntitlementId: theEntitlement, AppliedAt: at(0)},
		Deliveries: []*entitlementv1.DeliveryStory{delivery},
	}}
	var out bytes.Buffer
	if err := writeStories(&out, &explainCmd{Tenant: "acme"}, acmeNext, []story{s}, false); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"operation: applied", "delivery to crm", "delivery attempts 1 to 74: RETRY 503", "operator: REDELIVER", "delivery attempts 75 to 76: RETRY 503",
		"delivery attempt 77: RETRY 429", "delivery attempt 78: UNKNOWN", "delivery attempt 79: UNKNOWN",
	}
	if got := happened(t, out.String()); !slices.Equal(got, want) {
		t.Errorf("the story is %q, want %q", got, want)
	}
	wantAll(t, out.String(), "the last at "+stored(at(74))+", took 0 µs, its error failure-74", "error failure-77",
		"after 74 attempts", "grantd deliveries resolve "+theDelivery)
	if _, err := runPrinted(t, out.String(), "deliveries resolve", "FINDING"); err == nil || !strings.Contains(err.Error(), "--as must be one of") {
		t.Errorf("with nothing found out: %v", err)
	}
	if strings.Contains(out.String(), "failure-73") {
		t.Errorf("an error that was not the last is shown:\n%s", out.String())
	}
	out.Reset()
	if err := writeStoriesJSON(&out, []story{s}, false); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "failure-"); n != 79 {
		t.Errorf("the JSON has %d of 79 attempts", n)
	}
}

// The count is the caller's header. The largest one was told as a negative try.
func TestExplain_LargestCountOfTries(t *testing.T) {
	if got, want := tries(math.MaxInt32), "try 2147483648 of one call"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
