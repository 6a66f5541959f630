package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// explainCmd is `grantd explain`.
type explainCmd struct {
	Target           target        `embed:""`
	Tenant           string        `required:"" help:"The tenant." env:"GRANTD_EXPLAIN_TENANT"`
	Key              string        `xor:"name" help:"The idempotency key, also one that only came second or was refused." env:"GRANTD_EXPLAIN_KEY"`
	Event            string        `xor:"name" help:"The event's id, as callers passed it on; it may have led to several operations." env:"GRANTD_EXPLAIN_EVENT"`
	Invoice          string        `xor:"name" help:"The invoice: all that happened to it, or with --type what happened to one effect." env:"GRANTD_EXPLAIN_INVOICE"`
	Type             string        `help:"The entitlement type, with --invoice." env:"GRANTD_EXPLAIN_TYPE"`
	OperationVersion int64         `help:"The operation version, with --type; not 0 for repeatable types alone." default:"0" env:"GRANTD_EXPLAIN_OPERATION_VERSION"`
	Limit            int           `help:"How many stories at most, with --event or --invoice." default:"20" env:"GRANTD_EXPLAIN_LIMIT"`
	JSON             bool          `name:"json" help:"Print the server's answers as JSON." env:"GRANTD_EXPLAIN_JSON"`
	Timeout          time.Duration `help:"Longest time for all of it." default:"30s" env:"GRANTD_EXPLAIN_TIMEOUT"`
}

func (c *explainCmd) run(ctx context.Context, io stdio) error {
	switch {
	case c.Key == "" && c.Event == "" && c.Invoice == "":
		return errors.New("--key, --event or --invoice says what to explain")
	case c.Type != "" && c.Invoice == "":
		return errors.New("--type goes with --invoice")
	case c.OperationVersion != 0 && c.Type == "":
		return errors.New("--operation-version goes with --invoice and --type")
	case c.Limit < 1:
		return errors.New("--limit must be positive")
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	conn, err := c.Target.dial(ctx, grpc.WithDefaultServiceConfig(client.ServiceConfig()))
	if err != nil {
		return err
	}
	defer conn.Close()
	stories, more, err := c.find(ctx, entitlementv1.NewEntitlementServiceClient(conn))
	if err != nil {
		return err
	}
	if c.JSON {
		err = writeStoriesJSON(io.stdout, stories, more)
	} else {
		err = writeStories(io.stdout, c, newFollowUps(io, &c.Target, c.Tenant), stories, more)
	}
	if err == nil && !known(stories) {
		err = c.nothing()
	}
	return err
}

// find returns the stories that the flags name, and whether there are more.
func (c *explainCmd) find(ctx context.Context, service entitlementv1.EntitlementServiceClient) ([]story, bool, error) {
	if c.lists() {
		return c.findListed(ctx, service)
	}
	request := &entitlementv1.GetOperationRequest{TenantId: c.Tenant, View: entitlementv1.OperationView_OPERATION_VIEW_FULL}
	if c.Key != "" {
		request.Name = &entitlementv1.GetOperationRequest_IdempotencyKey{IdempotencyKey: c.Key}
	} else {
		request.Name = &entitlementv1.GetOperationRequest_BusinessKey{BusinessKey: &entitlementv1.BusinessKey{
			InvoiceId: c.Invoice, EntitlementType: c.Type, OperationVersion: c.OperationVersion,
		}}
	}
	found, err := service.GetOperation(ctx, request)
	return []story{{key: c.Key, found: found}}, false, err
}

// lists says whether the flags name what may have led to several operations.
func (c *explainCmd) lists() bool { return c.Event != "" || c.Invoice != "" && c.Type == "" }

// findListed tells each operation once, whichever of its keys the event or the invoice came under.
func (c *explainCmd) findListed(ctx context.Context, service entitlementv1.EntitlementServiceClient) (stories []story, more bool, err error) {
	list := &entitlementv1.ListOperationsRequest{TenantId: c.Tenant}
	if c.Event != "" {
		list.Filter = &entitlementv1.ListOperationsRequest_EventId{EventId: c.Event}
	} else {
		list.Filter = &entitlementv1.ListOperationsRequest_InvoiceId{InvoiceId: c.Invoice}
	}
	told := make(map[string]bool)
	for {
		page, err := service.ListOperations(ctx, list)
		if err != nil {
			return nil, false, err
		}
		for _, l := range page.GetOperations() {
			winner := l.GetIdempotencyKey()
			if l.GetOperation() != nil {
				winner = l.GetOperation().GetIdempotencyKey()
			}
			if told[winner] {
				continue
			}
			if len(stories) == c.Limit {
				return stories, true, nil
			}
			told[winner] = true
			found, err := service.GetOperation(ctx, &entitlementv1.GetOperationRequest{
				TenantId: c.Tenant, Name: &entitlementv1.GetOperationRequest_IdempotencyKey{IdempotencyKey: l.GetIdempotencyKey()},
				View: entitlementv1.OperationView_OPERATION_VIEW_FULL,
			})
			if err != nil {
				return nil, false, err
			}
			stories = append(stories, story{key: l.GetIdempotencyKey(), found: found})
		}
		if list.PageToken = page.GetNextPageToken(); list.GetPageToken() == "" {
			return stories, false, nil
		}
	}
}

// known says whether anything happened at all.
func known(stories []story) bool {
	for i := range stories {
		if stories[i].found.GetOperation() != nil || len(stories[i].found.GetAttempts()) > 0 {
			return true
		}
	}
	return false
}

// nothing is the error for what nobody has heard of.
func (c *explainCmd) nothing() error {
	const kept = "attempts are kept for the service's attempt retention, 30 days unless configured"
	switch {
	case c.Event != "":
		return fmt.Errorf("nothing is known of event %s of tenant %s: no attempt that carried it is kept (%s)", strconv.Quote(c.Event), c.Tenant, kept)
	case c.Key != "":
		return fmt.Errorf("nothing is known of key %s of tenant %s: no operation is committed and no attempt is kept (%s); "+
			"a call may still be in flight, and sending the request under this key is safe", c.Key, c.Tenant, kept)
	case c.lists():
		return fmt.Errorf("nothing is known of invoice %s of tenant %s: no operation is committed and no attempt is kept (%s)", c.Invoice, c.Tenant, kept)
	}
	return fmt.Errorf("nothing is known of invoice %s, type %s, operation version %d of tenant %s: nothing was granted and no attempt is kept (%s); "+
		"a call may still be in flight, and sending the request is safe", c.Invoice, c.Type, c.OperationVersion, c.Tenant, kept)
}
