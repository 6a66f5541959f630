package acceptance_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// setupProxied is setup with a proxy between the store and PostgreSQL. The test's own SQL goes beside it.
func setupProxied(t testing.TB, changes ...func(*settings)) (*bundle, *postgresProxy) {
	t.Helper()
	direct := pgtest.New(t)
	proxy := serveProxyTo(t, direct)
	b := serveOn(t, proxy.url, direct, changes...)
	// The writer's session is made, so that the next COMMIT is the one of the next grant.
	b.want(t, newly, byNothing, grant("warm", "K", "INV"))
	return b, proxy
}

// The reply to COMMIT is lost. The money was taken and the entitlement is there, but nobody can know: an answer of "failed" would
// make somebody grant it by hand, and an answer of "granted" would be a guess. The caller is told to send it again, and the second
// call says ALREADY.
func TestCommit_ReplyLost(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fault{"the connection breaks": breakOff, "the network falls silent": fallSilent} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, proxy := setupProxied(t, func(s *settings) { s.store.CommitTimeout = 500 * time.Millisecond })
			reached := proxy.on("COMMIT", f)
			b.grantRetryable(t, codes.Unavailable, store.ReasonCommitUnknown, grant("t1", "K", "INV-1"))
			<-reached
			if n := value[int](t, b, `SELECT count(*) FROM entitlements WHERE tenant_id = 't1'`); n != 1 {
				t.Fatalf("%d entitlements after a COMMIT that was executed", n)
			}
			found := b.operation(t, byName("t1", "K", full))
			if found.GetOutcome() != already || len(found.GetAttempts()) != 1 {
				t.Errorf("the look-up: %v", found)
			}
			second := b.want(t, already, byKey, grant("t1", "K", "INV-1"))
			wantSame(t, "the result", second.GetEntitlement(), found.GetEntitlement())
			wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0", "2 1 0"})

			// In a batch, the items say so.
			reached = proxy.on("COMMIT", f)
			requests := []*pb.GrantEntitlementRequest{grant("t1", "K2", "INV-2"), grant("t1", "K3", "INV-3"), grant("t1", "K", "INV-1")}
			for i, r := range b.batch(t, requests...) {
				if r.GetOutcome() != retryable || r.GetFailure().GetReason() != store.ReasonCommitUnknown {
					t.Errorf("item %d: %s", i, told(r))
				}
			}
			<-reached
			for i, r := range b.batch(t, requests...) {
				if r.GetOutcome() != already || r.GetMatchedBy() != byKey {
					t.Errorf("item %d again: %s", i, told(r))
				}
			}
			b.wantWhole(t)
		})
	}
}

// The connection breaks before COMMIT was sent. Nothing can have happened, so the writer tries again by itself, and nobody is
// troubled.
func TestCommit_NeverSent(t *testing.T) {
	t.Parallel()
	b, proxy := setupProxied(t)
	reached := proxy.on("BEGIN", breakOff)
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	<-reached
	wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0"})
	b.wantWhole(t)
}

// With the client's retry policy, a lost reply is a pause and nothing else.
func TestCommit_ReplyLostIsRetriedByTheClient(t *testing.T) {
	t.Parallel()
	b, proxy := setupProxied(t)
	c := newClient(t, b.addr)
	reached := proxy.on("COMMIT", breakOff)
	resp, err := c.Grant(t.Context(), grant("t1", "K", "INV-1"))
	if err != nil || resp.GetOutcome() != already || resp.GetMatchedBy() != byKey {
		t.Errorf("the call: %v %v", resp, err)
	}
	<-reached
	b.wantWhole(t)
}

// The caller gives up after COMMIT was sent. The waiting ends, the commit does not, and nothing may cancel it.
func TestCommit_CallerLeavesMeanwhile(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		patience time.Duration
		code     codes.Code
	}{
		"cancelled": {time.Hour, codes.Canceled}, "deadline": {time.Second, codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, proxy := setupProxied(t)
			reached := proxy.on("COMMIT", holdBack)
			ctx, cancel := context.WithTimeout(t.Context(), test.patience)
			defer cancel()
			failed := make(chan error, 1)
			go func() {
				_, err := b.GrantEntitlement(ctx, grant("t1", "K", "INV-1"))
				failed <- err
			}()
			<-reached
			if test.code == codes.Canceled {
				cancel()
			}
			wantCode(t, "the caller that left", <-failed, test.code)
			proxy.release()
			b.want(t, already, byKey, grant("t1", "K", "INV-1"))
			wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"1 0 0", "2 1 0"})
			b.wantWhole(t)
		})
	}
}
