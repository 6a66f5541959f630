package acceptance_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// A refund took back a thousand entitlements with the largest scopes, and their deliveries failed with the longest texts. Support, who has
// nothing but a client's usual limit, must see the operation with its result all the same, and be told that this is not all.
func TestStory_FitsWhatClientsAccept(t *testing.T) {
	t.Parallel()
	const many = 1000
	o := setupOperated(t, store.Destination{Name: crm, Deduplicates: true})
	scope := make(map[string]string)
	for i := range 7 {
		scope[fmt.Sprintf("attribute%02d", i)] = strings.Repeat("é", 128)
	}
	tenant, invoice := strings.Repeat("t", 128), strings.Repeat("I", 128)
	for first := 0; first < many; first += 250 {
		batch := &pb.BatchGrantEntitlementsRequest{}
		for i := first; i < first+250; i++ {
			batch.Requests = append(batch.Requests, &pb.GrantEntitlementRequest{
				IdempotencyKey: fmt.Sprintf("%s%04d", strings.Repeat("k", 196), i),
				Grant: &pb.Grant{
					TenantId: tenant, InvoiceId: invoice, EntitlementType: fmt.Sprintf("%s%04d", strings.Repeat("x", 124), i), Scope: scope,
				},
				Invoice: &pb.InvoiceEvidence{State: paid, Version: 1},
			})
		}
		resp, err := o.BatchGrantEntitlements(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resp.GetResponses() {
			if r.GetOutcome() != newly {
				t.Fatalf("a grant: %v", r)
			}
		}
	}
	o.record(t, newly, byNothing, recording(tenant, "refund", invoice, refunded, 2))
	o.exec(t, `UPDATE deliveries SET attempts = 1, last_error = repeat('e', 1024), worker = 'w', started_at = now(), error = repeat('e', 1024),
		note = repeat('n', 1024) WHERE tenant_id <> ''`)

	found, err := o.GetOperation(t.Context(), &pb.GetOperationRequest{
		TenantId: tenant, Name: &pb.GetOperationRequest_IdempotencyKey{IdempotencyKey: "refund"}, View: pb.OperationView_OPERATION_VIEW_FULL,
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(found); n > 4<<20 {
		t.Errorf("%d bytes", n)
	}
	if !found.GetTruncated() || len(found.GetRecorded().GetReversed()) != many || len(found.GetAttempts()) != 1 {
		t.Errorf("truncated %v, %d reversed, %d attempts", found.GetTruncated(), len(found.GetRecorded().GetReversed()), len(found.GetAttempts()))
	}
	if len(found.GetEntries()) == 0 || len(found.GetDeliveries()) == 0 {
		t.Errorf("%d entries, %d deliveries are left", len(found.GetEntries()), len(found.GetDeliveries()))
	}
}
