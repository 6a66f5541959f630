package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Result is what became of one item of a batch: as from Grant, a response or an error.
type Result struct {
	Response *entitlementv1.GrantEntitlementResponse
	Err      error
}

// GrantBatch grants many, 1,000 and 1 MiB at most, and returns one result for each request, in their order, also where the call
// failed. Items that got no answer (OUTCOME_RETRYABLE_FAILURE) are sent again, only these, with the same keys, up to 5 times in
// all.
//
// The error is nil if and only if every item was granted; else it wraps the errors of all items that were not. An empty batch
// makes no call.
func (c *Client) GrantBatch(ctx context.Context, reqs []*entitlementv1.GrantEntitlementRequest, opts ...grpc.CallOption) ([]Result, error) {
	results := make([]Result, len(reqs))
	open := make([]int, len(reqs))
	for i := range open {
		open[i] = i
	}
	for attempt := 1; len(open) > 0; attempt++ {
		batch := &entitlementv1.BatchGrantEntitlementsRequest{}
		for _, i := range open {
			batch.Requests = append(batch.Requests, reqs[i])
		}
		resp, err := c.service.BatchGrantEntitlements(ctx, batch, opts...)
		if err == nil && len(resp.GetResponses()) != len(open) {
			err = status.Errorf(codes.Internal, "%d answers to a batch of %d", len(resp.GetResponses()), len(open))
		}
		if err != nil {
			for _, i := range open {
				results[i].Err = callError(reqs[i].GetIdempotencyKey(), err)
			}
			break
		}
		var unanswered []int
		var delay time.Duration
		for n, i := range open {
			answer := resp.Responses[n]
			if err := answerError(reqs[i].GetIdempotencyKey(), answer); err != nil {
				results[i] = Result{Err: err}
				if retryable, ok := err.(*RetryableError); ok {
					unanswered = append(unanswered, i)
					delay = max(delay, retryable.Delay)
				}
				continue
			}
			results[i] = Result{Response: answer}
		}
		if open = unanswered; len(open) > 0 && (attempt == maxAttempts || !pause(ctx, delay, attempt)) {
			break
		}
	}
	return results, batchError(results)
}

// itemErrors are the errors of a batch's items that were not granted.
type itemErrors struct {
	errs  []error
	total int
}

func batchError(results []Result) error {
	e := itemErrors{total: len(results)}
	for i, r := range results {
		if r.Err != nil {
			e.errs = append(e.errs, fmt.Errorf("item %d: %w", i, r.Err))
		}
	}
	if e.errs == nil {
		return nil
	}
	return &e
}

func (e *itemErrors) Error() string {
	return fmt.Sprintf("%d of %d not granted, the first: %v", len(e.errs), e.total, e.errs[0])
}

func (e *itemErrors) Unwrap() []error { return e.errs }
