package store_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// The ledger is held by privileges, not by good will: a bug in the service, or somebody at its prompt, cannot rewrite it.
func TestPrivileges_TheServiceCannotRewrite(t *testing.T) {
	b := setup(t, to(crm, mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "a@example.com"), newly)
	service := connect(t, b.url)
	exec(t, service, `SET ROLE grantd_service`)
	for _, sql := range []string{
		`UPDATE entries SET reason = 'other'`,
		`DELETE FROM entries`,
		`TRUNCATE entries`,
		`UPDATE entitlements SET scope = '{"seats": "99"}'`,
		`UPDATE entitlements SET quantity = 99`,
		`UPDATE entitlements SET expires_at = NULL`,
		`UPDATE entitlements SET fingerprint = ''`,
		`UPDATE entitlements SET tenant_id = 'u'`,
		`UPDATE entitlements SET operation_key = 'k2'`,
		`DELETE FROM entitlements`,
		`UPDATE operations SET owner_key = 'k2'`,
		`UPDATE operations SET fingerprint = ''`,
		`DELETE FROM operations`,
		`DELETE FROM operations WHERE owner_key IS NOT NULL`,
		`TRUNCATE operations`,
		`DELETE FROM invoices`,
		`ALTER TABLE entries ADD COLUMN more text`,
		`DROP TABLE entries`,
		`UPDATE deliveries SET delivery_id = gen_random_uuid()`,
		`UPDATE deliveries SET destination = 'other'`,
		`UPDATE deliveries SET entry_number = 2`,
		`UPDATE settled_deliveries SET delivery_id = gen_random_uuid()`,
		`UPDATE settled_deliveries SET state = 6`,
		`UPDATE delivery_attempts SET attempt_number = 2`,
		`UPDATE operator_actions SET actor = 'somebody else'`,
		`DELETE FROM operator_actions`,
		`UPDATE notifications SET recipient = 'b@example.com'`,
		`DELETE FROM notifications`,
		`UPDATE notifications_sent SET sent_at = now()`,
		`DELETE FROM notifications_sent`,
	} {
		_, err := service.Exec(t.Context(), sql)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: %v, want insufficient_privilege", sql, err)
		}
	}
	// What it does need works, so that the refusals above are not those of a role that can do nothing.
	exec(t, service, `UPDATE entitlements SET state = state, version = version, changed_at = changed_at`)
	exec(t, service, `SELECT FROM entries`)
}
