package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	theDelivery    = "019b7c1e-7f5e-8cc3-98a8-0d4d1c4a2f10"
	theEntitlement = "019b7c1e-7f5e-7cc3-98a8-0d4d1c4a2f11"
)

// stuckDelivery has the longest of everything.
func stuckDelivery() *entitlementv1.Delivery {
	return &entitlementv1.Delivery{
		TenantId: "acme", DeliveryId: theDelivery, DeliveryKey: strings.Repeat("1f0c", 16), Destination: strings.Repeat("d", 63),
		State: entitlementv1.DeliveryState_DELIVERY_STATE_DEAD, Attempts: 3, LastError: strings.Repeat("é", 512),
		EntitlementId: theEntitlement, EntryNumber: 12345, EntryKind: entitlementv1.EntryKind_ENTRY_KIND_REINSTATED,
		BusinessKey:    &entitlementv1.BusinessKey{InvoiceId: strings.Repeat("I", 128), EntitlementType: strings.Repeat("t", 128)},
		IdempotencyKey: strings.Repeat("k", 200), CreatedAt: timestamppb.New(time.Unix(1767323045, 0)),
	}
}

// operators knows one delivery, and remembers what it was asked.
type operators struct {
	entitlementv1.UnimplementedOperatorServiceServer
	asked []proto.Message
	// removed says that the delivery is there no more, terminal that people read what is printed.
	removed, terminal bool
	// none says that the tenant has no deliveries.
	none bool
	// environment has the variables beside the user's name.
	environment []string
}

func (o *operators) ListDeliveries(_ context.Context, r *entitlementv1.ListDeliveriesRequest) (*entitlementv1.ListDeliveriesResponse, error) {
	o.asked = append(o.asked, r)
	if o.none {
		return &entitlementv1.ListDeliveriesResponse{}, nil
	}
	return &entitlementv1.ListDeliveriesResponse{
		Deliveries: slices.Repeat([]*entitlementv1.Delivery{stuckDelivery()}, int(min(r.GetPageSize(), 2))), NextPageToken: "more",
		Destinations: []*entitlementv1.DestinationStatus{
			{Destination: "crm", Breaker: entitlementv1.BreakerState_BREAKER_STATE_OPEN},
			{Destination: strings.Repeat("d", 63), Breaker: entitlementv1.BreakerState_BREAKER_STATE_PAUSED, Pause: &entitlementv1.DestinationPause{
				PauseNumber: 12, PausedAt: timestamppb.New(time.Unix(1767323045, 0)),
			}},
		},
	}, nil
}

func (o *operators) GetDelivery(_ context.Context, r *entitlementv1.GetDeliveryRequest) (*entitlementv1.GetDeliveryResponse, error) {
	o.asked = append(o.asked, r)
	if o.removed {
		return nil, status.Error(codes.NotFound, "no such delivery")
	}
	return &entitlementv1.GetDeliveryResponse{Story: &entitlementv1.DeliveryStory{
		Delivery: stuckDelivery(),
		Attempts: []*entitlementv1.DeliveryAttempt{{
			AttemptNumber: 3, Worker: "host/1", StartedAt: timestamppb.New(time.Unix(1767323045, 0)), EndedAt: timestamppb.New(time.Unix(1767323047, 0)),
			Outcome: entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DEAD, StatusCode: 422, Error: strings.Repeat("x", 1024),
		}},
		Actions: []*entitlementv1.OperatorAction{{
			Kind: entitlementv1.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_SEND_AGAIN, Actor: "ana@desk", Reason: strings.Repeat("r", 500),
		}},
	}}, nil
}

func (o *operators) RedeliverDelivery(_ context.Context, r *entitlementv1.RedeliverDeliveryRequest) (*entitlementv1.RedeliverDeliveryResponse, error) {
	o.asked = append(o.asked, r)
	if o.removed {
		return &entitlementv1.RedeliverDeliveryResponse{
			Outcome: entitlementv1.Outcome_OUTCOME_REJECTED,
			Result: &entitlementv1.RedeliverDeliveryResponse_Rejection{Rejection: &entitlementv1.Rejection{
				Reason: entitlementv1.RejectionReason_REJECTION_REASON_DELIVERY_REMOVED, Message: "it was removed",
			}},
		}, nil
	}
	return &entitlementv1.RedeliverDeliveryResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, Delivery: stuckDelivery()}, nil
}

