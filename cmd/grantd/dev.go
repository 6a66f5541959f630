package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev"
	"github.com/grantd/grantd/migrations"
)

// devCmd is `grantd dev`.
type devCmd struct {
	DataDir string `type:"path" help:"Where the private PostgreSQL keeps its data across restarts; a folder of the user's when empty." env:"GRANTD_DATA_DIR"`
	PGBin   string `name:"pg-bin" type:"path" help:"Folder of PostgreSQL's programs; found on the machine when empty." env:"GRANTD_PG_BIN"`
	Sample  bool   `default:"true" negatable:"" help:"Send one invoice-paid event twice at the start." env:"GRANTD_SAMPLE"`

	NATS     bool   `name:"nats" default:"true" negatable:"" help:"Run a NATS server with JetStream, and send it every event." env:"GRANTD_NATS"`
	NATSAddr string `name:"nats-addr" default:"127.0.0.1:4222" help:"Its address, on loopback; another port where this one is taken." env:"GRANTD_NATS_ADDR"`
	Webhook  bool   `default:"true" negatable:"" help:"Run a webhook receiver that prints every event it gets." env:"GRANTD_WEBHOOK"`

	service `embed:""`
}

func (c *devCmd) run(ctx context.Context, io stdio) (err error) {
	if c.TLSCert != "" || c.TLSKey != "" || c.ClientCA != "" {
		return errors.New("dev serves plaintext; --tls-cert, --tls-key and --client-ca are for serve")
	}
	dir := c.DataDir
	if dir == "" {
		if dir, err = pgdev.DefaultDataDir(); err != nil {
			return err
		}
	}
	pg, err := pgdev.Start(ctx, pgdev.Options{DataDir: dir, BinDir: c.PGBin, Log: io.stderr})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := pg.Stop(); err == nil {
			err = stopErr
		}
	}()
	url := pg.URL("postgres")
	if _, err := migrations.Up(ctx, url); err != nil {
		return err
	}
	fmt.Fprintf(io.stdout, "PostgreSQL %d, data in %s\n  psql '%s'\n", pg.Version(), dir, url)

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ended := fmt.Errorf("the private PostgreSQL ended; its log is in %s", dir)
	go func() {
		select {
		case <-pg.Done():
			stop(ended)
		case <-ctx.Done():
		}
	}()
	io.stdout = &lockedWriter{out: io.stdout}
	local, stopLocal, err := c.localDestinations(dir, io)
	if err != nil {
		return err
	}
	defer stopLocal()
	err = c.serve(ctx, url, local, io, func(at addresses) error {
		fmt.Fprintf(io.stdout, "gRPC on %s (plaintext), HTTP on http://%s: /livez /readyz /metrics\n", at.grpc, at.http)
		if c.Sample {
			return c.sendSample(ctx, io, at.grpc)
		}
		return nil
	})
	// A signal is a cause too, and no error.
	if err == nil && context.Cause(ctx) == ended {
		err = ended
	}
	return err
}

// sampleTimeout bounds the two calls at the start.
const sampleTimeout = 30 * time.Second

// sendSample sends one invoice-paid event twice, and prints what to do next with the same event.
func (c *devCmd) sendSample(ctx context.Context, io stdio, addr string) error {
	stopped := ctx
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultServiceConfig(client.ServiceConfig()))
	if err != nil {
		return err
	}
	defer conn.Close()
	invoice := "INV-" + rand.Text()[:8]
	request := &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: "billing:grant:" + invoice + ":team_access",
		Grant: &entitlementv1.Grant{
			TenantId: "demo", InvoiceId: invoice, EntitlementType: "team_access", Scope: map[string]string{"seats": "10"},
		},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
		Source:  "billing",
	}
	fmt.Fprintf(io.stdout, "\nOne invoice-paid event, %s, delivered twice:\n", invoice)
	for _, event := range []string{"evt_first", "evt_again"} {
		request.EventId = event
		r, err := entitlementv1.NewEntitlementServiceClient(conn).GrantEntitlement(ctx, request)
		if stopped.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the sample event: %w", err)
		}
		if r.GetRejection() != nil {
			// A catalogue without the type, for example.
			fmt.Fprintf(io.stdout, "  %s  %s: %s\n", event, r.GetOutcome(), r.GetRejection().GetMessage())
			return nil
		}
		fmt.Fprintf(io.stdout, "  %s  %-24s entitlement %s\n", event, r.GetOutcome(), r.GetEntitlement().GetEntitlementId())
	}
	fmt.Fprintf(io.stdout, sampleText, addr, invoice)
	return nil
}

// sampleText takes the address and the invoice.
const sampleText = `
Go on with it (grpcurl: go install github.com/fullstorydev/grpcurl/cmd/grpcurl@latest).

A third arrival is answered OUTCOME_ALREADY_APPLIED:
  grpcurl -plaintext -d '{"idempotencyKey":"billing:grant:%[2]s:team_access","grant":{"tenantId":"demo","invoiceId":"%[2]s","entitlementType":"team_access","scope":{"seats":"10"}},"invoice":{"state":"INVOICE_STATE_PAID","version":"1"}}' %[1]s entitlement.v1.EntitlementService/GrantEntitlement

Another payload under the same key is OUTCOME_CONFLICTING_PAYLOAD, and changes nothing:
  grpcurl -plaintext -d '{"idempotencyKey":"billing:grant:%[2]s:team_access","grant":{"tenantId":"demo","invoiceId":"%[2]s","entitlementType":"team_access","scope":{"seats":"500"}},"invoice":{"state":"INVOICE_STATE_PAID","version":"1"}}' %[1]s entitlement.v1.EntitlementService/GrantEntitlement

What happened to every attempt, and to every event on its way out:
  grpcurl -plaintext -d '{"tenantId":"demo","idempotencyKey":"billing:grant:%[2]s:team_access","view":"OPERATION_VIEW_FULL"}' %[1]s entitlement.v1.EntitlementService/GetOperation

The same as a story, in the order of time:
  go run ./cmd/grantd explain --addr %[1]s --tenant demo --key billing:grant:%[2]s:team_access

`
