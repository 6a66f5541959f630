package acceptance_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// The promise in one test: the first arrival grants, and every later one is told the same, field for field, whatever else it
// carries beside the grant.
func TestOutcome_NewlyThenAlreadyApplied(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := grant("t1", "K", "INV-1", func(r *pb.GrantEntitlementRequest) {
		r.Grant.Scope = map[string]string{"seats": "10", "region": "eu", "label": "Équipe n° 7"}
		r.Grant.Quantity = pointer[int64](3)
		r.Grant.StartsAt = &timestamppb.Timestamp{Seconds: -62135596800, Nanos: 1000}
		r.Grant.ExpiresAt = &timestamppb.Timestamp{Seconds: 253402300799, Nanos: 999999000}
		r.EventId, r.Source = "evt_1", "stripe"
	})

	first := b.want(t, newly, byNothing, r)
	e := first.GetEntitlement()
	wantSame(t, "the granted payload", e.GetGrant(), r.GetGrant())
	if e.GetState() != pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE || e.GetVersion() != 1 || e.GetGrantedByKey() != "K" ||
		!e.GetChangedAt().AsTime().Equal(e.GetGrantedAt().AsTime()) || !e.GetEndsAt().AsTime().Equal(r.GetGrant().GetExpiresAt().AsTime()) {
		t.Errorf("the entitlement: %v", e)
	}
	op := first.GetOperation()
	if op.GetIdempotencyKey() != "K" || op.GetKind() != pb.OperationKind_OPERATION_KIND_GRANT || op.GetEntitlementId() != e.GetEntitlementId() ||
		op.GetEntryNumber() != 1 || op.GetEventId() != "evt_1" || op.GetSource() != "stripe" || op.GetFingerprintRecipe() != 1 {
		t.Errorf("the operation: %v", op)
	}

	before := b.written(t)
	r.EventId, r.Source, r.Invoice = "evt_2", "replayer", &pb.InvoiceEvidence{State: refunded, Version: 9}
	second := b.want(t, already, byKey, r)
	wantSame(t, "the replay's result", second.GetEntitlement(), e)
	wantSame(t, "the replay's operation", second.GetOperation(), op)
	third := b.want(t, already, byKey, r)
	wantSame(t, "the second replay", third, second)
	wantSame(t, "what replays wrote beside their attempts", b.written(t), before)
	wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0", "2 1 0", "2 1 0"})
	b.wantWhole(t)
}

// A webhook and a nightly job ask for the same effect under keys of their own. The later key becomes an alias of the winner, and
// is then known by itself.
func TestOutcome_AlreadyAppliedByBusinessKeyBindsTheKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.want(t, newly, byNothing, grant("t1", "webhook", "INV-1"))
	invoice := b.invoice(t, "t1", "INV-1")

	second := b.want(t, already, byBusinessKey, grant("t1", "nightly", "INV-1", evidence(paid, 7)))
	wantSame(t, "the result", second.GetEntitlement(), first.GetEntitlement())
	wantSame(t, "the operation", second.GetOperation(), first.GetOperation())
	third := b.want(t, already, byKey, grant("t1", "nightly", "INV-1"))
	wantSame(t, "the result under the alias", third.GetEntitlement(), first.GetEntitlement())
	b.want(t, conflict, byKey, grant("t1", "nightly", "INV-1", seats("11")))
	b.want(t, conflict, byKey, grant("t1", "nightly", "INV-2"))

	wantSame(t, "the invoice", b.invoice(t, "t1", "INV-1"), invoice)
	found := b.operation(t, byName("t1", "nightly", full))
	wantSame(t, "the winner found by the alias", found.GetOperation(), first.GetOperation())
	if a := found.GetAliases(); len(a) != 1 || a[0].GetIdempotencyKey() != "nightly" {
		t.Errorf("aliases: %v", a)
	}
	if n := len(found.GetAttempts()); n != 5 {
		t.Errorf("the story has %d attempts, want 5", n)
	}
	b.wantWhole(t)
}

