package acceptance_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// found lists keys page by page, each with the operation that it stands for and what its last attempt was told.
func (b *bundle) found(t testing.TB, r *pb.ListOperationsRequest) []string {
	t.Helper()
	lines := []string{}
	for r.PageToken = ""; ; {
		page, err := b.ListOperations(t.Context(), r)
		if err != nil {
			t.Fatalf("list %v: %v", r, err)
		}
		for _, l := range page.GetOperations() {
			line := l.GetIdempotencyKey() + ":"
			if op := l.GetOperation(); op != nil {
				line += " " + nameOf(op)
			}
			if a := l.GetLastAttempt(); a != nil {
				if a.GetIdempotencyKey() != l.GetIdempotencyKey() {
					t.Errorf("%s: its last attempt came under %s", line, a.GetIdempotencyKey())
				}
				line += ", " + short(a.GetOutcome()) + " to " + a.GetEventId()
			}
			lines = append(lines, line)
		}
		if r.PageToken = page.GetNextPageToken(); r.PageToken == "" {
			return lines
		}
	}
}

// Support has the webhook's id, or the invoice, or the type, and finds every key that came with it: winners, aliases, refunds, and what
// was only ever refused.
func TestListOperations(t *testing.T) {
	t.Parallel()
	b := setup(t)
	events := 0
	event := func() string { events++; return fmt.Sprint("evt_", events) }
	give := func(outcome pb.Outcome, by pb.MatchedBy, r *pb.GrantEntitlementRequest) *pb.GrantEntitlementResponse {
		r.EventId = event()
		return b.want(t, outcome, by, r)
	}
	give(rejected, byNothing, grant("t1", "refused", "INV-1", evidence(unpaid, 1)))              // 1
	id := give(newly, byNothing, grant("t1", "K1", "INV-1")).GetEntitlement().GetEntitlementId() // 2
	give(already, byBusinessKey, grant("t1", "K2", "INV-1"))                                     // 3
	give(conflict, byBusinessKey, grant("t1", "KC", "INV-1", seats("11")))                       // 4
	refund := recording("t1", "refund", "INV-1", refunded, 2)                                    // 5
	refund.EventId = event()                                                                     //
	b.record(t, newly, byNothing, refund)                                                        //
	refund.IdempotencyKey, refund.EventId = "refund-2", event()                                  // 6
	b.record(t, already, byBusinessKey, refund)                                                  //
	stale := recording("t1", "stale", "INV-1", paid, 1)                                          // 7
	stale.EventId = event()                                                                      //
	b.record(t, rejected, byNothing, stale)                                                      //
	turned := reversal("t1", "CASE-1", "", "", byID(id))                                         // 8
	turned.EventId = event()                                                                     //
	b.turn(t, already, byBusinessKey, turned)                                                    //
	back := reinstatement("t1", "CASE-2", "INV-1", "team_access")                                // 9
	back.EventId = event()                                                                       //
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, back)                 //
	lost := reversal("t1", "CASE-3", "INV-9", "sso")                                             // 10
	lost.EventId = event()                                                                       //
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, lost)                      //
	give(newly, byNothing, grant("t1", "K3", "INV-2", ofType("sso")))                            // 11
	took := reversal("t1", "CASE-4", "INV-2", "sso")                                             // 12
	took.EventId = event()                                                                       //
	b.turn(t, newly, byNothing, took)                                                            //
	give(already, byKey, grant("t1", "K3", "INV-2", ofType("sso")))                              // 13
	b.want(t, newly, byNothing, grant("t2", "foreign", "INV-1", func(r *pb.GrantEntitlementRequest) { r.EventId = "evt_2" }))

	byEvent := func(e string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{EventId: e}}
	}
	byInvoice := func(i string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_InvoiceId{InvoiceId: i}}
	}
	byType := func(e string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EntitlementType{EntitlementType: e}}
	}
	for _, test := range []struct {
		request *pb.ListOperationsRequest
		want    []string
	}{
		{byEvent("evt_1"), []string{"refused:, REJECTED to evt_1"}},
		{byEvent("evt_2"), []string{"K1: K1 GRANT, NEWLY_APPLIED to evt_2"}},
		{byEvent("evt_3"), []string{"K2: K1 GRANT, ALREADY_APPLIED to evt_3"}},
		{byEvent("evt_4"), []string{"KC:, CONFLICTING_PAYLOAD to evt_4"}},
		{byEvent("evt_5"), []string{"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5"}},
		{byEvent("evt_8"), []string{"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8"}},
		{byEvent("evt_11"), []string{"K3: K3 GRANT, ALREADY_APPLIED to evt_13"}},
		{byEvent("evt_99"), []string{}},
		{byInvoice("INV-1"), []string{
			"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8",
			"CASE-2:, REJECTED to evt_9",
			"K1: K1 GRANT, NEWLY_APPLIED to evt_2",
			"K2: K1 GRANT, ALREADY_APPLIED to evt_3",
			"KC:, CONFLICTING_PAYLOAD to evt_4",
			"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5",
			"refund-2: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_6",
			"refused:, REJECTED to evt_1",
			"stale:, REJECTED to evt_7",
		}},
		{byInvoice("INV-2"), []string{"CASE-4: CASE-4 REVERSE, NEWLY_APPLIED to evt_12", "K3: K3 GRANT, ALREADY_APPLIED to evt_13"}},
		{byInvoice("INV-9"), []string{"CASE-3:, REJECTED to evt_10"}},
		{byInvoice("inv-1"), []string{}},
		{byType("team_access"), []string{
			"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8",
			"CASE-2:, REJECTED to evt_9",
			"K1: K1 GRANT, NEWLY_APPLIED to evt_2",
			"K2: K1 GRANT, ALREADY_APPLIED to evt_3",
			"KC:, CONFLICTING_PAYLOAD to evt_4",
			"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5",
			"refused:, REJECTED to evt_1",
		}},
		{byType("sso"), []string{
			"CASE-3:, REJECTED to evt_10", "CASE-4: CASE-4 REVERSE, NEWLY_APPLIED to evt_12", "K3: K3 GRANT, ALREADY_APPLIED to evt_13",
		}},
	} {
		for _, size := range []int32{0, 1, 2} {
			test.request.PageSize = size
			wantSame(t, fmt.Sprintf("%v in pages of %d", test.request, size), b.found(t, test.request), test.want)
		}
	}
	foreign := byEvent("evt_2")
	foreign.TenantId = "t2"
	wantSame(t, "another tenant's event of the same name", b.found(t, foreign), []string{"foreign: foreign GRANT, NEWLY_APPLIED to evt_2"})

	// Without attempts the operations are still found, what was refused is not.
	b.purgeAttempts(t)
	wantSame(t, "the invoice after the purge", b.found(t, byInvoice("INV-1")), []string{
		"CASE-1: refund RECORD_INVOICE_STATE", "K1: K1 GRANT", "K2: K1 GRANT", "refund: refund RECORD_INVOICE_STATE", "refund-2: refund RECORD_INVOICE_STATE",
	})
	got := b.found(t, byType("sso"))
	wantSame(t, "the type after the purge", got, []string{"CASE-4: CASE-4 REVERSE", "K3: K3 GRANT"})
	wantSame(t, "the event after the purge", b.found(t, byEvent("evt_2")), []string{})
}