func (o *operators) DiscardDelivery(_ context.Context, r *entitlementv1.DiscardDeliveryRequest) (*entitlementv1.DiscardDeliveryResponse, error) {
	o.asked = append(o.asked, r)
	return &entitlementv1.DiscardDeliveryResponse{Outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED, Delivery: stuckDelivery()}, nil
}

func (o *operators) ResolveDelivery(_ context.Context, r *entitlementv1.ResolveDeliveryRequest) (*entitlementv1.ResolveDeliveryResponse, error) {
	o.asked = append(o.asked, r)
	return &entitlementv1.ResolveDeliveryResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, Delivery: stuckDelivery()}, nil
}

func (o *operators) ResumeDestination(_ context.Context, r *entitlementv1.ResumeDestinationRequest) (*entitlementv1.ResumeDestinationResponse, error) {
	o.asked = append(o.asked, r)
	return &entitlementv1.ResumeDestinationResponse{Outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED, Pause: &entitlementv1.DestinationPause{
		PauseNumber: 12, PausedAt: timestamppb.New(time.Unix(1767323045, 0)), ResumedAt: timestamppb.New(time.Unix(1767323047, 0)),
		Actor: strings.Repeat("a", 200), Reason: strings.Repeat("r", 500),
	}}, nil
}

// deliveries runs `grantd deliveries` with these arguments against the server, as ana.
func (o *operators) deliveries(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	entitlementv1.RegisterOperatorServiceServer(server, o)
	go server.Serve(listener)
	defer server.Stop()
	first := []string{"deliveries", args[0], "--addr", listener.Addr().String()}
	if args[0] != "resume" {
		first = append(first, "--tenant", "acme")
	}
	args = append(first, args[1:]...)
	var out, errOut bytes.Buffer
	env := append([]string{"USER=ana"}, o.environment...)
	err = runOn(t.Context(), args, stdio{stdout: &out, stderr: &errOut, terminal: o.terminal, env: env})
	return out.String(), err
}

// wantFits checks that every line fits a terminal of 100 columns.
func wantFits(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 100 {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
}

func TestDeliveries_TablesFitTheTerminal(t *testing.T) {
	o := operators{terminal: true}
	for _, args := range [][]string{{"list", "--limit", "3"}, {"show", theDelivery}, {"discard", theDelivery, "--reason", "r"}} {
		out, err := o.deliveries(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		wantFits(t, out)
		if !strings.Contains(out, theDelivery) || !strings.Contains(out, "DEAD") {
			t.Errorf("%v prints %s", args, out)
		}
	}
	out, err := o.deliveries(t, "list", "--limit", "3", "--state", "DELIVERY_STATE_DEAD", "--destination", "crm")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out, theDelivery); n != 3 || !strings.Contains(out, "There are more") || !strings.Contains(out, "OPEN") {
		t.Errorf("%d deliveries in %s", n, out)
	}
	last := o.asked[len(o.asked)-1].(*entitlementv1.ListDeliveriesRequest)
	want := &entitlementv1.ListDeliveriesRequest{
		TenantId: "acme", Destination: "crm", State: entitlementv1.DeliveryState_DELIVERY_STATE_DEAD, PageSize: 1, PageToken: "more",
	}
	if !proto.Equal(last, want) {
		t.Errorf("asked %v, want %v", last, want)
	}
}

// A printed command left out what was a default. Where a variable says otherwise, the copied command went to another server.
func TestDeliveries_CommandsOverruleTheEnvironment(t *testing.T) {
	o := operators{environment: []string{"GRANTD_ADDR=grantd:443", "GRANTD_INSECURE_PLAINTEXT=true"}}
	out, err := o.deliveries(t, "show", theDelivery, "--insecure-plaintext=false")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out, " --insecure-plaintext=false --reason=REASON\n"); n != 2 {
		t.Errorf("%d of 2 commands are the caller's own:\n%s", n, out)
	}
	want := target{Addr: "grantd:443", InsecurePlaintext: true}
	if got := environmentTarget(o.environment); got != want {
		t.Errorf("the environment names %+v, want %+v", got, want)
	}
	if got := environmentTarget([]string{"GRANTD_INSECURE_PLAINTEXT=perhaps"}); got != (target{}) {
		t.Errorf("what no flag can be gives %+v", got)
	}
}