// A conflict names every field that differs, both values, and the operation that was there first; it carries no entitlement.
func TestOutcome_ConflictNamesEveryDifference(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.want(t, newly, byNothing, grant("t1", "K", "INV-1", func(r *pb.GrantEntitlementRequest) {
		r.Grant.Scope = map[string]string{"seats": "10", "region": "eu", "same": "same"}
		r.Grant.StartsAt = timestamppb.New(time.Unix(1700000000, 123456000))
	}))
	before := b.written(t)

	submitted := grant("t1", "K", "INV-2", func(r *pb.GrantEntitlementRequest) {
		r.Grant.EntitlementType = "sso"
		r.Grant.OperationVersion = 4
		r.Grant.Scope = map[string]string{"seats": "11", "plan": "", "same": "same"}
		r.Grant.Quantity = pointer[int64](9)
		r.Grant.ExpiresAt = timestamppb.New(time.Unix(1800000000, 0))
	})
	got := b.want(t, conflict, byKey, submitted)
	want := &pb.Conflict{
		StoredOperation: first.GetOperation(),
		Differences: []*pb.Difference{
			{Field: "entitlement_type", Stored: pointer("team_access"), Submitted: pointer("sso")},
			{Field: "expires_at", Submitted: pointer("2027-01-15T08:00:00Z")},
			{Field: "invoice_id", Stored: pointer("INV-1"), Submitted: pointer("INV-2")},
			{Field: "operation_version", Stored: pointer("0"), Submitted: pointer("4")},
			{Field: "quantity", Submitted: pointer("9")},
			{Field: "scope.plan", Submitted: pointer("")},
			{Field: "scope.region", Stored: pointer("eu")},
			{Field: "scope.seats", Stored: pointer("10"), Submitted: pointer("11")},
			{Field: "starts_at", Stored: pointer("2023-11-14T22:13:20.123456Z")},
		},
	}
	wantSame(t, "the conflict", got.GetConflict(), want)

	// The effect is taken: the new key stays free, also for another use.
	other := b.want(t, conflict, byBusinessKey, grant("t1", "other", "INV-1", func(r *pb.GrantEntitlementRequest) {
		r.Grant.Scope = map[string]string{"seats": "10", "region": "eu", "same": "other"}
		r.Grant.StartsAt = timestamppb.New(time.Unix(1700000000, 123456000))
		r.Invoice.Version = 50
	}))
	wantSame(t, "the conflict by effect", other.GetConflict(), &pb.Conflict{
		StoredOperation: first.GetOperation(),
		Differences:     []*pb.Difference{{Field: "scope.same", Stored: pointer("same"), Submitted: pointer("other")}},
	})
	wantSame(t, "what conflicts wrote beside their attempts", b.written(t), before)
	b.want(t, newly, byNothing, grant("t1", "other", "INV-3"))

	looked := byName("t1", "K", full)
	looked.Grant = submitted.GetGrant()
	found := b.operation(t, looked)
	if found.GetOutcome() != conflict || found.GetMatchedBy() != byKey || found.GetEntitlement() != nil {
		t.Errorf("the look-up with another payload: %v %v", found.GetOutcome(), found.GetMatchedBy())
	}
	wantSame(t, "the look-up's conflict", found.GetConflict(), want)
	if a := found.GetAttempts(); len(a) != 2 || !slices.Equal(a[1].GetDifferingFields(), differing(want)) {
		t.Errorf("attempts: %v", a)
	}
	b.wantWhole(t)
}

// Look-ups only: there is nothing, and a retry is safe.
func TestOutcome_NotApplied(t *testing.T) {
	t.Parallel()
	b := setup(t)
	unknown := byName("t1", "K", full)
	unknown.Grant = grant("t1", "K", "INV-1").GetGrant()
	for name, r := range map[string]*pb.GetOperationRequest{
		"by key":            byName("t1", "K", full),
		"by effect":         byEffect("t1", "INV-1", "team_access"),
		"by key with grant": unknown,
		"by grant alone":    {TenantId: "t1", Grant: unknown.GetGrant()},
	} {
		wantSame(t, name, b.operation(t, r), &pb.GetOperationResponse{Outcome: notApplied})
	}
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	for name, r := range map[string]*pb.GetOperationRequest{
		"by key":         byName("t1", "K", full),
		"by effect":      byEffect("t1", "INV-1", "team_access"),
		"by grant alone": {TenantId: "t1", Grant: unknown.GetGrant()},
	} {
		if found := b.operation(t, r); found.GetOutcome() != already || found.GetOperation().GetIdempotencyKey() != "K" {
			t.Errorf("%s after the grant: %v", name, found)
		}
	}
}

