package acceptance_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// A receiver refused an event, was repaired, and an operator sends it again. What arrives is the same event under the same key, however
// often the order is given; and once it has arrived nobody can send it again, not even after its row is gone.
func TestOperator_RedeliverSendsTheSameAgain(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm, Deduplicates: true})
	o.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	first := o.claimOne(t, crm)
	o.end(t, first, store.Dead, 422, "no such account")

	stuck := o.list(t, "t1", dead)
	if len(stuck) != 1 || stuck[0].GetDeliveryKey() != first.Key || stuck[0].GetLastError() != "no such account" || stuck[0].GetAttempts() != 1 {
		t.Fatalf("the list: %v", stuck)
	}
	wantOrdered(t, o.redeliver(t, first, 1), newly, pending)
	wantOrdered(t, o.redeliver(t, first, 1), already, pending)
	second := o.claimOne(t, crm)
	if second.Key != first.Key || !bytes.Equal(second.Body, first.Body) {
		t.Errorf("sent again as %s %q, first as %s %q", second.Key, second.Body, first.Key, first.Body)
	}
	wantOrdered(t, o.redeliver(t, first, 1), already, sending)

	// It dies again: a late repeat of the first order must not send it once more, a new order does.
	o.end(t, second, store.Dead, 422, "still no such account")
	wantOrdered(t, o.redeliver(t, first, 1), already, dead)
	wantOrdered(t, o.redeliver(t, first, 7), rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_MOVED_ON)
	wantOrdered(t, o.redeliver(t, first, 2), newly, pending)
	o.end(t, o.claimOne(t, crm), store.Delivered, 204, "")
	wantOrdered(t, o.redeliver(t, first, 0), rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED)

	byKey := &pb.GetDeliveryRequest{TenantId: "t1", Name: &pb.GetDeliveryRequest_DeliveryKey{DeliveryKey: first.Key}}
	reference := &pb.DeliveryReference{EntitlementId: first.Event.Entry.EntitlementID.String(), EntryNumber: 1, Destination: crm}
	story := o.story(t, byKey)
	var attempts, actions []string
	for _, a := range story.GetAttempts() {
		attempts = append(attempts, strings.TrimPrefix(a.GetOutcome().String(), "DELIVERY_ATTEMPT_OUTCOME_")+" "+a.GetError())
	}
	for _, a := range story.GetActions() {
		if a.GetActor() != theActor || a.GetReason() != theReason || a.GetAt() == nil {
			t.Errorf("an action: %v", a)
		}
		actions = append(actions, strings.TrimPrefix(a.GetKind().String(), "OPERATOR_ACTION_KIND_"))
	}
	wantSame(t, "the attempts", attempts, []string{"DEAD no such account", "DEAD still no such account", "DELIVERED "})
	wantSame(t, "the actions", actions, []string{"REDELIVER", "REDELIVER"})
	wantSame(t, "the delivery by its id", o.story(t, &pb.GetDeliveryRequest{
		TenantId: "t1", Name: &pb.GetDeliveryRequest_DeliveryId{DeliveryId: first.ID.String()},
	}), story)
	wantSame(t, "the delivery by its entry", o.story(t, &pb.GetDeliveryRequest{
		TenantId: "t1", Name: &pb.GetDeliveryRequest_Reference{Reference: reference},
	}), story)

	o.exec(t, `DELETE FROM settled_deliveries`)
	again, err := o.operator.RedeliverDelivery(t.Context(), &pb.RedeliverDeliveryRequest{
		TenantId: "t1", Name: &pb.RedeliverDeliveryRequest_Reference{Reference: reference}, Actor: theActor, Reason: theReason,
	})
	if err != nil {
		t.Fatal(err)
	}
	wantOrdered(t, again, rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_REMOVED)
	_, err = o.operator.GetDelivery(t.Context(), byKey)
	wantCode(t, "a delivery that was removed", err, codes.NotFound)
	if got := status.Convert(err).Message(); got != "no such delivery" {
		t.Errorf("the caller is told %q", got)
	}
}

