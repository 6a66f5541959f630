package acceptance_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// A batch of everything that can happen to an item: each has its own answer, at its own place, and no bad one sinks
// another.
func TestBatch_EachItemHasItsOwnAnswerInOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.recordInvoice(t, "t1", "INV-VOIDED", voided, 5)
	b.want(t, newly, byNothing, grant("t1", "old", "INV-OLD"))

	requests := []*pb.GrantEntitlementRequest{
		grant("t1", "K1", "INV-1"),
		grant("t1", "K 2", "INV-2"),
		grant("t1", "K1", "INV-1"),
		grant("t1", "K3", "INV-1"),
		grant("t1", "K1", "INV-1", seats("11")),
		grant("t1", "K4", "INV-1", seats("11")),
		grant("t2", "K1", "INV-1"),
		grant("t1", "K5", "INV-5", evidence(unpaid, 1)),
		grant("t1", "K6", "INV-VOIDED", evidence(paid, 5)),
		grant("t1", "old", "INV-OLD"),
		{},
		grant("t1", "K5", "INV-5"),
		grant("t1", "K4", "INV-4"),
	}
	want := []string{
		"NEWLY_APPLIED UNSPECIFIED",
		"REJECTED INVALID_REQUEST",
		"ALREADY_APPLIED IDEMPOTENCY_KEY",
		"ALREADY_APPLIED BUSINESS_KEY",
		"CONFLICTING_PAYLOAD IDEMPOTENCY_KEY",
		"CONFLICTING_PAYLOAD BUSINESS_KEY",
		"NEWLY_APPLIED UNSPECIFIED",
		"REJECTED INVOICE_NOT_PAID",
		"REJECTED INVOICE_REVERSED",
		"ALREADY_APPLIED IDEMPOTENCY_KEY",
		"REJECTED INVALID_REQUEST",
		"NEWLY_APPLIED UNSPECIFIED",
		"NEWLY_APPLIED UNSPECIFIED",
	}
	responses := b.batch(t, requests...)
	wantSame(t, "the answers", answers(responses), want)
	wantSame(t, "the later item's result", responses[2].GetEntitlement(), responses[0].GetEntitlement())
	if v := responses[1].GetRejection().GetViolations(); len(v) != 1 || v[0].GetField() != "idempotency_key" || v[0].GetDescription() == "" ||
		responses[1].GetRejection().GetRetry() != pb.RetryAdvice_RETRY_ADVICE_NEVER {
		t.Errorf("the malformed item: %v", responses[1])
	}
	var fields []string
	for _, v := range responses[10].GetRejection().GetViolations() {
		fields = append(fields, v.GetField())
	}
	wantSame(t, "what the empty item lacks", fields, []string{"idempotency_key", "grant", "invoice"})

	// The same batch again: each item is told what a single call would be.
	for i, r := range b.batch(t, requests...) {
		switch responses[i].GetOutcome() {
		case newly:
			if r.GetOutcome() != already || r.GetMatchedBy() != byKey {
				t.Errorf("item %d again: %s", i, told(r))
			}
			wantSame(t, "its result", r.GetEntitlement(), responses[i].GetEntitlement())
		case already:
			wantSame(t, "its result", r.GetEntitlement(), responses[i].GetEntitlement())
		}
	}
	b.wantWhole(t)
}

// answers are outcomes with what matched or why they were refused, as in the data file.
func answers(responses []*pb.GrantEntitlementResponse) []string {
	var all []string
	for _, r := range responses {
		detail := strings.TrimPrefix(r.GetMatchedBy().String(), "MATCHED_BY_")
		if r.GetRejection() != nil {
			detail = strings.TrimPrefix(r.GetRejection().GetReason().String(), "REJECTION_REASON_")
		}
		all = append(all, strings.TrimPrefix(r.GetOutcome().String(), "OUTCOME_")+" "+detail)
	}
	return all
}

