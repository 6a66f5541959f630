package client

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// errorDomain marks the google.rpc.ErrorInfo of statuses that grantd itself sends.
const errorDomain = "entitlement.v1"

// ConflictError says that the idempotency key, or the effect asked for, was used with another payload. Nothing changed. Its text
// names the fields that differ; their values are in Conflict only.
type ConflictError struct {
	// Key is the request's idempotency key.
	Key string
	// MatchedBy says whether the key or the business key was taken.
	MatchedBy entitlementv1.MatchedBy
	// Conflict holds every difference, and the operation that was there first.
	Conflict *entitlementv1.Conflict
}

func (e *ConflictError) Error() string {
	const most = 10
	var fields []string
	differences := e.Conflict.GetDifferences()
	for _, d := range differences[:min(most, len(differences))] {
		fields = append(fields, d.GetField())
	}
	text := strings.Join(fields, ", ")
	if more := len(differences) - len(fields) + int(e.Conflict.GetOmittedDifferences()); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	first := "the key was used before with another payload"
	if e.MatchedBy == entitlementv1.MatchedBy_MATCHED_BY_BUSINESS_KEY {
		first = fmt.Sprintf("key %q did this before with another payload", e.Conflict.GetStoredOperation().GetIdempotencyKey())
	}
	return fmt.Sprintf("grantd: key %q: conflict: %s; different: %s", e.Key, first, text)
}

// RejectedError says that a business precondition failed. Nothing changed, and the key is not consumed.
type RejectedError struct {
	// Key is the request's idempotency key.
	Key    string
	Reason entitlementv1.RejectionReason
	// Message is the reason for people.
	Message string
	// Retry says whether the same request can succeed later.
	Retry entitlementv1.RetryAdvice
	// Violations say what is malformed in an item of a batch, for REJECTION_REASON_INVALID_REQUEST.
	Violations []*entitlementv1.FieldViolation
}

func (e *RejectedError) Error() string {
	text := fmt.Sprintf("grantd: key %q: rejected: %s: %s", e.Key, strings.TrimPrefix(e.Reason.String(), "REJECTION_REASON_"), e.Message)
	for _, v := range e.Violations {
		text += fmt.Sprintf("; %s: %s", v.GetField(), v.GetDescription())
	}
	return text
}

// RetryableError says that there was no answer, after all retries, or before the context ended. The effect may or may not be
// there; sending the same request again, with the same key, is safe.
type RetryableError struct {
	// Key is the key to send again; empty for look-ups.
	Key string
	// Reason is the server's, for example QUEUE_FULL or COMMIT_UNKNOWN; empty when the failure was on the way.
	Reason string
	// Delay is how long the server asks to wait; 0 when it did not say.
	Delay time.Duration
	err   error
}

func (e *RetryableError) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("grantd: no answer, asking again is safe: %v", e.err)
	}
	return fmt.Sprintf("grantd: key %q: no answer, the effect may or may not be there, sending the same request with the same key is safe: %v", e.Key, e.err)
}

// Unwrap returns the gRPC status.
func (e *RetryableError) Unwrap() error { return e.err }

// answer is what the responses of all writes have in common.
type answer interface {
	GetOutcome() entitlementv1.Outcome
	GetMatchedBy() entitlementv1.MatchedBy
	GetConflict() *entitlementv1.Conflict
	GetRejection() *entitlementv1.Rejection
	GetFailure() *entitlementv1.RetryableFailure
}

// answerError makes an error of every answer that is not the effect.
func answerError(key string, resp answer) error {
	switch resp.GetOutcome() {
	case entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED:
		return nil
	case entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD:
		return &ConflictError{Key: key, MatchedBy: resp.GetMatchedBy(), Conflict: resp.GetConflict()}
	case entitlementv1.Outcome_OUTCOME_REJECTED:
		r := resp.GetRejection()
		return &RejectedError{Key: key, Reason: r.GetReason(), Message: r.GetMessage(), Retry: r.GetRetry(), Violations: r.GetViolations()}
	case entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE:
		f := resp.GetFailure()
		return &RetryableError{
			Key: key, Reason: f.GetReason(), Delay: f.GetRetryDelay().AsDuration(),
			err: status.Error(codes.Unavailable, f.GetReason()),
		}
	default:
		// Not an effect, whatever it is.
		return fmt.Errorf("grantd: key %q: unexpected outcome %s", key, resp.GetOutcome())
	}
}

// callError makes a RetryableError of statuses after which the same request may get an answer.
func callError(key string, err error) error {
	failure := failureOf(err)
	switch code := status.Code(err); {
	case code == codes.Unavailable, code == codes.DeadlineExceeded, code == codes.Canceled,
		code == codes.ResourceExhausted && failure.ours:
		return &RetryableError{Key: key, Reason: failure.reason, Delay: failure.delay, err: err}
	case key == "":
		return fmt.Errorf("grantd: %w", err)
	default:
		return fmt.Errorf("grantd: key %q: %w", key, err)
	}
}

// failure is what a status's details say of a retry.
type failure struct {
	// ours says that grantd sent the status, and not a proxy or gRPC itself.
	ours   bool
	reason string
	delay  time.Duration
}

func failureOf(err error) failure {
	var f failure
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				f.ours, f.reason = true, detail.GetReason()
			}
		case *errdetails.RetryInfo:
			f.delay = detail.GetRetryDelay().AsDuration()
		}
	}
	return f
}
