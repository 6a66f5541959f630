package acceptance_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/migrations"
	"github.com/grantd/grantd/store"
)

// A failover tool sets the old primary read-only and leaves its sessions open. Whoever kept writing into such a session would fail
// for ever; whoever said NOT_APPLIED from it would invite a second grant elsewhere.
func TestReadOnlyPrimary(t *testing.T) {
	t.Parallel()
	pg := pgtest.StartServer(t, nil)
	url := pg.URL("postgres")
	if _, err := migrations.Up(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	b := serveOn(t, url, url)
	web := httptest.NewServer(b.server.HTTP())
	defer web.Close()
	health := healthpb.NewHealthClient(b.conn)
	serving := func() bool {
		for _, service := range []string{"", pb.EntitlementService_ServiceDesc.ServiceName} {
			resp, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
			if err != nil {
				t.Fatal(err)
			}
			if resp.GetStatus() != healthpb.HealthCheckResponse_SERVING {
				return false
			}
		}
		return true
	}
	ready := func() (int, string) {
		resp, err := http.Get(web.URL + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var answer struct{ Reason string }
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, answer.Reason
	}
	eventually(t, "health says SERVING", serving)
	first := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	writer := value[int](t, b, `SELECT pid FROM pg_stat_activity WHERE application_name = 'grantd' AND query = 'COMMIT'`)

	b.exec(t, `ALTER SYSTEM SET default_transaction_read_only = on`)
	b.exec(t, `SELECT pg_reload_conf()`)
	// A session takes note of it before its next statement, so the first call may still have been in time.
	eventually(t, "grants are refused", func() bool {
		_, err := b.GrantEntitlement(t.Context(), grant("t1", fmt.Sprintf("before-%d", time.Now().UnixNano()), fmt.Sprintf("INV-%d", time.Now().UnixNano())))
		return err != nil
	})
	for n := range 5 {
		var trailer metadata.MD
		_, err := b.GrantEntitlement(t.Context(), grant("t1", "K2", fmt.Sprintf("INV-2-%d", n)), grpc.Trailer(&trailer))
		reason := store.ReasonReadOnly
		if !strings.Contains(fmt.Sprint(err), reason) {
			reason = store.ReasonDatabaseUnavailable
		}
		wantRetryable(t, codes.Unavailable, reason, err, trailer, true)
	}
	for i, r := range b.batch(t, grant("t1", "K3", "INV-3"), grant("t1", "K4", "INV-4")) {
		if r.GetOutcome() != retryable {
			t.Errorf("batch item %d: %s", i, told(r))
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, writer); n != 0 {
		t.Error("the session to the read-only primary was kept")
	}
	eventually(t, "health says NOT_SERVING", func() bool { return !serving() })
	if code, reason := ready(); code != http.StatusServiceUnavailable || !strings.Contains(reason, "writable") {
		t.Errorf("readiness: %d %q", code, reason)
	}

	found := b.operation(t, byName("t1", "K", full))
	if found.GetOutcome() != already || len(found.GetAttempts()) != 1 {
		t.Errorf("what is there may be told: %v", found)
	}
	wantSame(t, "the stored result", found.GetEntitlement(), first.GetEntitlement())
	if _, err := b.GetEntitlement(t.Context(), &pb.GetEntitlementRequest{
		TenantId: "t1", Name: &pb.GetEntitlementRequest_EntitlementId{EntitlementId: first.GetEntitlement().GetEntitlementId()},
	}); err != nil {
		t.Errorf("a read of what is there: %v", err)
	}
	var trailer metadata.MD
	_, err := b.GetOperation(t.Context(), byName("t1", "K2", full), grpc.Trailer(&trailer))
	wantRetryable(t, codes.Unavailable, store.ReasonReadOnly, err, trailer, false)

	b.exec(t, `ALTER SYSTEM RESET default_transaction_read_only`)
	b.exec(t, `SELECT pg_reload_conf()`)
	eventually(t, "health says SERVING again", serving)
	b.want(t, newly, byNothing, grant("t1", "K2", "INV-2"))
	b.want(t, already, byKey, grant("t1", "K", "INV-1"))
	if code, reason := ready(); code != http.StatusOK {
		t.Errorf("readiness: %d %q", code, reason)
	}
	if found := b.operation(t, byName("t1", "never", full)); found.GetOutcome() != notApplied {
		t.Errorf("a look-up of nothing: %v", found)
	}
	b.wantWhole(t)
}

// PostgreSQL crashes under load and comes back. Nothing that was acknowledged is lost, nothing is there twice, and no caller is
// told anything but to try again.
func TestDatabaseCrash(t *testing.T) {
	t.Parallel()
	// What a crash of the server alone would lose is what was not yet written: fsync may stay off.
	pg := pgtest.StartServer(t, nil)
	url := pg.URL("postgres")
	if _, err := migrations.Up(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	b := serveOn(t, url, url)
	const callers, each = 8, 40
	granted := make([][]*pb.Entitlement, callers)
	var done atomic.Int64
	var working sync.WaitGroup
	request := func(i, n int) *pb.GrantEntitlementRequest {
		return grant(fmt.Sprintf("t%d", i), fmt.Sprintf("K%d", n), fmt.Sprintf("INV-%d", n))
	}
	for i := range callers {
		working.Go(func() {
			for n := range each {
				for {
					resp, err := b.GrantEntitlement(t.Context(), request(i, n))
					if status.Code(err) == codes.Unavailable {
						time.Sleep(5 * time.Millisecond)
						continue
					}
					if err != nil || resp.GetOutcome() != newly && resp.GetOutcome() != already {
						t.Errorf("a grant across the crash: %v %v", resp, err)
						return
					}
					granted[i] = append(granted[i], resp.GetEntitlement())
					done.Add(1)
					break
				}
			}
		})
	}
	eventually(t, "some grants are acknowledged", func() bool { return done.Load() >= callers*each/4 })
	if err := pg.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := pg.Restart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	working.Wait()
	for i := range callers {
		for n, e := range granted[i] {
			resp := b.want(t, already, byKey, request(i, n))
			wantSame(t, "what was acknowledged", resp.GetEntitlement(), e)
		}
	}
	if n := value[int](t, b, `SELECT count(*) FROM entitlements`); n != callers*each {
		t.Errorf("%d entitlements, want %d", n, callers*each)
	}
	b.wantWhole(t)
}
