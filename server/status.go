package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grantd/grantd/store"
)

// ErrorDomain is the google.rpc.ErrorInfo.domain of every error with a reason. It tells a client that an UNAVAILABLE or
// RESOURCE_EXHAUSTED is grantd's own, and not a proxy's or the transport's.
const ErrorDomain = "entitlement.v1"

const (
	// maxStatusBytes bounds a status with its message and details. It travels in base64 in one header, beside the message,
	// and proxies commonly allow 8 KB for all of them.
	maxStatusBytes = 4 << 10
	// statusFrameBytes is what a status with a BadRequest takes beside its message and violations.
	statusFrameBytes = 128
)

// statusOf turns an error of the store into the status that the caller gets. It is INTERNAL, with nothing of the error in it,
// for whatever is not foreseen; the log has it whole.
func statusOf(ctx context.Context, err error, log *slog.Logger) error {
	return typedStatus(ctx, err, log, untyped)
}

// untyped stands for the typed response of RPCs whose response has no outcome.
func untyped(*store.Failure) proto.Message { return nil }

// typedStatus is statusOf for an RPC whose response has an outcome: a retryable failure carries the response that typed makes of it.
func typedStatus(ctx context.Context, err error, log *slog.Logger, typed func(*store.Failure) proto.Message) error {
	if err == nil {
		return nil
	}
	method, _ := grpc.Method(ctx)
	failure, retry := errors.AsType[*store.Failure](err)
	deadline, canceled := errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled)
	if !retry && (deadline || canceled) && ctx.Err() == nil {
		// A time limit of the service's own, on connecting for example: the caller's deadline has not passed.
		failure, retry = &store.Failure{Reason: store.ReasonDatabaseUnavailable, RetryDelay: time.Second}, true
	}
	switch {
	case retry:
		// An outage brings one of these per call, so they are no louder than this.
		log.DebugContext(ctx, "no answer from the database", "method", method, "error", err)
		describeFailure(trace.SpanFromContext(ctx), failure)
		pushback(ctx, failure)
		return retryable(failure, typed(failure))
	case errors.Is(err, store.ErrNotFound):
		return status.Error(codes.NotFound, "no such entitlement")
	case deadline:
		return status.Error(codes.DeadlineExceeded, "the deadline passed first; the same request is safe to send again")
	case canceled:
		return status.Error(codes.Canceled, "the call was cancelled; the same request is safe to send again")
	}
	log.ErrorContext(ctx, "internal error", "method", method, "error", err)
	return status.Error(codes.Internal, "internal error; the log of the service has it")
}

// invalid is INVALID_ARGUMENT with the violations, of which there must be one at least, as google.rpc.BadRequest. If they do not
// all fit into 4 KiB, the last one has an empty field and says how many are left out.
func invalid(v violations) error {
	first := v.kept[0]
	message := first.rule
	if first.field != "" {
		message = first.field + ": " + message
	}
	if more := len(v.kept) + v.omitted - 1; more > 0 {
		message += fmt.Sprintf(" (and %d more)", more)
	}
	bad := &errdetails.BadRequest{}
	for _, one := range v.within(maxStatusBytes - statusFrameBytes - len(message)) {
		bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field:       one.field,
			Description: one.rule,
		})
	}
	return withDetails(codes.InvalidArgument, message, bad)
}

// retryable is UNAVAILABLE, or RESOURCE_EXHAUSTED under overload, with google.rpc.ErrorInfo, google.rpc.RetryInfo and the typed
// response, if there is one.
func retryable(f *store.Failure, typed proto.Message) error {
	code, message := codes.Unavailable, "no answer from the database"
	if f.Overload {
		code, message = codes.ResourceExhausted, "too many requests are waiting"
	}
	details := []proto.Message{
		&errdetails.ErrorInfo{Reason: f.Reason, Domain: ErrorDomain},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(max(f.RetryDelay, 0))},
	}
	if typed != nil {
		details = append(details, typed)
	}
	return withDetails(code, message+" ("+f.Reason+"); the same request is safe to send again", details...)
}

// pushback tells gRPC's own retry policy how long to wait, in whole milliseconds. A negative number would forbid the retry.
func pushback(ctx context.Context, f *store.Failure) {
	delay := (max(f.RetryDelay, 0) + time.Millisecond - 1) / time.Millisecond
	// It fails only where there is no call to attach it to, or its answer is gone already.
	_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", strconv.FormatInt(int64(delay), 10)))
}

func withDetails(code codes.Code, message string, details ...proto.Message) error {
	s := &spb.Status{Code: int32(code), Message: message}
	for _, detail := range details {
		packed, err := anypb.New(detail)
		if err != nil {
			// Invalid UTF-8 alone can do this, and the code is worth more than the detail.
			continue
		}
		s.Details = append(s.Details, packed)
	}
	return status.ErrorProto(s)
}
