// Package client is what a caller of grantd needs beside the generated code: the retry policy, idempotency keys, and answers
// as Go errors, so that after
//
//	resp, err := c.Grant(ctx, req)
//
// a nil error means that the entitlement was granted, now or earlier, and every other answer is an error that errors.As
// tells apart:
//
//   - [*ConflictError]: the key, or the effect, was used with another payload. Do not retry; somebody has to look.
//   - [*RejectedError]: a business precondition failed. The key is not consumed; Retry says whether sending the same request
//     later can help.
//   - [*RetryableError]: no answer, after all retries. The effect may or may not be there. Send the same request again, with the
//     same key, for as long as it matters; [Client.Operation] tells without sending it.
//   - anything else is mostly a gRPC status, for example INVALID_ARGUMENT, which sending again does not change; status.Code and
//     status.Convert see through the error.
//
// # What is retried
//
// UNAVAILABLE is retried by gRPC's own retry policy, up to 5 attempts, after the delay that the server asks for; [ServiceConfig]
// holds the policy. Calls wait for a connection instead of failing without one, so that a restart of the server is a pause. All
// of that ends after 30 seconds, or with the context if that is sooner: give every call a deadline.
//
// RESOURCE_EXHAUSTED is sent again, up to 5 times in all, only when it says that it comes from grantd: gRPC uses the same code for
// messages that are too large, which no retry makes smaller. Where the server asks for more than 10 seconds, or for more than the
// context has left, the error is returned at once, with the delay in it.
//
// A retry sends the same request, and so the same key.
//
// # Tracing
//
// The request's key travels as the baggage member entitlement.idempotency_key, also when the application has no tracing. All
// else, the trace context and the application's own baggage, is sent as the application has configured OpenTelemetry's global
// propagator or otelgrpc's client handler, and otherwise not.
package client

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

//go:embed service_config.json
var serviceConfig string

// ServiceConfig is the gRPC service config that New uses, in JSON: the same in every language. The number of tokens in it is
// the highest that gRPC allows, because a restart cuts off every call in flight, and each of them takes one.
func ServiceConfig() string { return serviceConfig }

// Client calls grantd. It is safe for concurrent use.
type Client struct {
	service entitlementv1.EntitlementServiceClient
	close   func() error
}

// New returns a client for target, for example "dns:///grantd:50051"; it connects with the first call. Transport credentials are
// required among the options. Options given here win over the client's own.
func New(target string, opts ...grpc.DialOption) (*Client, error) {
	reconnect := backoff.DefaultConfig
	// gRPC's default grows to two minutes, in which a server that is back would not be noticed.
	reconnect.BaseDelay, reconnect.MaxDelay = 100*time.Millisecond, 3*time.Second
	own := []grpc.DialOption{
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 5 * time.Second}),
	}
	cc, err := grpc.NewClient(target, append(own, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("grantd: %w", err)
	}
	c := Wrap(cc)
	c.close = cc.Close
	return c, nil
}

// Wrap returns a client on a connection that the caller made and closes. It retries UNAVAILABLE only if the connection was made
// with grpc.WithDefaultServiceConfig(ServiceConfig()).
func Wrap(cc grpc.ClientConnInterface) *Client {
	return &Client{
		service: entitlementv1.NewEntitlementServiceClient(conn{cc}),
		close:   func() error { return nil },
	}
}

// Close closes the connection that New made.
func (c *Client) Close() error { return c.close() }

// Service is the generated client on the same connection: retries and baggage are the same, but answers are outcomes and statuses
// as the contract has them.
func (c *Client) Service() entitlementv1.EntitlementServiceClient { return c.service }

// Grant grants an entitlement. A nil error means that it was granted, by this call (OUTCOME_NEWLY_APPLIED) or by an earlier one
// (OUTCOME_ALREADY_APPLIED). That it still holds is another question: see the response's current_state. The request must not be
// changed while the call runs.
func (c *Client) Grant(ctx context.Context, req *entitlementv1.GrantEntitlementRequest, opts ...grpc.CallOption) (*entitlementv1.GrantEntitlementResponse, error) {
	return write(ctx, c.service.GrantEntitlement, req, opts)
}

// RecordInvoice moves the authority's record of an invoice forward; VOIDED and REFUNDED reverse its entitlements, which the response
// names. A nil error means that this version is on record, by this call or by an earlier one.
func (c *Client) RecordInvoice(ctx context.Context, req *entitlementv1.RecordInvoiceStateRequest, opts ...grpc.CallOption) (*entitlementv1.RecordInvoiceStateResponse, error) {
	return write(ctx, c.service.RecordInvoiceState, req, opts)
}

// Reverse takes an entitlement back. A nil error means that it was reversed, by this call or by an earlier one; see the response's
// current_state for whether it still is.
func (c *Client) Reverse(ctx context.Context, req *entitlementv1.ReverseEntitlementRequest, opts ...grpc.CallOption) (*entitlementv1.ReverseEntitlementResponse, error) {
	return write(ctx, c.service.ReverseEntitlement, req, opts)
}

// Reinstate gives a reversed entitlement back. A nil error means that it was reinstated, by this call or by an earlier one; see the
// response's current_state for whether it still is.
func (c *Client) Reinstate(ctx context.Context, req *entitlementv1.ReinstateEntitlementRequest, opts ...grpc.CallOption) (*entitlementv1.ReinstateEntitlementResponse, error) {
	return write(ctx, c.service.ReinstateEntitlement, req, opts)
}

// write calls one of the writes. The response is the zero Resp beside an error.
func write[Req interface{ GetIdempotencyKey() string }, Resp answer](
	ctx context.Context, call func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req, opts []grpc.CallOption,
) (resp Resp, err error) {
	got, err := call(ctx, req, opts...)
	if err != nil {
		return resp, callError(req.GetIdempotencyKey(), err)
	}
	if err := answerError(req.GetIdempotencyKey(), got); err != nil {
		return resp, err
	}
	return got, nil
}

// Operation looks up what a replay would be told, without sending it. Every outcome of a look-up is a nil error:
// OUTCOME_ALREADY_APPLIED, OUTCOME_CONFLICTING_PAYLOAD and OUTCOME_NOT_APPLIED.
func (c *Client) Operation(ctx context.Context, req *entitlementv1.GetOperationRequest, opts ...grpc.CallOption) (*entitlementv1.GetOperationResponse, error) {
	resp, err := c.service.GetOperation(ctx, req, opts...)
	if err != nil {
		return nil, callError("", err)
	}
	return resp, nil
}

// Entitlement returns one entitlement as it is now. The error has status NOT_FOUND when the tenant has no such entitlement.
func (c *Client) Entitlement(ctx context.Context, req *entitlementv1.GetEntitlementRequest, opts ...grpc.CallOption) (*entitlementv1.Entitlement, error) {
	resp, err := c.service.GetEntitlement(ctx, req, opts...)
	if err != nil {
		return nil, callError("", err)
	}
	return resp.GetEntitlement(), nil
}

// Check says whether a tenant holds an entitlement type. Held or not is the response's to say; both are a nil error.
func (c *Client) Check(ctx context.Context, req *entitlementv1.CheckEntitlementRequest, opts ...grpc.CallOption) (*entitlementv1.CheckEntitlementResponse, error) {
	resp, err := c.service.CheckEntitlement(ctx, req, opts...)
	if err != nil {
		return nil, callError("", err)
	}
	return resp, nil
}