// Another tenant's delivery cannot be seen, sent or given up, whatever it is called.
func TestOperator_OtherTenantsSeeNothing(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm})
	o.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	d := o.claimOne(t, crm)
	o.end(t, d, store.Dead, 400, "no")
	if seen := o.list(t, "t2", 0); len(seen) > 0 {
		t.Errorf("another tenant sees %v", seen)
	}
	reference := &pb.DeliveryReference{EntitlementId: d.Event.Entry.EntitlementID.String(), EntryNumber: 1, Destination: crm}
	_, err := o.operator.GetDelivery(t.Context(), &pb.GetDeliveryRequest{
		TenantId: "t2", Name: &pb.GetDeliveryRequest_DeliveryKey{DeliveryKey: d.Key}})
	wantCode(t, "a look", err, codes.NotFound)
	_, err = o.operator.RedeliverDelivery(t.Context(), &pb.RedeliverDeliveryRequest{
		TenantId: "t2", Name: &pb.RedeliverDeliveryRequest_Reference{Reference: reference}, Actor: theActor, Reason: theReason})
	wantCode(t, "a redelivery", err, codes.NotFound)
	_, err = o.operator.DiscardDelivery(t.Context(), &pb.DiscardDeliveryRequest{
		TenantId: "t2", Name: &pb.DiscardDeliveryRequest_DeliveryId{DeliveryId: d.ID.String()}, Actor: theActor, Reason: theReason})
	wantCode(t, "a discarding", err, codes.NotFound)
	if left := o.list(t, "t1", dead); len(left) != 1 {
		t.Errorf("the delivery is now %v", left)
	}
}

// A poisoned grant holds the reversal behind it, and says so, until an operator gives the grant's event up.
func TestOperator_DiscardLetsTheNextGo(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm})
	o.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	o.reverse(t, "t1", "R", "INV-1")
	d := o.claimOne(t, crm)
	o.end(t, d, store.Dead, 400, "no")
	if claimed := o.claim(t, crm); len(claimed) > 0 {
		t.Fatal("the reversal overtook the grant")
	}
	if held := o.list(t, "t1", pending); len(held) != 1 || held[0].GetHeldByEntryNumber() != 1 || held[0].GetNextAttemptAt() != nil {
		t.Errorf("what is held: %v", held)
	}
	wantOrdered(t, o.discard(t, d), newly, discarded)
	wantOrdered(t, o.discard(t, d), already, discarded)
	wantOrdered(t, o.redeliver(t, d, 0), rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED)
	next := o.claimOne(t, crm)
	if next.Event.Entry.Number != 2 {
		t.Errorf("entry %d is sent next", next.Event.Entry.Number)
	}
	wantOrdered(t, o.discard(t, next), rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_STATE)
}

// Nobody knows whether a mail went out. It waits for the one who can find out, and each answer leads where it says.
func TestOperator_ResolveSettlesWhatIsUnknown(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm})
	for i, invoice := range []string{"INV-1", "INV-2"} {
		o.want(t, newly, byNothing, grant("t1", invoice, invoice))
		o.end(t, o.claimOne(t, crm), store.Unknown, 0, "connection lost")
		if left := o.list(t, "t1", unknown); len(left) != i+1 {
			t.Fatalf("what is unknown: %v", left)
		}
	}
	if claimed := o.claim(t, crm); len(claimed) > 0 {
		t.Fatal("what is unknown was sent blindly")
	}
	all := o.list(t, "t1", unknown)
	arrived, lost := all[0].GetDeliveryId(), all[1].GetDeliveryId()
	wantOrdered(t, o.resolve(t, arrived, wasSent, 1), newly, delivered)
	wantOrdered(t, o.resolve(t, arrived, wasSent, 1), already, delivered)
	wantOrdered(t, o.resolve(t, arrived, sendAgain, 1), rejected, pb.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED)
	wantOrdered(t, o.resolve(t, lost, sendAgain, 1), newly, pending)
	wantOrdered(t, o.resolve(t, lost, sendAgain, 1), already, pending)

	// Its fate is unknown once more: a late repeat of the order was about the first time.
	o.end(t, o.claimOne(t, crm), store.Unknown, 0, "connection lost")
	wantOrdered(t, o.resolve(t, lost, sendAgain, 1), already, unknown)
	if claimed := o.claim(t, crm); len(claimed) > 0 {
		t.Fatal("a late repeat of an order sent it once more")
	}
	wantOrdered(t, o.resolve(t, lost, wasSent, 2), newly, delivered)
}

