package store_test

import (
	"context"
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// An operator has a delivery of unknown fate sent again, and while that is being claimed, the first call's result comes in after all. The
// claim moves the record of the first attempt at that moment: looked for at its new place first and then at its old one, it was found at
// neither, and what the operator should know, that it had arrived, was nowhere.
func TestSettle_LateResultFindsAnAttemptThatMoves(t *testing.T) {
	b := setup(t, to(ledger))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "ledger")
	settle(t, b.Store, store.Unknown, d)
	if a, err := b.Resolve(t.Context(), order(d), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil || a.Outcome != newly {
		t.Fatal(a, err)
	}
	tx, _ := begin(t, b.url)
	// As Claim does it.
	for _, sql := range []string{
		`INSERT INTO delivery_attempts (tenant_id, delivery_id, attempt_number, worker, started_at, ended_at, outcome, status_code, error, note)
		 SELECT tenant_id, delivery_id, attempts, worker, started_at, ended_at, outcome, status_code, error, note FROM deliveries WHERE tenant_id = 't'`,
		`UPDATE deliveries SET state = 2, attempts = 2, lease = gen_random_uuid(), leased_until = now() + interval '1 minute', started_at = now(),
		 ended_at = NULL, outcome = 0, status_code = 0, error = '', note = '' WHERE tenant_id = 't'`,
	} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	type answer struct {
		lost []*store.Delivery
		err  error
	}
	settled := make(chan answer, 1)
	go func() {
		lost, err := b.Settle(context.Background(), []store.DeliveryResult{{Delivery: d, Outcome: store.Delivered, StatusCode: 204}})
		settled <- answer{lost, err}
	}()
	eventually(t, b.sql, blockedSQL, 0.02)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := <-settled; a.err != nil || len(a.lost) != 1 {
		t.Fatal(a)
	}
	a := storyOf(t, b.Store, d).Attempts
	if len(a) != 2 || a[0].Outcome != pb.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DELIVERED || a[0].StatusCode != 204 || a[1].EndedAt != nil {
		t.Errorf("the attempts are %+v", a)
	}
}

// A worker is dead with the oldest deliveries in its hands, and their leases have just run out. Others have waited for an hour: the oldest
// of all that waits says so, and no alert is ended by a lease.
func TestBacklog_OldestDueBesideALeaseThatRanOut(t *testing.T) {
	b := setup(t, to(crm))
	want(t, b.Store, grant("t", "k1", "i1", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	want(t, b.Store, grant("t", "k2", "i2", "x"), newly)
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() - interval '2 hours' WHERE delivery_id = $1`, [16]byte(d.ID))
	exec(t, b.sql, `UPDATE deliveries SET due_at = now() - interval '1 hour' WHERE state = 1 AND tenant_id <> ''`)
	for _, until := range []string{"1 minute", "0 s"} {
		exec(t, b.sql, `UPDATE deliveries SET leased_until = clock_timestamp() + $1::text::interval WHERE state = 2`, until)
		if now, err := b.Backlog(t.Context(), "crm"); err != nil || now.OldestDue < time.Hour {
			t.Errorf("with a lease of %s more, due for %v, %v", until, now.OldestDue, err)
		}
	}
}

// What is claimed says how large its body is, whoever made it and whatever else had to be read.
func TestClaim_SaysHowLargeTheBodyIs(t *testing.T) {
	made := store.Destination{Name: "made", Deduplicates: true, Render: body}
	b := setup(t, to(crm, made, mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	for _, name := range []string{"crm", "made", "mail"} {
		for range 2 {
			d := claimOne(t, b.Store, name)
			if len(d.Body) == 0 || d.BodyBytes != int64(len(d.Body)) {
				t.Errorf("%s, attempt %d: a body of %d bytes is said to have %d", name, d.Attempts, len(d.Body), d.BodyBytes)
			}
			settle(t, b.Store, store.RetryAt, d)
		}
	}
}

// A mail is sent again by an operator's order, and then the first call turns out to have told the recipient, while the second one's worker
// is silent. The delivery is settled for that; what the second call came to is recorded with it all the same.
func TestClaim_SparedCallMayStillTell(t *testing.T) {
	b := setup(t, to(mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	first := claimOne(t, b.Store, "mail")
	settle(t, b.Store, store.Unknown, first)
	if a, err := b.Resolve(t.Context(), order(first), pb.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN); err != nil || a.Outcome != newly {
		t.Fatal(a, err)
	}
	second := claimOne(t, b.Store, "mail")
	settle(t, b.Store, store.Delivered, first)
	leaseOut(t, b)
	if again := claim(t, b.Store, "mail"); len(again) != 0 {
		t.Fatal("told again")
	}
	wantState(t, b.Store, second, delivered)
	settle(t, b.Store, store.Dead, second)
	wantState(t, b.Store, second, delivered)
	if a := storyOf(t, b.Store, second).Attempts; len(a) != 2 || a[1].EndedAt == nil || a[1].Outcome != pb.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_DEAD {
		t.Errorf("the attempts are %+v", a)
	}
}
