package acceptance_test

import (
	"strconv"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/server"
	"github.com/grantd/grantd/store"
)

// holdInvoiceSQL makes another session hold an invoice's row; ending the transaction lets it go.
const holdInvoiceSQL = `
INSERT INTO invoices (tenant_id, invoice_id, state, version, recorded_by, recorded_at)
VALUES ($1, $2, 2, 1, 'someone', clock_timestamp())`

// grantRetryable sends a grant that gets no answer, and checks everything that a caller may go by: code, reason, delay in the details and
// in the trailer, and the typed response. It returns the delay.
func (b *bundle) grantRetryable(t testing.TB, code codes.Code, reason string, r *pb.GrantEntitlementRequest) time.Duration {
	t.Helper()
	var trailer metadata.MD
	_, err := b.GrantEntitlement(t.Context(), r, grpc.Trailer(&trailer))
	return wantRetryable(t, code, reason, err, trailer, true)
}

func wantRetryable(t testing.TB, code codes.Code, reason string, err error, trailer metadata.MD, typed bool) time.Duration {
	t.Helper()
	wantCode(t, "the call", err, code)
	var info *errdetails.ErrorInfo
	var retry *errdetails.RetryInfo
	var answer *pb.GrantEntitlementResponse
	for _, detail := range status.Convert(err).Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			info = d
		case *errdetails.RetryInfo:
			retry = d
		case *pb.GrantEntitlementResponse:
			answer = d
		default:
			t.Errorf("an unforeseen detail: %v", detail)
		}
	}
	if info.GetReason() != reason || info.GetDomain() != server.ErrorDomain {
		t.Errorf("ErrorInfo: %v, want the reason %s", info, reason)
	}
	delay := retry.GetRetryDelay().AsDuration()
	if retry == nil || delay <= 0 || delay > 2*time.Minute {
		t.Errorf("RetryInfo: %v", retry)
	}
	if !typed {
		if answer != nil {
			t.Errorf("a look-up carries a response: %v", answer)
		}
	} else if answer.GetOutcome() != retryable || answer.GetFailure().GetReason() != reason ||
		answer.GetFailure().GetRetryDelay().AsDuration() != delay {
		t.Errorf("the typed response: %v", answer)
	} else {
		wantShape(t, answer)
	}
	pushback, parseErr := strconv.Atoi(first(trailer.Get("grpc-retry-pushback-ms")))
	if ms := time.Duration(pushback) * time.Millisecond; parseErr != nil || ms < delay || ms > delay+time.Millisecond {
		t.Errorf("pushback of %v, want the delay of %v", trailer, delay)
	}
	return delay
}

func first(all []string) string {
	if len(all) == 0 {
		return ""
	}
	return all[0]
}

// Overload: what the queue has no room for is turned away at once, as RESOURCE_EXHAUSTED, and is not lost: the same request is
// granted once there is room.
func TestRetryable_QueueFull(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) {
		s.store.QueueLimit = 1
		s.store.LockTimeout = 30 * time.Second // the committer itself waits
	})
	holder := b.begin(t)
	if _, err := holder.Exec(t.Context(), holdInvoiceSQL, "t1", "INV-0"); err != nil {
		t.Fatal(err)
	}
	blocked := b.start(t, grant("t1", "K0", "INV-0"))
	b.waitBlocked(t, 1)

	// One of two finds the queue's only place.
	one, other := b.start(t, grant("t1", "K1", "INV-1")), b.start(t, grant("t1", "K2", "INV-2"))
	var refused result
	var queued <-chan result
	var again *pb.GrantEntitlementRequest
	select {
	case refused = <-one:
		queued, again = other, grant("t1", "K1", "INV-1")
	case refused = <-other:
		queued, again = one, grant("t1", "K2", "INV-2")
	}
	wantRetryable(t, codes.ResourceExhausted, store.ReasonQueueFull, refused.err, refused.trailer, true)
	b.grantRetryable(t, codes.ResourceExhausted, store.ReasonQueueFull, grant("t1", "K3", "INV-3"))

	// In a batch the item says so, and the others have their answers.
	batch := b.batch(t, grant("t1", "K4", "INV-4"), grant("t1", "K5", "INV-5", func(r *pb.GrantEntitlementRequest) { r.Grant.TenantId = "" }))
	if f := batch[0].GetFailure(); batch[0].GetOutcome() != retryable || f.GetReason() != store.ReasonQueueFull || f.GetRetryDelay().AsDuration() <= 0 {
		t.Errorf("the batch item without room: %v", batch[0])
	}
	if batch[1].GetRejection().GetReason() != pb.RejectionReason_REJECTION_REASON_INVALID_REQUEST {
		t.Errorf("the malformed item: %v", batch[1])
	}

	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, call := range []<-chan result{blocked, queued} {
		if r := <-call; r.err != nil || r.resp.GetOutcome() != newly {
			t.Errorf("a call that waited: %v %v", r.resp, r.err)
		}
	}
	b.want(t, newly, byNothing, again)
	b.wantWhole(t)
}