func TestOperator_ListInPages(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm}, store.Destination{Name: "ledger"})
	for _, invoice := range []string{"INV-1", "INV-2", "INV-3"} {
		o.want(t, newly, byNothing, grant("t1", invoice, invoice))
	}
	r := &pb.ListDeliveriesRequest{TenantId: "t1", PageSize: 2}
	var got []string
	for {
		page, err := o.operator.ListDeliveries(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range page.GetDeliveries() {
			got = append(got, d.GetBusinessKey().GetInvoiceId()+">"+d.GetDestination())
		}
		for _, s := range page.GetDestinations() {
			if s.GetBreaker() != pb.BreakerState_BREAKER_STATE_UNSPECIFIED {
				t.Errorf("a server that delivers nothing says %v", s)
			}
		}
		if r.PageToken = page.GetNextPageToken(); r.GetPageToken() == "" {
			break
		}
		other := &pb.ListDeliveriesRequest{TenantId: "t1", Destination: crm, PageToken: r.GetPageToken()}
		_, err = o.operator.ListDeliveries(t.Context(), other)
		wantViolations(t, "a token of another list", err, "page_token")
	}
	slices.Sort(got) // grants of one moment stand in any order
	wantSame(t, "the pages", got, []string{"INV-1>crm", "INV-1>ledger", "INV-2>crm", "INV-2>ledger", "INV-3>crm", "INV-3>ledger"})
}

func TestOperator_MalformedRequests(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm})
	const id = "0198f3a2-7c1e-8abc-8def-0123456789ab"
	_, err := o.operator.ListDeliveries(t.Context(), &pb.ListDeliveriesRequest{Destination: "CRM", State: 99, PageSize: 1001})
	wantViolations(t, "a list", err, "tenant_id", "destination", "state", "page_size")
	_, err = o.operator.GetDelivery(t.Context(), &pb.GetDeliveryRequest{TenantId: "t1"})
	wantViolations(t, "no name", err, "name")
	_, err = o.operator.GetDelivery(t.Context(), &pb.GetDeliveryRequest{
		TenantId: "t1", Name: &pb.GetDeliveryRequest_DeliveryKey{DeliveryKey: strings.Repeat("A", 64)}})
	wantViolations(t, "a key in upper case", err, "delivery_key")
	_, err = o.operator.RedeliverDelivery(t.Context(), &pb.RedeliverDeliveryRequest{
		TenantId: "t1", Name: &pb.RedeliverDeliveryRequest_Reference{Reference: &pb.DeliveryReference{}}, ObservedAttempts: -1})
	wantViolations(t, "a redelivery", err, "reference.entitlement_id", "reference.entry_number", "reference.destination", "actor", "reason", "observed_attempts")
	discard := &pb.DiscardDeliveryRequest{
		TenantId: "t1", Name: &pb.DiscardDeliveryRequest_DeliveryId{DeliveryId: id}, Actor: "a\nb", Reason: strings.Repeat("r", 501)}
	discard.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
	_, err = o.operator.DiscardDelivery(t.Context(), discard)
	wantViolations(t, "a discarding", err, "99", "actor", "reason")
	_, err = o.operator.ResolveDelivery(t.Context(), &pb.ResolveDeliveryRequest{
		TenantId: "t1", Name: &pb.ResolveDeliveryRequest_DeliveryId{DeliveryId: strings.ToUpper(id)}, Actor: "a", Reason: "r", Resolution: 9})
	wantViolations(t, "a resolution", err, "delivery_id", "resolution")
}

