package store_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

var (
	mail      = store.Destination{Name: "mail", Template: "welcome"}
	sameMail  = store.Destination{Name: "mail2", Template: "welcome"}
	otherMail = store.Destination{Name: "mail3", Template: "invoice"}
)

func telling(c *store.Command, recipient string) *store.Command {
	c.Notify = &store.Notify{Recipient: recipient, Locale: "en"}
	return c
}

// Two events ask for the same mail, through two replicas that send through different destinations; and so does a redelivery. There is
// one mail for each template and entry.
func TestNotifications_OnePerRecipientTemplateAndEntry(t *testing.T) {
	b := setup(t, to(mail, sameMail, otherMail))
	other := open(t, b.url, to(sameMail, otherMail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	want(t, other, telling(grant("t", "k", "i", "x"), "a@example.com"), already)
	want(t, other, telling(grant("t", "k2", "i", "x"), "b@example.com"), already)
	want(t, other, telling(grant("t", "k3", "i", "x"), "a@example.com"), already)
	if got := value[string](t, b.sql, `SELECT string_agg(template || '>' || recipient || '>' || destination, ' ' ORDER BY template) FROM notifications`); got != "invoice>a@example.com>mail3 welcome>a@example.com>mail" {
		t.Errorf("to be told: %s", got)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM all_deliveries`); n != 2 {
		t.Errorf("%d mails", n)
	}
	if n := value[int](t, b.sql, `SELECT count(*) FROM notifications_sent`); n != 0 {
		t.Errorf("%d were told before a mail was sent", n)
	}
	d := claimOne(t, b.Store, "mail")
	if d.Notify == nil || *d.Notify != (store.Notify{Recipient: "a@example.com", Locale: "en"}) || d.Template != "welcome" {
		t.Errorf("the mail is %+v of %q", d.Notify, d.Template)
	}
	settle(t, b.Store, store.Delivered, d)
	settle(t, b.Store, store.Delivered, d)
	if got := value[string](t, b.sql, `SELECT string_agg(template || '>' || recipient, ' ') FROM notifications_sent`); got != "welcome>a@example.com" {
		t.Errorf("told: %s", got)
	}
	wantOrder(t, rejected, isDelivered)(b.Redeliver(t.Context(), order(d)))

	// The constraint itself, whoever forgets to ask.
	_, err := b.sql.Exec(t.Context(), `INSERT INTO notifications SELECT tenant_id, entitlement_id, entry_number, template, recipient, 'fr', 'mail2', now() FROM notifications`)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.ConstraintName != "notifications_pkey" {
		t.Errorf("a second one: %v", err)
	}
}

// One refund takes back two entitlements: those are two events, and two mails.
func TestNotifications_EachEntryIsAnEvent(t *testing.T) {
	b := setup(t, to(mail))
	want(t, b.Store, telling(grant("t", "k1", "i", "x"), "a@example.com"), newly)
	want(t, b.Store, telling(grant("t", "k2", "i", "y"), "a@example.com"), newly)
	want(t, b.Store, telling(record("t", "refund", "i", refunded, 2), "b@example.com"), newly)
	want(t, b.Store, telling(record("t", "refund2", "i", refunded, 2), "b@example.com"), already)
	want(t, b.Store, telling(record("t", "paid", "i", paid, 3), "b@example.com"), newly)
	want(t, b.Store, telling(reinstate("t", "back", "i", "x"), "c@example.com"), newly)
	if n := value[int](t, b.sql, `SELECT count(*) FROM notifications`); n != 5 {
		t.Errorf("%d notifications, want five", n)
	}
}

// A worker was thought dead, and the operator had the mail sent again. Then it turns out that the first one did go out, before the
// second has.
func TestNotifications_WhoWasToldIsNotToldAgain(t *testing.T) {
	b := setup(t, to(mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	want(t, b.Store, telling(reverse("t", "r", "i", "x"), "a@example.com"), newly)
	d := claimOne(t, b.Store, "mail")
	leaseOut(t, b)
	claim(t, b.Store, "mail")
	wantState(t, b.Store, d, unknown)
	wantOrder(t, newly, 0)(b.Resolve(t.Context(), order(d), sendAgain))
	if lost := settle(t, b.Store, store.Delivered, d); len(lost) != 1 {
		t.Error("the result counts for the delivery")
	}
	if again := claim(t, b.Store, "mail"); len(again) != 0 {
		t.Fatal("the mail is sent twice")
	}
	wantState(t, b.Store, d, delivered)
	if next := claimOne(t, b.Store, "mail"); next.Event.Entry.Kind != pb.EntryKind_ENTRY_KIND_REVERSED {
		t.Errorf("next is %v", next.Event.Entry.Kind)
	}
}

func TestResolve_DeliveredIsTold(t *testing.T) {
	b := setup(t, to(mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	d := claimOne(t, b.Store, "mail")
	settle(t, b.Store, store.Unknown, d)
	wantOrder(t, newly, 0)(b.Resolve(t.Context(), order(d), arrived))
	if n := value[int](t, b.sql, `SELECT count(*) FROM notifications_sent`); n != 1 {
		t.Errorf("%d were told", n)
	}
}