// Support asks about a key that was only ever refused: there is no operation, but the attempts say why.
func TestOutcome_RefusedKeyHasAStory(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "first", "INV-2"))
	b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, grant("t1", "K", "INV-1", evidence(unpaid, 1),
		func(r *pb.GrantEntitlementRequest) { r.EventId, r.Source = "evt_1", "stripe" }))
	b.want(t, conflict, byBusinessKey, grant("t1", "K", "INV-2", seats("99")))

	found := b.operation(t, byName("t1", "K", full))
	if found.GetOutcome() != notApplied || found.GetOperation() != nil || len(found.GetAttempts()) != 2 {
		t.Fatalf("the story of a refused key: %v", found)
	}
	refusal, conflicting := found.GetAttempts()[0], found.GetAttempts()[1]
	if refusal.GetOutcome() != rejected || refusal.GetReason() != pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID ||
		refusal.GetEventId() != "evt_1" || refusal.GetSource() != "stripe" || refusal.GetInvoiceId() != "INV-1" {
		t.Errorf("the refusal: %v", refusal)
	}
	if conflicting.GetOutcome() != conflict || conflicting.GetMatchedBy() != byBusinessKey {
		t.Errorf("the conflict: %v", conflicting)
	}
	wantSame(t, "the differing fields", conflicting.GetDifferingFields(), []string{"scope.seats"})
}

// Every reason that a grant can meet, in the enum's order. Nothing is written but the attempt, and the key is not consumed.
// STALE_VERSION and NOT_GRANTED belong to other RPCs.
func TestRejected_EveryReason(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) {
		s.store.Catalog = &store.Catalog{Types: map[string]store.CatalogType{
			"team_access": {ScopeKeys: []string{"seats"}},
			"credits":     {Repeatable: true},
		}}
	})
	b.recordInvoice(t, "t1", "INV-OPEN", unpaid, 5)
	b.recordInvoice(t, "t1", "INV-VOIDED", voided, 5)
	b.recordInvoice(t, "t1", "INV-REFUNDED", refunded, 5)
	for _, test := range []struct {
		name    string
		reason  pb.RejectionReason
		request *pb.GrantEntitlementRequest
		repair  func(*pb.GrantEntitlementRequest)
	}{
		{"the evidence is OPEN", pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID,
			grant("t1", "K1", "INV-1", evidence(unpaid, 3)), evidence(paid, 3)},
		{"the evidence is VOIDED", pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID,
			grant("t1", "K2", "INV-2", evidence(voided, 3)), evidence(paid, 3)},
		{"the evidence is REFUNDED", pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID,
			grant("t1", "K3", "INV-3", evidence(refunded, 3)), evidence(paid, 3)},
		{"the record is OPEN", pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID,
			grant("t1", "K4", "INV-OPEN", evidence(paid, 5)), evidence(paid, 6)},
		{"the record is VOIDED", pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED,
			grant("t1", "K5", "INV-VOIDED", evidence(paid, 5)), evidence(paid, 6)},
		{"the record is REFUNDED", pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED,
			grant("t1", "K6", "INV-REFUNDED", evidence(paid, 4)), evidence(paid, 6)},
		{"the type is not in the catalogue", pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE,
			grant("t1", "K7", "INV-7", ofType("sso")), ofType("credits")},
		{"the scope key is not the type's", pb.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY,
			grant("t1", "K8", "INV-8", func(r *pb.GrantEntitlementRequest) { r.Grant.Scope["region"] = "eu" }),
			func(r *pb.GrantEntitlementRequest) { delete(r.Grant.Scope, "region") }},
		{"the type is not repeatable", pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE,
			grant("t1", "K9", "INV-9", func(r *pb.GrantEntitlementRequest) { r.Grant.OperationVersion = 1 }), ofType("credits")},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := b.written(t)
			refusal := b.wantRejected(t, test.reason, test.request)
			if refusal.GetMessage() == "" || refusal.GetRetry() != pb.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE || refusal.GetViolations() != nil {
				t.Errorf("the rejection: %v", refusal)
			}
			b.wantRejected(t, test.reason, test.request)
			wantSame(t, "what refusals wrote beside their attempts", b.written(t), before)
			want := fmt.Sprintf("4 0 %d", test.reason)
			wantSame(t, "the attempts", b.attempts(t, "t1", test.request.GetIdempotencyKey()), []string{want, want})

			// The key is free: what would pass under it, passes.
			test.repair(test.request)
			b.want(t, newly, byNothing, test.request)
		})
	}
	b.wantWhole(t)
}

// Without a catalogue every type may be granted, but none is repeatable.
func TestRejected_NotRepeatableWithoutCatalogue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := grant("t1", "K", "INV-1", func(r *pb.GrantEntitlementRequest) { r.Grant.OperationVersion = 1 })
	b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE, r)
}

// One invoice grants a repeatable type several times, once for each operation version.
func TestRepeatableType_OneGrantForEachVersion(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) {
		s.store.Catalog = &store.Catalog{Types: map[string]store.CatalogType{"credits": {Repeatable: true}}}
	})
	for version := range int64(3) {
		r := grant("t1", fmt.Sprintf("K%d", version), "INV-1", ofType("credits"))
		r.Grant.OperationVersion = version
		b.want(t, newly, byNothing, r)
		b.want(t, already, byKey, r)
		r.IdempotencyKey += "-again"
		b.want(t, already, byBusinessKey, r)
	}
	b.wantWhole(t)
}