// A receiver answered 410. The list says so on every replica, and an operator ends the pause: once, with a name and a reason.
func TestOperator_ResumeEndsThePause(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm, Deduplicates: true}, store.Destination{Name: mailbox})
	o.want(t, newly, byNothing, grant("t1", "K0", "INV-0"))
	o.end(t, o.claimOne(t, crm), store.Delivered, 204, "")
	o.want(t, newly, byNothing, grant("t1", "K1", "INV-1"))
	o.want(t, newly, byNothing, grant("t1", "K2", "INV-2"))
	all := o.claim(t, crm)
	if lost, err := o.store.Settle(t.Context(), []store.DeliveryResult{
		{Delivery: all[0], Outcome: store.Dead, Pauses: true, StatusCode: 410, Error: "410 Gone"}, {Delivery: all[1], Outcome: store.RetryAt},
	}); err != nil || len(lost) > 0 {
		t.Fatal(lost, err)
	}
	statusOf := func() *pb.DestinationStatus {
		t.Helper()
		// A tenant that has no delivery there sees it too: a destination is everybody's.
		resp, err := o.operator.ListDeliveries(t.Context(), &pb.ListDeliveriesRequest{TenantId: "t2"})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range resp.GetDestinations() {
			if s.GetDestination() == crm {
				return s
			}
		}
		return nil
	}
	// wantPauses checks what the story of a grant has of pauses, each in so many words.
	wantPauses := func(key string, want ...string) {
		t.Helper()
		found, err := o.GetOperation(t.Context(), &pb.GetOperationRequest{
			TenantId: "t1", Name: &pb.GetOperationRequest_IdempotencyKey{IdempotencyKey: key}, View: full,
		})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range found.GetPauses() {
			got = append(got, fmt.Sprintf("%s %d ended %v by %s", p.GetDestination(), p.GetPauseNumber(), p.GetResumedAt() != nil, p.GetActor()))
		}
		if !slices.Equal(got, want) {
			t.Errorf("the story of %s has the pauses %q, want %q", key, got, want)
		}
	}
	wantPauses("K0")
	wantPauses("K2", "crm 1 ended false by ")
	if s := statusOf(); s.GetBreaker() != pb.BreakerState_BREAKER_STATE_PAUSED || s.GetPause().GetPauseNumber() != 1 || s.GetPause().GetPausedAt() == nil {
		t.Errorf("the list says %v", s)
	}
	if early := o.claim(t, crm); len(early) != 0 {
		t.Errorf("%d deliveries of a paused destination are claimed", len(early))
	}
	o.want(t, newly, byNothing, grant("t1", "K3", "INV-3"))
	resume := func(number int64, actor string) *pb.ResumeDestinationResponse {
		t.Helper()
		resp, err := o.operator.ResumeDestination(t.Context(), &pb.ResumeDestinationRequest{Destination: crm, PauseNumber: number, Actor: actor, Reason: theReason})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	for _, want := range []pb.Outcome{newly, already} {
		got := resume(1, theActor)
		if p := got.GetPause(); got.GetOutcome() != want || p.GetActor() != theActor || p.GetReason() != theReason || p.GetResumedAt() == nil {
			t.Errorf("the answer: %v, want %v", got, want)
		}
	}
	if got := resume(0, "somebody else"); got.GetOutcome() != already || got.GetPause().GetActor() != theActor {
		t.Errorf("another operator is told %v", got)
	}
	if s := statusOf(); s.GetPause() != nil {
		t.Errorf("afterwards the list says %v", s)
	}
	o.want(t, newly, byNothing, grant("t1", "K4", "INV-4"))
	wantPauses("K0")
	wantPauses("K1", "crm 1 ended true by "+theActor)
	wantPauses("K3", "crm 1 ended true by "+theActor)
	wantPauses("K4")
	if again := o.claim(t, crm); len(again) != 3 {
		t.Errorf("%d deliveries are claimed after the pause, want 3", len(again))
	}
	for _, test := range []struct {
		destination string
		pause       int64
		want        string
	}{
		{"elsewhere", 0, "no such destination is known"}, {"elsewhere", 1, "no such destination is known"},
		{crm, 2, "the destination never had a pause of that number"}, {mailbox, 0, "the destination was never paused"},
	} {
		_, err := o.operator.ResumeDestination(t.Context(), &pb.ResumeDestinationRequest{
			Destination: test.destination, PauseNumber: test.pause, Actor: theActor, Reason: theReason,
		})
		wantCode(t, test.destination, err, codes.NotFound)
		if got := status.Convert(err).Message(); !strings.HasPrefix(got, test.want) {
			t.Errorf("pause %d of %s: %q, want %q", test.pause, test.destination, got, test.want)
		}
	}
	_, err := o.operator.ResumeDestination(t.Context(), &pb.ResumeDestinationRequest{Destination: "CRM", PauseNumber: -1})
	wantViolations(t, "a resumption", err, "destination", "pause_number", "actor", "reason")
}