// A look-up answers for every kind of operation, with the whole story: attempts, aliases and the ledger.
func TestGetOperation_EveryKind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	granted := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.want(t, newly, byNothing, grant("t1", "K-sso", "INV-1", ofType("sso")))
	gone := b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reversal("t1", "CASE-1b", "INV-1", "team_access"))
	back := b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reinstatement("t1", "CASE-2b", "INV-1", "team_access"))
	b.turn(t, conflict, byKey, reinstatement("t1", "CASE-2", "INV-1", "team_access", func(r *pb.ReinstateEntitlementRequest) { r.Actor = "carol" }))
	refund := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2))
	b.record(t, already, byBusinessKey, recording("t1", "refund-b", "INV-1", refunded, 2))

	id := granted.GetEntitlement().GetEntitlementId()
	whole := []string{"1 GRANTED K 1  ", "2 REVERSED CASE-1 1 alice charge disputed", "3 REINSTATED CASE-2 1 bob dispute won", "4 REVERSED refund 2  the invoice is REFUNDED"}
	for _, test := range []struct {
		keys     []string // the owner's first
		result   *pb.Entitlement
		op       *pb.Operation
		attempts []string
		entries  []string
	}{
		{[]string{"K"}, granted.GetEntitlement(), granted.GetOperation(), []string{"K NEWLY_APPLIED"}, whole},
		{[]string{"CASE-1", "CASE-1b"}, gone.GetEntitlement(), gone.GetOperation(),
			[]string{"CASE-1 NEWLY_APPLIED", "CASE-1b ALREADY_APPLIED"}, whole},
		{[]string{"CASE-2", "CASE-2b"}, back.GetEntitlement(), back.GetOperation(),
			[]string{"CASE-2 NEWLY_APPLIED", "CASE-2b ALREADY_APPLIED", "CASE-2 CONFLICTING_PAYLOAD actor"}, whole},
		{[]string{"refund", "refund-b"}, nil, refund.GetOperation(),
			[]string{"refund NEWLY_APPLIED", "refund-b ALREADY_APPLIED"},
			[]string{"4 REVERSED refund 2  the invoice is REFUNDED", "2 REVERSED refund 2  the invoice is REFUNDED"}},
	} {
		for _, key := range test.keys {
			got := b.operation(t, byName("t1", key, full))
			if got.GetOutcome() != already || got.GetMatchedBy() != byKey {
				t.Errorf("%s: %v by %v", key, got.GetOutcome(), got.GetMatchedBy())
			}
			wantSame(t, "the operation of "+key, got.GetOperation(), test.op)
			wantSame(t, "the result of "+key, got.GetEntitlement(), test.result)
			if test.result != nil {
				wantNow(t, key, got, reversed, 4)
				if got.GetRecorded() != nil {
					t.Errorf("%s: recorded %v", key, got.GetRecorded())
				}
			} else {
				wantSame(t, "what "+key+" recorded", got.GetRecorded(), refund.GetRecorded())
			}
			var attempts, aliases, entries []string
			for _, a := range got.GetAttempts() {
				attempts = append(attempts, strings.TrimSpace(a.GetIdempotencyKey()+" "+short(a.GetOutcome())+" "+strings.Join(a.GetDifferingFields(), " ")))
				if a.GetKind() != test.op.GetKind() || a.GetInvoiceId() != "INV-1" || a.GetAttemptId() == "" {
					t.Errorf("an attempt of %s: %v", key, a)
				}
			}
			for _, a := range got.GetAliases() {
				aliases = append(aliases, a.GetIdempotencyKey())
			}
			for _, n := range got.GetEntries() {
				if test.result != nil && n.GetEntitlementId() != id {
					t.Errorf("%s: an entry of another entitlement: %v", key, n)
				}
				entries = append(entries, fmt.Sprintf("%d %s %s %d %s %s", n.GetEntryNumber(), short(n.GetKind()), n.GetIdempotencyKey(), n.GetInvoiceVersion(), n.GetActor(), n.GetReason()))
			}
			wantSame(t, "the attempts of "+key, attempts, test.attempts)
			wantSame(t, "the aliases of "+key, aliases, append([]string(nil), test.keys[1:]...))
			wantSame(t, "the entries of "+key, entries, test.entries)

			basic := b.operation(t, byName("t1", key, pb.OperationView_OPERATION_VIEW_BASIC))
			got.Attempts, got.Aliases, got.Entries = nil, nil, nil
			wantSame(t, "the basic view of "+key, basic, got)
		}
	}
	// Asked with a grant, the key of another kind is a conflict, as sending it would be.
	other := byName("t1", "CASE-1", full)
	other.Grant = grant("t1", "CASE-1", "INV-1").GetGrant()
	if got := b.operation(t, other); got.GetOutcome() != conflict || !slices.Equal(differing(got.GetConflict()), []string{"kind"}) || len(got.GetEntries()) != 4 {
		t.Errorf("asked with a grant: %v", got)
	}
	// What was refused so far has attempts and nothing else.
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, reinstatement("t1", "CASE-9", "INV-1", "team_access"))
	if got := b.operation(t, byName("t1", "CASE-9", full)); got.GetOutcome() != notApplied || len(got.GetAttempts()) != 1 || got.GetEntries() != nil || got.GetEntitlement() != nil {
		t.Errorf("a refused reinstatement: %v", got)
	}
}