// A caller that fills a batch with one request over and over: the first place wins, however many transactions that takes.
func TestBatch_SameKeyAndEffectManyTimes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var requests []*pb.GrantEntitlementRequest
	for i := range 100 {
		requests = append(requests, grant("t1", "K", "INV-1"), grant("t1", fmt.Sprintf("K%d", i), "INV-1"), grant("t1", "K", "INV-1", seats("11")))
	}
	for i, r := range b.batch(t, requests...) {
		outcome, by := already, byKey
		switch {
		case i == 0:
			outcome, by = newly, byNothing
		case i%3 == 1:
			by = byBusinessKey
		case i%3 == 2:
			outcome = conflict
		}
		if r.GetOutcome() != outcome || r.GetMatchedBy() != by {
			t.Fatalf("item %d: %s, want %v %v", i, told(r), outcome, by)
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != len(requests) {
		t.Errorf("%d attempts, want one for each item", n)
	}
	b.wantWhole(t)
}

// Items of one invoice carry evidence of several versions: the highest is recorded, wherever it stands.
func TestBatch_HighestEvidenceCounts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.recordInvoice(t, "t1", "INV-2", refunded, 5)
	responses := b.batch(t,
		grant("t1", "K1", "INV-1", ofType("a"), evidence(paid, 3)),
		grant("t1", "K2", "INV-1", ofType("b"), evidence(paid, 9)),
		grant("t1", "K3", "INV-1", ofType("c"), evidence(unpaid, 12)),
		grant("t1", "K4", "INV-1", ofType("d"), evidence(paid, 0)),
		grant("t1", "K5", "INV-2", evidence(paid, 5)),
	)
	wantSame(t, "the answers", answers(responses), []string{
		"NEWLY_APPLIED UNSPECIFIED", "NEWLY_APPLIED UNSPECIFIED", "REJECTED INVOICE_NOT_PAID", "NEWLY_APPLIED UNSPECIFIED",
		"REJECTED INVOICE_REVERSED",
	})
	wantSame(t, "the records", []string{b.invoice(t, "t1", "INV-1"), b.invoice(t, "t1", "INV-2")}, []string{"PAID 9", "REFUNDED 5"})
	b.wantWhole(t)
}

// The limits on a batch are those on the whole call: none of it is written when one is broken.
func TestBatch_Limits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	many := func(n int) *pb.BatchGrantEntitlementsRequest {
		batch := &pb.BatchGrantEntitlementsRequest{}
		for i := range n {
			batch.Requests = append(batch.Requests, grant("t1", fmt.Sprintf("K%d", i), fmt.Sprintf("INV-%d", i)))
		}
		return batch
	}
	large := batchOfBytes(t, 1<<20+1)
	for name, test := range map[string]*pb.BatchGrantEntitlementsRequest{
		"none": many(0), "1,001 items": many(1001), "a byte more than 1 MiB": large,
	} {
		_, err := b.BatchGrantEntitlements(t.Context(), test)
		wantViolations(t, name, err, "requests")
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != 0 {
		t.Errorf("%d attempts of refused batches", n)
	}
	for name, test := range map[string]*pb.BatchGrantEntitlementsRequest{
		"1,000 items": many(1000), "1 MiB": batchOfBytes(t, 1<<20),
	} {
		for i, r := range b.batch(t, test.GetRequests()...) {
			if r.GetOutcome() != newly {
				t.Fatalf("%s, item %d: %s", name, i, told(r))
			}
		}
	}
	b.wantWhole(t)
}

// batchOfBytes is a legal batch, but for its size perhaps.
func batchOfBytes(t testing.TB, size int) *pb.BatchGrantEntitlementsRequest {
	t.Helper()
	batch := &pb.BatchGrantEntitlementsRequest{}
	left := size
	add := func(r *pb.GrantEntitlementRequest) {
		batch.Requests = append(batch.Requests, r)
		left -= proto.Size(&pb.BatchGrantEntitlementsRequest{Requests: []*pb.GrantEntitlementRequest{r}})
	}
	for i := 0; left > 4000; i++ {
		add(grant("t2", fmt.Sprintf("K%d", i), fmt.Sprintf("INV-%d", i), largestScope('v')))
	}
	for i := 0; left > 1500; i++ {
		add(grant("t2", fmt.Sprintf("S%d", i), fmt.Sprintf("INV-S%d", i)))
	}
	last := grant("t2", "last", "INV-LAST", func(r *pb.GrantEntitlementRequest) { r.EventId = strings.Repeat("e", 50) })
	bytes := func() int {
		return proto.Size(&pb.BatchGrantEntitlementsRequest{Requests: []*pb.GrantEntitlementRequest{last}})
	}
	for n := 0; bytes() < left; n++ {
		last.Grant.Scope[fmt.Sprintf("pad%d", n/100)] += "x"
	}
	for bytes() > left {
		last.EventId = last.EventId[1:]
	}
	add(last)
	if got := proto.Size(batch); got != size {
		t.Fatalf("made a batch of %d bytes instead of %d", got, size)
	}
	return batch
}