// The connection breaks under an order. The operator is told that the same order may be given again, by the same details as for a grant.
func TestOperator_NoAnswerFromTheDatabase(t *testing.T) {
	t.Parallel()
	b, proxy := setupProxied(t, to(store.Destination{Name: crm}))
	o := &operated{b, pb.NewOperatorServiceClient(b.conn)}
	d := o.claimOne(t, crm)
	o.end(t, d, store.Dead, 400, "no")
	reached := proxy.on("COMMIT", breakOff)
	_, err := o.operator.RedeliverDelivery(t.Context(), &pb.RedeliverDeliveryRequest{
		TenantId: d.TenantID, Name: &pb.RedeliverDeliveryRequest_DeliveryKey{DeliveryKey: d.Key},
		ObservedAttempts: 1, Actor: theActor, Reason: theReason,
	})
	<-reached
	wantCode(t, "the order", err, codes.Unavailable)
	var typed *pb.RedeliverDeliveryResponse
	for _, detail := range status.Convert(err).Details() {
		if d, ok := detail.(*pb.RedeliverDeliveryResponse); ok {
			typed = d
		}
	}
	if typed.GetOutcome() != retryable || typed.GetFailure().GetReason() != store.ReasonCommitUnknown {
		t.Errorf("the details: %v", status.Convert(err).Details())
	}
	wantOrdered(t, o.redeliver(t, d, 1), already, pending)
}