// What reads a pipe looks for the whole error, the whole name, and each on one line.
func TestDeliveries_NothingIsCutElsewhere(t *testing.T) {
	var o operators
	d := stuckDelivery()
	for kind, want := range map[string][]string{
		"list": {d.GetDestination() + "  DEAD", "REINSTATED 12345  3      " + d.GetLastError() + "\n", "grantd deliveries resume " + d.GetDestination() + " --pause=12"},
		"show": {d.GetLastError() + "\n", "host/1; " + strings.Repeat("x", 1024) + "\n", strings.Repeat("r", 500) + "\n", "destination " + d.GetDestination() + " is paused since 2026-01-02 03:04:05.000000Z because it answered 410 Gone; resume with\ngrantd deliveries resume " + d.GetDestination() + " --pause=12",
			"grantd deliveries redeliver " + theDelivery + " --tenant=acme --observed-attempts=3"},
	} {
		args := []string{kind}
		if kind == "show" {
			args = append(args, theDelivery)
		}
		out, err := o.deliveries(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		for _, whole := range want {
			if !strings.Contains(out, whole) {
				t.Errorf("%s lacks %q:\n%s", kind, whole, out)
			}
		}
	}
}

// Whoever mistyped the tenant was shown the head of a table, and nothing to doubt the name by.
func TestDeliveries_NoneNamesTheTenant(t *testing.T) {
	o := &operators{none: true}
	if out, err := o.deliveries(t, "list"); err != nil || !strings.Contains(out, "none of tenant acme\n") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestDeliveries_StatesInAnyForm(t *testing.T) {
	for text, want := range map[string]entitlementv1.DeliveryState{
		"dead": 5, "DEAD": 5, "Dead": 5, "DELIVERY_STATE_DEAD": 5, "delivery_state_dead": 5, "pending": 1, "SENDING": 2, "Unknown": 3, "delivered": 4, "discarded": 6,
		"": 0, "DELIVERY_STATE_UNSPECIFIED": 0,
	} {
		var o operators
		if _, err := o.deliveries(t, "list", "--limit", "1", "--state", text); err != nil {
			t.Fatal(err)
		}
		if got := o.asked[0].(*entitlementv1.ListDeliveriesRequest).GetState(); got != want {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
}

// Both commands tell of one attempt: one rounded how long it took, the other did not.
func TestDeliveries_AttemptsTakeAsLongAsInExplain(t *testing.T) {
	at := time.Unix(1767323045, 0)
	told := &entitlementv1.DeliveryStory{Delivery: stuckDelivery(), Attempts: []*entitlementv1.DeliveryAttempt{{
		AttemptNumber: 1, StartedAt: timestamppb.New(at), EndedAt: timestamppb.New(at.Add(1999900 * time.Microsecond)),
	}}}
	var shown, explained bytes.Buffer
	if err := writeStory(stdio{stdout: &shown}, acmeNext, told, nil); err != nil {
		t.Fatal(err)
	}
	s := story{key: theKey, found: &entitlementv1.GetOperationResponse{
		Operation: &entitlementv1.Operation{IdempotencyKey: theKey}, Deliveries: []*entitlementv1.DeliveryStory{told},
	}}
	if err := writeStories(&explained, &explainCmd{Tenant: "acme"}, acmeNext, []story{s}, false); err != nil {
		t.Fatal(err)
	}
	wantAll(t, shown.String(), "Z 1999 ms UNSPECIFIED")
	wantAll(t, explained.String(), "took 1999 ms")
}

// The story of a refund has the delivery that is held back, but not the grant's, which holds it: both commands lead there.
func TestDeliveries_HeldLeadsToItsHolder(t *testing.T) {
	pending := func(entry, heldBy int64) *entitlementv1.DeliveryStory {
		return &entitlementv1.DeliveryStory{Delivery: &entitlementv1.Delivery{
			DeliveryId: theDelivery, Destination: "crm", State: entitlementv1.DeliveryState_DELIVERY_STATE_PENDING,
			EntitlementId: theEntitlement, EntryNumber: entry, HeldByEntryNumber: heldBy,
		}}
	}
	const way = "waits until entry 1 is settled here; see that with grantd deliveries show " + theEntitlement + "/1/crm --tenant=acme"
	var shown bytes.Buffer
	if err := writeStory(stdio{stdout: &shown}, acmeNext, pending(2, 1), nil); err != nil {
		t.Fatal(err)
	}
	wantAll(t, shown.String(), way)
	explain := func(told ...*entitlementv1.DeliveryStory) string {
		s := story{key: theKey, found: &entitlementv1.GetOperationResponse{Operation: &entitlementv1.Operation{IdempotencyKey: theKey}, Deliveries: told}}
		var out bytes.Buffer
		if err := writeStories(&out, &explainCmd{Tenant: "acme"}, acmeNext, []story{s}, false); err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(out.String(), "\\\n", "")
	}
	wantAll(t, explain(pending(2, 1)), way)
	if both := explain(pending(1, 0), pending(2, 1)); strings.Contains(both, "see that with") {
		t.Errorf("the story has entry 1 itself:\n%s", both)
	}
}

// A delivery was due, and nothing said why it did not go out.
func TestDeliveries_ShowTheBreaker(t *testing.T) {
	open := &entitlementv1.DestinationStatus{Destination: "crm", Breaker: entitlementv1.BreakerState_BREAKER_STATE_OPEN}
	for want, test := range map[string]struct {
		settled      *timestamppb.Timestamp
		destinations []*entitlementv1.DestinationStatus
	}{
		"destination crm breaker OPEN state":                               {nil, []*entitlementv1.DestinationStatus{{Destination: "billing"}, open}},
		"destination crm breaker none: this server sends it nothing state": {},
		"destination crm state":                                            {timestamppb.Now(), []*entitlementv1.DestinationStatus{open}},
	} {
		story := &entitlementv1.DeliveryStory{Delivery: &entitlementv1.Delivery{Destination: "crm", SettledAt: test.settled}}
		var out bytes.Buffer
		if err := writeStory(stdio{stdout: &out}, acmeNext, story, test.destinations); err != nil {
			t.Fatal(err)
		}
		wantAll(t, out.String(), want)
	}
}

// A destination is every tenant's, so that its pause is ended without naming one. The list has the command.
func TestDeliveries_Resume(t *testing.T) {
	o := operators{terminal: true}
	out, err := o.deliveries(t, "list")
	name := strings.Repeat("d", 63)
	if err != nil || !strings.Contains(out, "Paused since 2026-01-02 03:04:05Z because it answered 410 Gone") ||
		!strings.Contains(out, "grantd deliveries resume "+name+" \\\n  --pause=12 --addr=127.0.0.1:") {
		t.Errorf("the list: %v\n%s", err, out)
	}
	out, err = o.deliveries(t, "resume", name, "--pause", "12", "--reason", "CASE-1")
	if err != nil {
		t.Fatal(err)
	}
	wantFits(t, out)
	if !strings.Contains(out, "ALREADY_APPLIED") || !strings.Contains(out, "2026-01-02 03:04:07Z") {
		t.Errorf("it prints %s", out)
	}
	want := &entitlementv1.ResumeDestinationRequest{Destination: name, PauseNumber: 12, Actor: operatorOf([]string{"USER=ana"}), Reason: "CASE-1"}
	if got := o.asked[len(o.asked)-1]; !proto.Equal(got, want) {
		t.Errorf("asked %v, want %v", got, want)
	}
	if out, err = o.deliveries(t, "resume", name, "--reason", "r", "--json"); err != nil || !json.Valid([]byte(out)) {
		t.Errorf("%v: %s", err, out)
	}
	if _, err = o.deliveries(t, "resume", name, "--reason", "r", "--actor", ""); err == nil || !strings.Contains(err.Error(), "--actor is required") {
		t.Errorf("without an actor: %v", err)
	}
}

func TestDeliveries_JSONIsWhole(t *testing.T) {
	var o operators
	for _, args := range [][]string{{"list"}, {"show", theDelivery}, {"redeliver", theDelivery, "--reason", "r"}} {
		out, err := o.deliveries(t, append(args, "--json")...)
		if err != nil {
			t.Fatal(err)
		}
		if !json.Valid([]byte(out)) || !strings.Contains(out, strings.Repeat("é", 512)) || !strings.Contains(out, `"DELIVERY_STATE_DEAD"`) {
			t.Errorf("%v prints %s", args, out)
		}
	}
}

// An order that is repeated late, after the delivery died once more, must not send it again. So each names what was seen.
func TestDeliveries_OrdersNameWhatWasSeen(t *testing.T) {
	key, reference := strings.Repeat("0a", 32), theEntitlement+"/7/crm"
	actor := operatorOf([]string{"USER=ana"})
	for name, test := range map[string]struct {
		args []string
		want proto.Message
	}{
		"redeliver by id": {[]string{"redeliver", theDelivery, "--reason", "CASE-1"}, &entitlementv1.RedeliverDeliveryRequest{
			TenantId: "acme", Name: &entitlementv1.RedeliverDeliveryRequest_DeliveryId{DeliveryId: theDelivery},
			ObservedAttempts: 3, Actor: actor, Reason: "CASE-1",
		}},
		"redeliver, said before": {[]string{"redeliver", key, "--reason", "CASE-1", "--observed-attempts", "2"}, &entitlementv1.RedeliverDeliveryRequest{
			TenantId: "acme", Name: &entitlementv1.RedeliverDeliveryRequest_DeliveryKey{DeliveryKey: key},
			ObservedAttempts: 2, Actor: actor, Reason: "CASE-1",
		}},
		"resolve by entry": {[]string{"resolve", reference, "--as", "delivered", "--reason", "r", "--actor", "bo"}, &entitlementv1.ResolveDeliveryRequest{
			TenantId: "acme", Name: &entitlementv1.ResolveDeliveryRequest_Reference{Reference: &entitlementv1.DeliveryReference{
				EntitlementId: theEntitlement, EntryNumber: 7, Destination: "crm",
			}},
			Resolution: entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED, ObservedAttempts: 3, Actor: "bo", Reason: "r",
		}},
		"resolve, send again": {[]string{"resolve", theDelivery, "--as", "send-again", "--reason", "r"}, &entitlementv1.ResolveDeliveryRequest{
			TenantId: "acme", Name: &entitlementv1.ResolveDeliveryRequest_DeliveryId{DeliveryId: theDelivery},
			Resolution: entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN, ObservedAttempts: 3, Actor: actor, Reason: "r",
		}},
		"discard": {[]string{"discard", key, "--reason", "r"}, &entitlementv1.DiscardDeliveryRequest{
			TenantId: "acme", Name: &entitlementv1.DiscardDeliveryRequest_DeliveryKey{DeliveryKey: key}, Actor: actor, Reason: "r",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var o operators
			if _, err := o.deliveries(t, test.args...); err != nil {
				t.Fatal(err)
			}
			if got := o.asked[len(o.asked)-1]; !proto.Equal(got, test.want) {
				t.Errorf("asked %v, want %v", got, test.want)
			}
		})
	}
}

func TestDeliveries_RejectionsAndMistakesAreErrors(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"removed":      {[]string{"redeliver", theEntitlement + "/1/crm", "--reason", "r"}, "DELIVERY_REMOVED: it was removed"},
		"not found":    {[]string{"show", theDelivery}, "no such delivery"},
		"not found, 2": {[]string{"redeliver", theDelivery, "--reason", "r"}, "no such delivery"},
		"no name":      {[]string{"show", "crm"}, "names no delivery"},
		"no entry":     {[]string{"show", theEntitlement + "/x/crm"}, "the entry must be a number"},
		"no reason":    {[]string{"discard", theDelivery}, "missing flags: --reason=STRING (see grantd deliveries discard --help)"},
		"no actor":     {[]string{"discard", theDelivery, "--reason", "r", "--actor", ""}, "--actor is required"},
		"no actor, 2":  {[]string{"redeliver", theDelivery, "--reason", "r", "--actor", "ACTOR"}, "--actor: say who does it in place of ACTOR"},
		"no reason, 2": {[]string{"resume", "crm", "--reason", "REASON"}, "--reason: say why in place of REASON"},
		"no finding":   {[]string{"resolve", theDelivery, "--reason", "r"}, "missing flags: --as"},
		"no limit":     {[]string{"list", "--limit", "0"}, "--limit must be positive"},
		"no state":     {[]string{"list", "--state", "lost"}, "--state: must be one of"},
	} {
		t.Run(name, func(t *testing.T) {
			o := operators{removed: true}
			if _, err := o.deliveries(t, test.args...); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}
