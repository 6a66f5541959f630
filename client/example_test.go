package client_test

import (
	"context"
	"errors"
	"log"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// An invoice was paid; the event that says so may arrive again at any time.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()

	c, err := client.New("localhost:50051", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	grant := &entitlementv1.Grant{
		TenantId:        "acme",
		InvoiceId:       "INV-A",
		EntitlementType: "team_access",
		Scope:           map[string]string{"seats": "10"},
	}
	key, err := client.GrantKey("billing", grant) // billing:grant:INV-A:team_access
	if err != nil {
		log.Fatal(err)
	}

	resp, err := c.Grant(ctx, &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: key,
		Grant:          grant,
		Invoice:        &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
		EventId:        "evt_1",
		Source:         "stripe",
	})
	var conflict *client.ConflictError
	var rejected *client.RejectedError
	var retryable *client.RetryableError
	switch {
	case err == nil: // granted, now or by an earlier arrival of the event; current_state says whether it was taken back since
		log.Println(resp.GetOutcome(), resp.GetEntitlement().GetEntitlementId(), resp.GetCurrentState())
	case errors.As(err, &conflict): // another payload was granted first: somebody has to look
		log.Println(err, conflict.Conflict.GetDifferences())
	case errors.As(err, &rejected): // for example INVOICE_NOT_PAID: try again once it is
		log.Println(err, rejected.Retry)
	case errors.As(err, &retryable): // leave the event in its queue: the same key is safe
		log.Println(err, retryable.Delay)
	default: // a malformed request, or a bug
		log.Println(err)
	}
}