// largestScope is the largest legal scope: 32 entries and 2 KiB. Scopes of two letters share no key.
func largestScope(letter byte) func(*pb.GrantEntitlementRequest) {
	return func(r *pb.GrantEntitlementRequest) {
		r.Grant.Scope = make(map[string]string)
		for i := range 32 {
			r.Grant.Scope[fmt.Sprintf("%c%02d", letter, i)] = strings.Repeat(string(letter), 61)
		}
	}
}

// A thousand conflicts, each with the largest stored scope and as much submitted as a batch can hold, would be an answer of
// more than the 4 MiB that every client accepts. Whoever sent it would never learn what happened to any item.
func TestBatch_AnswerFitsClients(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tenant := strings.Repeat("t", 128)
	key := func(i int) string { return fmt.Sprintf("%0200d", i) }
	stored := func(i int) *pb.GrantEntitlementRequest {
		return grant(tenant, key(i), fmt.Sprintf("%0128d", i), largestScope('a'), func(r *pb.GrantEntitlementRequest) {
			r.EventId, r.Source = strings.Repeat("e", 200), strings.Repeat("s", 200)
		})
	}
	for i := 0; i < 1000; i += 250 {
		var requests []*pb.GrantEntitlementRequest
		for j := i; j < i+250; j++ {
			requests = append(requests, stored(j))
		}
		for _, r := range b.batch(t, requests...) {
			if r.GetOutcome() != newly {
				t.Fatal(told(r))
			}
		}
	}
	var conflicting []*pb.GrantEntitlementRequest
	for i := range 1000 {
		conflicting = append(conflicting, grant(tenant, key(i), "I", func(r *pb.GrantEntitlementRequest) {
			r.Grant.EntitlementType = "x"
			r.Grant.Scope = make(map[string]string)
			for j := range 32 {
				r.Grant.Scope[fmt.Sprintf("b%02d", j)] = "123456789"
			}
		}))
	}
	resp, err := b.BatchGrantEntitlements(t.Context(), &pb.BatchGrantEntitlementsRequest{Requests: conflicting})
	if err != nil {
		t.Fatalf("the answer did not arrive: %v", err)
	}
	const differences = 2 + 32 + 32 // invoice, type, stored and submitted scope
	shortened := 0
	for i, r := range resp.GetResponses() {
		c := r.GetConflict()
		if r.GetOutcome() != conflict || c.GetStoredOperation().GetIdempotencyKey() != key(i) ||
			len(c.GetDifferences())+int(c.GetOmittedDifferences()) != differences {
			t.Fatalf("item %d: %v with %d differences and %d left out", i, r.GetOutcome(), len(c.GetDifferences()), c.GetOmittedDifferences())
		}
		if c.GetOmittedDifferences() > 0 {
			shortened++
		}
	}
	if size := proto.Size(resp); size > 4<<20 || shortened == 0 {
		t.Errorf("an answer of %d bytes, %d items shortened: not the case that this test is for", size, shortened)
	}

	// A single call leaves nothing out.
	single := b.want(t, conflict, byKey, conflicting[999])
	if c := single.GetConflict(); len(c.GetDifferences()) != differences || c.GetOmittedDifferences() != 0 {
		t.Errorf("a single call has %d differences", len(c.GetDifferences()))
	}
}

// The answer to a thousand items, all of them as malformed as a batch can hold, arrives too.
func TestBatch_AnswerToMalformedItemsFitsClients(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var requests []*pb.GrantEntitlementRequest
	for range 1000 {
		r := &pb.GrantEntitlementRequest{Grant: &pb.Grant{Scope: make(map[string]string)}, Invoice: &pb.InvoiceEvidence{Version: -1}}
		for j := range 90 {
			r.Grant.Scope[fmt.Sprintf("Ä%d", j)] = ""
		}
		requests = append(requests, r)
	}
	for i, r := range b.batch(t, requests...) {
		v := r.GetRejection().GetViolations()
		if r.GetRejection().GetReason() != pb.RejectionReason_REJECTION_REASON_INVALID_REQUEST || len(v) == 0 ||
			!strings.HasSuffix(v[len(v)-1].GetDescription(), "more violations are not listed.") {
			t.Fatalf("item %d: %v", i, r)
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != 0 {
		t.Errorf("%d attempts of malformed items", n)
	}
}

// What is larger than the server reads gets gRPC's own RESOURCE_EXHAUSTED, without our details, so that no policy retries it.
func TestBatch_BeyondTheMessageLimit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.BatchGrantEntitlements(t.Context(), batchOfBytes(t, 5<<20))
	wantCode(t, "a batch of 5 MiB", err, codes.ResourceExhausted)
	wantNoDetails(t, err)
}