// The network falls silent, and the caller has set no deadline, as grpcurl sets none. Few such calls would hold every session that look-ups
// or workers have, for ever: each is told to ask again.
func TestOperator_SilentDatabase(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(ctx context.Context, operator pb.OperatorServiceClient, d *store.Delivery) error{
		"list": func(ctx context.Context, operator pb.OperatorServiceClient, d *store.Delivery) error {
			_, err := operator.ListDeliveries(ctx, &pb.ListDeliveriesRequest{TenantId: d.TenantID})
			return err
		},
		"order": func(ctx context.Context, operator pb.OperatorServiceClient, d *store.Delivery) error {
			_, err := operator.RedeliverDelivery(ctx, &pb.RedeliverDeliveryRequest{
				TenantId: d.TenantID, Name: &pb.RedeliverDeliveryRequest_DeliveryKey{DeliveryKey: d.Key}, Actor: theActor, Reason: theReason,
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, proxy := setupProxied(t, to(store.Destination{Name: crm}))
			o := &operated{b, pb.NewOperatorServiceClient(b.conn)}
			d := o.claimOne(t, crm)
			o.end(t, d, store.Dead, 400, "no")
			reached := proxy.on("COMMIT", fallSilent)
			answered := make(chan error, 1)
			go func() { answered <- call(t.Context(), o.operator, d) }()
			<-reached
			select {
			case err := <-answered:
				wantCode(t, "the call", err, codes.Unavailable)
			case <-time.After(time.Minute):
				t.Error("it waits")
			}
		})
	}
}

// Support follows one event from its key to the receiver: every delivery, each call, and who was told.
func TestGetOperation_FullShowsDeliveries(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: crm}, store.Destination{Name: mailbox, Template: mailLayout})
	o.want(t, newly, byNothing, grant("t1", "K", "INV-1", notify("ada@example.com", "de-CH")))
	o.want(t, already, byKey, grant("t1", "K", "INV-1", notify("eve@example.com", "en"))) // the winner's counts
	o.end(t, o.claimOne(t, crm), store.RetryAt, 503, "maintenance")
	o.end(t, o.claimOne(t, crm), store.Delivered, 204, "")
	found := o.operation(t, byName("t1", "K", full))
	var got []string
	for _, s := range found.GetDeliveries() {
		d := s.GetDelivery()
		line := d.GetDestination() + " " + strings.TrimPrefix(d.GetState().String(), "DELIVERY_STATE_")
		for _, a := range s.GetAttempts() {
			line += " " + strings.TrimPrefix(a.GetOutcome().String(), "DELIVERY_ATTEMPT_OUTCOME_")
		}
		got = append(got, line)
	}
	wantSame(t, "the deliveries", got, []string{"crm DELIVERED RETRY DELIVERED", "mailbox PENDING"})
	if n := found.GetNotifications(); len(n) != 1 || n[0].GetNotify().GetRecipient() != "ada@example.com" || n[0].GetNotify().GetLocale() != "de-CH" ||
		n[0].GetTemplate() != mailLayout || n[0].GetDestination() != mailbox || n[0].GetRequestedAt() == nil || n[0].GetSentAt() != nil {
		t.Errorf("who was to be told: %v", n)
	}
	if basic := o.operation(t, byName("t1", "K", 0)); len(basic.GetDeliveries()) > 0 || len(basic.GetNotifications()) > 0 {
		t.Errorf("the basic view: %v", basic)
	}

	// The reversal, too, names who is to be told.
	resp, err := o.RecordInvoiceState(t.Context(), &pb.RecordInvoiceStateRequest{
		IdempotencyKey: "refund", TenantId: "t1", InvoiceId: "INV-1", State: refunded, Version: 2,
		Notify: &pb.Notify{Recipient: "ada@example.com", Locale: "fr"},
	})
	if err != nil || resp.GetOutcome() != newly {
		t.Fatalf("the refund: %v %v", resp, err)
	}
	if n := o.operation(t, byName("t1", "refund", full)).GetNotifications(); len(n) != 1 || n[0].GetNotify().GetLocale() != "fr" || n[0].GetEntryNumber() != 2 {
		t.Errorf("who was to be told of the refund: %v", n)
	}
}

func TestNotify_MalformedIsRefusedEverywhere(t *testing.T) {
	t.Parallel()
	o := setupOperated(t, store.Destination{Name: mailbox, Template: mailLayout})
	bad := &pb.Notify{Recipient: "Ada <ada@example.com>", Locale: "de_CH"}
	fields := []string{"notify.recipient", "notify.locale"}
	r := grant("t1", "K", "INV-1")
	r.Notify = bad
	_, err := o.GrantEntitlement(t.Context(), r)
	wantViolations(t, "a grant", err, fields...)
	_, err = o.RecordInvoiceState(t.Context(), &pb.RecordInvoiceStateRequest{
		IdempotencyKey: "K", TenantId: "t1", InvoiceId: "INV-1", State: paid, Version: 1, Notify: bad})
	wantViolations(t, "an invoice's state", err, fields...)
	_, err = o.ReverseEntitlement(t.Context(), &pb.ReverseEntitlementRequest{
		IdempotencyKey: "K", TenantId: "t1", Actor: "a", Reason: "r", Notify: bad,
		Target: &pb.ReverseEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{InvoiceId: "INV-1", EntitlementType: "x"}}})
	wantViolations(t, "a reversal", err, fields...)
	_, err = o.ReinstateEntitlement(t.Context(), &pb.ReinstateEntitlementRequest{
		IdempotencyKey: "K", TenantId: "t1", Actor: "a", Reason: "r", Notify: bad,
		Target: &pb.ReinstateEntitlementRequest_BusinessKey{BusinessKey: &pb.BusinessKey{InvoiceId: "INV-1", EntitlementType: "x"}}})
	wantViolations(t, "a reinstatement", err, fields...)
	if n := value[int](t, o.bundle, `SELECT count(*) FROM attempts`); n != 0 {
		t.Errorf("%d malformed requests came to the database", n)
	}
}
