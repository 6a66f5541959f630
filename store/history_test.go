package store_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/store"
)

// ledgerRules select what contradicts the ledger; each must select nothing.
var ledgerRules = map[string]string{
	"an entitlement whose state or version is not its last entry's": `
SELECT e.invoice_id || '/' || e.entitlement_type FROM entitlements e
  LEFT JOIN LATERAL (SELECT * FROM entries n WHERE (n.tenant_id, n.entitlement_id) = (e.tenant_id, e.entitlement_id)
                      ORDER BY entry_number DESC LIMIT 1) n ON true
 WHERE n.entry_number IS DISTINCT FROM e.version OR n.at IS DISTINCT FROM e.changed_at
    OR e.state <> CASE n.kind WHEN 2 THEN 2 ELSE 1 END`,
	"a ledger with a gap": `
SELECT entitlement_id::text FROM entries GROUP BY tenant_id, entitlement_id
HAVING min(entry_number) <> 1 OR max(entry_number) <> count(*)`,
	"a ledger out of turn or of time": `
SELECT b.operation_key FROM entries a JOIN entries b ON (b.tenant_id, b.entitlement_id, b.entry_number) = (a.tenant_id, a.entitlement_id, a.entry_number + 1)
 WHERE b.at < a.at OR (a.kind = 2) = (b.kind = 2)`,
	"an entry without its operation": `
SELECT n.operation_key FROM entries n LEFT JOIN operations o ON (o.tenant_id, o.idempotency_key) = (n.tenant_id, n.operation_key)
 WHERE o.idempotency_key IS NULL OR o.owner_key IS NOT NULL
    OR o.kind <> 2 AND (o.entitlement_id, o.entry_number) <> (n.entitlement_id, n.entry_number)`,
	"an operation without its entry": `
SELECT o.idempotency_key FROM operations o
  LEFT JOIN entries n ON (n.tenant_id, n.entitlement_id, n.entry_number) = (o.tenant_id, o.entitlement_id, o.entry_number)
 WHERE o.kind <> 2 AND n.entitlement_id IS NULL`,
	"an alias without its owner": `
SELECT a.idempotency_key FROM operations a LEFT JOIN operations o ON (o.tenant_id, o.idempotency_key) = (a.tenant_id, a.owner_key)
 WHERE a.owner_key IS NOT NULL AND (o.idempotency_key IS NULL OR o.owner_key IS NOT NULL)`,
	"an invoice without the operation that recorded it": `
SELECT i.invoice_id FROM invoices i LEFT JOIN operations o ON (o.tenant_id, o.idempotency_key) = (i.tenant_id, i.recorded_by)
 WHERE o.idempotency_key IS NULL OR o.owner_key IS NOT NULL`,
	"a reversed invoice with an active entitlement": `
SELECT e.invoice_id || '/' || e.entitlement_type FROM invoices i JOIN entitlements e USING (tenant_id, invoice_id)
 WHERE i.state IN (3, 4) AND e.state = 1`,
}

func checkLedgers(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	for what, sql := range ledgerRules {
		rows, err := conn.Query(t.Context(), sql)
		if err != nil {
			t.Fatal(err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		if len(found) > 0 {
			t.Errorf("there is %s: %v", what, found)
		}
	}
}

// Random histories of every kind of command, through two stores on one database: whatever was answered, what stands agrees with
// itself.
func TestHistory_StateIsWhatTheLastEntrySays(t *testing.T) {
	b := setup(t)
	stores := []*store.Store{b.Store, open(t, b.url)}
	const workers, steps = 8, 60
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(w), 7))
			for n := range steps {
				tenant, invoice, typ := fmt.Sprint("t", random.IntN(2)), fmt.Sprint("i", random.IntN(3)), fmt.Sprint("x", random.IntN(2))
				// Some keys are used again, by whoever draws them.
				key := fmt.Sprint("k", random.IntN(40))
				if random.IntN(3) > 0 {
					key = fmt.Sprint("w", w, "-", n)
				}
				var c *store.Command
				switch random.IntN(6) {
				case 0:
					c = reverse(tenant, key, invoice, typ)
				case 1:
					c = reinstate(tenant, key, invoice, typ)
				case 2:
					c = record(tenant, key, invoice, refunded, 1+int64(random.IntN(60)))
				case 3:
					c = record(tenant, key, invoice, paid, 1+int64(random.IntN(60)))
				default:
					c = grant(tenant, key, invoice, typ)
					c.Invoice.Version = int64(random.IntN(60))
				}
				if _, err := stores[random.IntN(2)].Apply(t.Context(), c); err != nil {
					t.Errorf("%v %s: %v", c.Kind, key, err)
				}
			}
		})
	}
	wg.Wait()
	if n := value[int](t, b.sql, `SELECT count(*) FROM attempts`); n != workers*steps {
		t.Errorf("%d attempts, want one for each of %d arrivals", n, workers*steps)
	}
	if n := value[int](t, b.sql, `SELECT count(DISTINCT kind) FROM entries`); n != 3 {
		t.Errorf("the histories have %d kinds of entries: they are too tame", n)
	}
	checkLedgers(t, b.sql)
}