// The catalogue judges new grants only: a type that is taken out of it must not turn a replay into a refusal, after which
// the caller would believe that nothing was granted.
func TestCatalogue_ReplayDoesNotLookAtIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	later := serveOn(t, b.url, b.url, func(s *settings) { s.store.Catalog = &store.Catalog{} })
	second := later.want(t, already, byKey, grant("t1", "K", "INV-1"))
	wantSame(t, "the result", second.GetEntitlement(), first.GetEntitlement())
	later.want(t, already, byBusinessKey, grant("t1", "K2", "INV-1"))
	later.want(t, conflict, byBusinessKey, grant("t1", "K3", "INV-1", seats("11")))
	later.wantRejected(t, pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE, grant("t1", "K3", "INV-2"))
}

// Evidence arrives late and out of order. The record only ever moves forward, and then the record decides.
func TestEvidence_MovesTheRecordForwardOnly(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const notPaid, reversed = pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED
	for i, test := range []struct {
		state   pb.InvoiceState // of the record, if any
		version int64
		by      pb.InvoiceState
		at      int64
		refused pb.RejectionReason
		after   string
	}{
		{0, 0, paid, 0, 0, "PAID 0"},
		{0, 0, paid, 7, 0, "PAID 7"},
		{0, 0, unpaid, 7, notPaid, ""},
		{0, 0, voided, 7, notPaid, ""},
		{unpaid, 5, paid, 0, notPaid, "OPEN 5"},
		{unpaid, 5, paid, 4, notPaid, "OPEN 5"},
		{unpaid, 5, paid, 5, notPaid, "OPEN 5"},
		{unpaid, 5, paid, 6, 0, "PAID 6"},
		{voided, 5, paid, 5, reversed, "VOIDED 5"},
		{voided, 5, paid, 6, 0, "PAID 6"},
		{refunded, 5, paid, 0, reversed, "REFUNDED 5"},
		{refunded, 5, paid, 9223372036854775807, 0, "PAID 9223372036854775807"},
		{paid, 5, paid, 0, 0, "PAID 5"},
		{paid, 5, paid, 4, 0, "PAID 5"},
		{paid, 5, paid, 5, 0, "PAID 5"},
		{paid, 5, paid, 6, 0, "PAID 6"},
		{paid, 5, unpaid, 6, notPaid, "PAID 5"},
		{paid, 5, refunded, 6, notPaid, "PAID 5"},
	} {
		invoice := "INV-" + strconv.Itoa(i)
		t.Run(fmt.Sprintf("record %v %d, evidence %v %d", test.state, test.version, test.by, test.at), func(t *testing.T) {
			if test.state != 0 {
				b.recordInvoice(t, "t1", invoice, test.state, test.version)
			}
			r := grant("t1", "K"+invoice, invoice, evidence(test.by, test.at))
			if test.refused != 0 {
				b.wantRejected(t, test.refused, r)
			} else {
				b.want(t, newly, byNothing, r)
				if got := value[int64](t, b, `SELECT invoice_version FROM entries WHERE operation_key = $1`, r.GetIdempotencyKey()); "PAID "+strconv.FormatInt(got, 10) != test.after {
					t.Errorf("the entry says invoice version %d, want that of %s", got, test.after)
				}
			}
			if got := b.invoice(t, "t1", invoice); got != test.after {
				t.Errorf("the record is %q, want %q", got, test.after)
			}
		})
	}
	b.wantWhole(t)
}

// GetEntitlement is a read of now, by id and by effect, and a tenant never finds another's.
func TestGetEntitlement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	e := b.want(t, newly, byNothing, grant("t1", "K", "INV-1")).GetEntitlement()
	byID := &pb.GetEntitlementRequest{TenantId: "t1", Name: &pb.GetEntitlementRequest_EntitlementId{EntitlementId: e.GetEntitlementId()}}
	byBusiness := &pb.GetEntitlementRequest{TenantId: "t1", Name: &pb.GetEntitlementRequest_BusinessKey{
		BusinessKey: &pb.BusinessKey{InvoiceId: "INV-1", EntitlementType: "team_access"},
	}}
	for _, r := range []*pb.GetEntitlementRequest{byID, byBusiness} {
		resp, err := b.GetEntitlement(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		wantSame(t, "the entitlement", resp.GetEntitlement(), e)
		r.TenantId = "t2"
		_, err = b.GetEntitlement(t.Context(), r)
		wantCode(t, "another tenant's look", err, codes.NotFound)
	}
}
