package store

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// A destination has been down for hours, and 100,000 deliveries wait for it: due, put off and behind others. What a claim reads, there and
// at every other destination, must be what it returns.
func TestPlans_ClaimReadsWhatItReturns(t *testing.T) {
	url := pgtest.New(t)
	admin := planSession(t, url, false)
	execAll(t, admin, `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, due_at, created_at)
SELECT 't' || n % 3, md5('e' || n % 90000)::uuid, 1 + n / 90000, CASE WHEN n % 1000 = 0 THEN 'up' ELSE 'down' END, gen_random_uuid(), 1,
       now() + (n % 20000 - 10000) * interval '1 second', now() FROM generate_series(1, 100100) n`)
	// What is under way keeps its place among the due, and is passed over: as many as workers have in their hands.
	const underWay = 50
	execAll(t, admin, `
UPDATE deliveries SET state = 2, leased_until = now() + interval '1 hour'
 WHERE (tenant_id, delivery_id) IN (SELECT tenant_id, delivery_id FROM deliveries WHERE destination = 'down' ORDER BY due_at LIMIT 50)`)
	check := func(t *testing.T) {
		service := planSession(t, url, true)
		execAll(t, service, `PREPARE due AS `+dueSQL, `PREPARE next AS `+nextDueSQL)
		for _, c := range []struct {
			execute string
			rows    int
			blocks  int
		}{
			{`EXECUTE due ('down', 20)`, 20, 400},
			{`EXECUTE due ('up', 20)`, 20, 400},
			{`EXECUTE due ('none', 20)`, 0, 10},
			{`EXECUTE next ('down')`, 1, 200},
			{`EXECUTE next ('none')`, 0, 10},
		} {
			var text string
			tx, err := service.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) `+c.execute, pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
				t.Fatal(err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			var plans []struct{ Plan readNode }
			if err := json.Unmarshal([]byte(text), &plans); err != nil {
				t.Fatal(err)
			}
			top := &plans[0].Plan
			if top.Rows != float64(c.rows) || top.Hit+top.Read > c.blocks || top.removed() > underWay {
				t.Errorf("%s: %v rows, %d blocks, %d rows read in vain\n%s", c.execute, top.Rows, top.Hit+top.Read, top.removed(), text)
			}
		}
	}
	// What is counted for metrics stops at its limit, and reads no more than it counts; dead deliveries are many at one destination only.
	execAll(t, admin, `UPDATE deliveries SET state = 5, leased_until = NULL WHERE entry_number = 2 AND destination = 'down'`)
	checkBacklog := func(t *testing.T) {
		service := planSession(t, url, true)
		execAll(t, service, `SET enable_bitmapscan = off`, `PREPARE backlog AS `+backlogSQL)
		for _, c := range []struct {
			execute string
			walked  int
		}{
			{`EXECUTE backlog ('down', 500)`, 1001}, // 500 that wait, 500 that are dead, the oldest
			{`EXECUTE backlog ('up', 500)`, 101},
			{`EXECUTE backlog ('none', 500)`, 0},
		} {
			var text string
			if err := service.QueryRow(t.Context(), `EXPLAIN (ANALYZE, FORMAT JSON) `+c.execute, pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
				t.Fatal(err)
			}
			var plans []struct{ Plan readNode }
			if err := json.Unmarshal([]byte(text), &plans); err != nil {
				t.Fatal(err)
			}
			if top := &plans[0].Plan; top.walked() != c.walked || top.removed() > underWay {
				t.Errorf("%s: %d rows walked, want %d, %d in vain\n%s", c.execute, top.walked(), c.walked, top.removed(), text)
			}
		}
	}
	t.Run("grown", check)
	t.Run("backlog, grown", checkBacklog)
	execAll(t, admin, `ANALYZE deliveries`)
	t.Run("analyzed", check)
	t.Run("backlog, analyzed", checkBacklog)
}

// With 40,000 deliveries of a tenant that wait, die and are settled, each page of their list was sorted out of all of them: a view of two
// tables, one with a condition, has no order. A page must read no more than it shows.
func TestPlans_ListReadsAPage(t *testing.T) {
	url := pgtest.New(t)
	admin := planSession(t, url, false)
	execAll(t, admin, `
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, due_at, created_at)
SELECT 't', md5('e' || n)::uuid, 1, 'd', gen_random_uuid(), 1 + 4 * (n % 2), now(), now() FROM generate_series(1, 20000) n`, `
INSERT INTO settled_deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, created_at, settled_at)
SELECT 't', md5('s' || n)::uuid, 1, 'd', gen_random_uuid(), 4, now(), now() FROM generate_series(1, 20000) n`)
	const page = 51
	check := func(t *testing.T) {
		service := planSession(t, url, true)
		for name, c := range map[string]struct {
			state int16
			read  int
		}{
			"all":     {0, 2 * page}, // of each table
			"waiting": {int16(pendingState), 2*page + page},
			"stuck":   {int16(deadState), page},
			"settled": {int16(deliveredState), page},
		} {
			tx, err := service.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var text string
			for _, sql := range []string{inOrderSQL, fmt.Sprintf(`PREPARE %q AS %s`, name, listSQL(entitlementv1.DeliveryState(c.state)))} {
				if _, err := tx.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
					t.Fatal(err)
				}
			}
			execute := fmt.Sprintf(`EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE %q ('t', '80000000-0000-0000-0000-000000000000', 0, '', %d, '', %d)`, name, c.state, page)
			if err := tx.QueryRow(t.Context(), execute, pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			var plans []struct{ Plan readNode }
			if err := json.Unmarshal([]byte(text), &plans); err != nil {
				t.Fatal(err)
			}
			// Every other one of those that wait is dead, give or take.
			if top := &plans[0].Plan; top.Rows != page || top.walked()+top.removed() > 2*c.read {
				t.Errorf("%s: %v rows, %d walked, %d read in vain\n%s", name, top.Rows, top.walked(), top.removed(), text)
			}
		}
	}
	t.Run("grown", check)
	execAll(t, admin, `ANALYZE`)
	t.Run("analyzed", check)
}

// readNode is what EXPLAIN ANALYZE says of one step.
type readNode struct {
	Node    string     `json:"Node Type"`
	Rows    float64    `json:"Actual Rows"` // PostgreSQL 18 writes 1.00
	Hit     int        `json:"Shared Hit Blocks"`
	Read    int        `json:"Shared Read Blocks"`
	Removed int        `json:"Rows Removed by Filter"`
	Plans   []readNode `json:"Plans"`
}

// removed counts the rows that were read to be thrown away.
func (n *readNode) removed() int {
	all := n.Removed
	for i := range n.Plans {
		all += n.Plans[i].removed()
	}
	return all
}

// walked counts the rows that were found by indexes.
func (n *readNode) walked() int {
	all := 0
	if strings.HasPrefix(n.Node, "Index") || n.Node == "Bitmap Heap Scan" {
		all = int(n.Rows)
	}
	for i := range n.Plans {
		all += n.Plans[i].walked()
	}
	return all
}
