package client

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxAttempts is the policy's number too.
	maxAttempts    = 5
	initialBackoff = 200 * time.Millisecond
	// maxPause is the longest delay that a call sits out; beyond it, waiting is the application's to decide.
	maxPause = 10 * time.Second
)

// conn does what a service config cannot say: the key as baggage, and retries that depend on a status's details. It stands
// around the connection instead of among its interceptors, so that Wrap has it too, and the application's own
// interceptors see each attempt.
type conn struct{ grpc.ClientConnInterface }

func (c conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if keyed, ok := args.(interface{ GetIdempotencyKey() string }); ok {
		ctx = withKey(ctx, keyed.GetIdempotencyKey())
	}
	for attempt := 1; ; attempt++ {
		err := c.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
		if status.Code(err) != codes.ResourceExhausted || attempt == maxAttempts {
			return err
		}
		if failure := failureOf(err); !failure.ours || !pause(ctx, failure.delay, attempt) {
			return err
		}
	}
}

// pause waits for delay, or without one for a time that grows with the attempt, and a random part of it more. It reports false, at
// once, when that is too long to wait, and when the context ends.
func pause(ctx context.Context, delay time.Duration, attempt int) bool {
	if delay <= 0 {
		delay = initialBackoff << (attempt - 1)
	}
	if delay > maxPause {
		return false
	}
	delay += rand.N(delay/2 + 1)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < delay {
		return false
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