// A row that another session holds for longer than the slow lane waits.
func TestRetryable_LockTimeout(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) { s.store.SlowLockTimeout = 50 * time.Millisecond })
	holder := b.begin(t)
	if _, err := holder.Exec(t.Context(), holdInvoiceSQL, "t1", "INV-1"); err != nil {
		t.Fatal(err)
	}
	b.grantRetryable(t, codes.Unavailable, store.ReasonLockTimeout, grant("t1", "K", "INV-1"))
	got := b.batch(t, grant("t1", "K", "INV-1"), grant("t1", "K2", "INV-2"))
	if got[0].GetFailure().GetReason() != store.ReasonLockTimeout || got[0].GetOutcome() != retryable {
		t.Errorf("the blocked item: %v", got[0])
	}
	if got[1].GetOutcome() != newly {
		t.Errorf("the item beside it: %v", got[1])
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
}

// A newer build wrote the payload under a recipe that this one does not know. It must neither grant again nor call it a
// conflict.
func TestRetryable_NewerRecipe(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.exec(t, `UPDATE operations SET recipe = 2`)
	b.exec(t, `UPDATE entitlements SET recipe = 2`)
	before := b.written(t)
	b.grantRetryable(t, codes.Unavailable, store.ReasonNewerRecipe, grant("t1", "K", "INV-1"))
	b.grantRetryable(t, codes.Unavailable, store.ReasonNewerRecipe, grant("t1", "K2", "INV-1"))
	look := byName("t1", "K", full)
	look.Grant = grant("t1", "K", "INV-1").GetGrant()
	var trailer metadata.MD
	_, err := b.GetOperation(t.Context(), look, grpc.Trailer(&trailer))
	wantRetryable(t, codes.Unavailable, store.ReasonNewerRecipe, err, trailer, false)
	got := b.batch(t, grant("t1", "K", "INV-1"), grant("t1", "K3", "INV-3"))
	if got[0].GetFailure().GetReason() != store.ReasonNewerRecipe || got[1].GetOutcome() != newly {
		t.Errorf("the batch: %v", got)
	}
	b.exec(t, `DELETE FROM operations WHERE idempotency_key = 'K3'`)
	b.exec(t, `DELETE FROM entitlements WHERE operation_key = 'K3'`)
	b.exec(t, `DELETE FROM entries WHERE operation_key = 'K3'`)
	b.exec(t, `DELETE FROM invoices WHERE recorded_by = 'K3'`)
	wantSame(t, "what is written", b.written(t), before)
}

// A call that comes in while the store is being closed is told to try again: another replica will answer.
func TestRetryable_ShuttingDown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.closeStore()
	b.grantRetryable(t, codes.Unavailable, store.ReasonShuttingDown, grant("t1", "K", "INV-1"))
}
