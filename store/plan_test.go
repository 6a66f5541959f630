package store

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// With the statistics of a new table, the planner took a match of tenant_id alone for selective, and chose plans that read all
// rows of the tenant for each request: fast in every small test, and ruinous for the first busy tenant. So every statement must reach
// each table by an index condition on all columns of the key, whatever the tables hold and whatever is known of them.
func TestPlans_ProbeWholeKeys(t *testing.T) {
	url := pgtest.New(t)
	admin := planSession(t, url, false)
	statements := map[string]string{
		"findKnown": findKnownSQL, "lockIfUnknown": lockIfUnknownSQL, "lockInvoices": lockInvoicesSQL, "readFacts": readFactsSQL, "readInvoices": readInvoicesSQL, "readOnInvoice": readOnInvoiceSQL,
		"insertOperations": insertOperationsSQL, "insertEntitlements": insertEntitlementsSQL, "turnEntitlements": turnEntitlementsSQL,
		"insertEntries": insertEntriesSQL, "insertAttempts": insertAttemptsSQL,
		"locate": locateSQL, "lookup": lookupSQL, "aliases": aliasesSQL, "entriesOf": entriesOfSQL, "attemptsUnder": attemptsUnderSQL,
		"entitlement": entitlementSQL, "check": checkSQL,
		"listByTenant": listByTenantSQL, "listByType": listByTypeSQL, "listByInvoice": listByInvoiceSQL,
		"keysByEvent":   listOperationsHead + keysByEventSQL + listOperationsTail,
		"keysByInvoice": listOperationsHead + keysByInvoiceSQL + listOperationsTail,
		"keysByType":    listOperationsHead + keysByTypeSQL + listOperationsTail,

		"insertNotifications": insertNotificationsSQL, "insertDeliveries": insertDeliveriesSQL,
		"due": dueSQL, "unknownByKey": unknownByKeySQL, "lease": leaseSQL, "keepAttempts": keepAttemptsSQL, "hold": holdSQL,
		"doubt": doubtSQL, "spare": spareSQL, "takeUnknown": takeUnknownSQL, "nextDue": nextDueSQL, "backlog": backlogSQL,
		"settle": settleSQL, "settleByKey": settleByKeySQL, "finish": finishSQL, "finishByKey": finishByKeySQL,
		"lateEarlier": lateEarlierSQL, "lateLatest": lateLatestSQL, "lateSettled": lateSettledSQL,
		"claimedMails": claimedMailsSQL, "claimedEvents": claimedEventsSQL, "release": releaseSQL, "keptTokens": keptTokensSQL, "recordSent": recordSentSQL,
		"lockOrder": lockOrderSQL, "settledOrder": settledOrderSQL, "order": orderSQL, "settleOrder": settleOrderSQL, "keepAction": keepActionSQL, "entryThere": entryThereSQL, "actionsOf": actionsOfSQL,
		"listDeliveries": listDeliveriesSQL, "listStuckDeliveries": listStuckDeliveriesSQL,
		"listWaitingDeliveries": listWaitingDeliveriesSQL, "listSettledDeliveries": listSettledDeliveriesSQL, "delivery": deliverySQL,
		"deliveriesOf": deliveriesOfSQL, "deliveryAttemptsOf": deliveryAttemptsOfSQL, "notificationsOf": notificationsOfSQL,
		"purgeDeliveries": purgeDeliveriesSQL,
		"pause":           pauseSQL, "resume": resumeSQL, "lastPause": lastPauseSQL, "destinationKnown": destinationKnownSQL, "pausesSince": pausesSinceSQL,
	}
	for _, sql := range transactionStatements {
		if strings.HasPrefix(sql, "\n") && !slices.Contains(values(statements), sql) {
			t.Errorf("not looked at: %s", sql)
		}
	}
	// Where a statement reads several rows of one leading key, that many columns of the index must be matched.
	prefix := map[string]int{
		"readOnInvoice entitlements_business_key": 2, // all types of one invoice
		"readOnInvoice entries_pkey":              2, // the ledger of one entitlement
		"entriesOf entitlements_business_key":     2,
		"entriesOf entries_pkey":                  2,
		"keysByInvoice entitlements_business_key": 2,
		"keysByInvoice entries_pkey":              2,
		"keysByType entries_pkey":                 2,
		"listByInvoice entitlements_business_key": 2,
		"check entitlements_by_type":              2, // all entitlements of one type
		"keysByType entitlements_by_type":         2,
		// A tenant's refusals: the statement's own comment says why.
		"keysByType attempts_20260301_pkey":                     1,
		"keysByType attempts_20260301_tenant_id_invoice_id_idx": 1,
		"readFacts entries_pkey":                                2,
		"lookup entries_pkey":                                   2,
		"nextDue deliveries_due":                                1, // the first of the destination
		"backlog deliveries_due":                                1, // all of the destination
		"backlog deliveries_stuck_at":                           2, // all in a state
		"deliveriesOf deliveries_pkey":                          3, // an entry's, to any destination
		"deliveriesOf settled_deliveries_pkey":                  3,
		"notificationsOf notifications_pkey":                    3, // an entry's, to anybody
		"deliveryAttemptsOf delivery_attempts_pkey":             2, // a delivery's
		"purgeDeliveries delivery_attempts_pkey":                2,
		"actionsOf operator_actions_pkey":                       2,
		"due destination_pauses_pkey":                           1, // a destination's
		"takeUnknown destination_pauses_pkey":                   1,
		"pause destination_pauses_pkey":                         1,
		"resume destination_pauses_pkey":                        1,
		"lastPause destination_pauses_pkey":                     1,
		"pausesSince destination_pauses_pkey":                   1,
		"destinationKnown destination_pauses_pkey":              1,
		"destinationKnown deliveries_due":                       1, // whether there is one
		"destinationKnown deliveries_stuck_at":                  1,
	}
	// A delivery has one notification, which stands under its entry, and is looked for in the index by that.
	for _, name := range []string{"unknownByKey", "claimedMails", "listDeliveries", "listStuckDeliveries", "listWaitingDeliveries", "listSettledDeliveries",
		"delivery", "deliveriesOf"} {
		prefix[name+" notifications_pkey"] = 3
	}
	check := func(t *testing.T, except ...string) {
		// A new session: one that is there keeps its plans, until the tables are analyzed.
		service := planSession(t, url, true)
		indexes := indexColumns(t, admin)
		for name, sql := range statements {
			if _, err := service.Exec(t.Context(), fmt.Sprintf("PREPARE %q AS %s", name, sql)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		for name := range statements {
			if slices.Contains(except, name) {
				continue
			}
			plan, text := explain(t, service, name)
			for _, problem := range plan.problems(indexes, func(index string, columns int) int {
				if n, ok := prefix[name+" "+index]; ok {
					return n
				}
				return columns
			}) {
				t.Errorf("%s: %s\n%s", name, problem, text)
			}
		}
	}
	partition := `CREATE TABLE attempts_20260301 PARTITION OF attempts FOR VALUES FROM ('2026-03-01') TO ('2026-03-02')`
	execAll(t, admin, partition)
	// A day's partition begins empty and is analyzed within minutes; until then, support's look-ups may read more of it.
	t.Run("fresh", func(t *testing.T) { check(t, "attemptsUnder") })
	execAll(t, admin,
		`INSERT INTO invoices SELECT 't' || n % 3, 'i' || n, 2, 1, 'k' || n, now() FROM generate_series(1, 20000) n`,
		`INSERT INTO operations (tenant_id, idempotency_key, kind, owner_key, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
			attempt_id, event_id, source, caller, applied_at)
		SELECT 't' || n % 3, 'k' || n, 1, CASE WHEN n % 10 = 0 THEN 'k' || n - 3 END, '', 1, 'i' || n, gen_random_uuid(), 1,
			gen_random_uuid(), '', '', '', now() FROM generate_series(1, 20000) n`,
		`INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint, recipe,
			operation_key, granted_at, state, version, changed_at)
		SELECT 't' || n % 3, gen_random_uuid(), 'i' || n, 'x' || n % 4, 0, '{}', '', 1, 'k' || n, now(), 1, 1, now()
			FROM generate_series(1, 20000) n`,
		`INSERT INTO entries SELECT tenant_id, entitlement_id, 1, 1, operation_key, 1, '', '', now() FROM entitlements`,
		`INSERT INTO attempts SELECT 't' || n % 3, '2026-03-01'::timestamptz + n * interval '1 second', gen_random_uuid(), 'k' || n, 1, 1 + n % 2, 0, 0, NULL,
			'i' || n, 'x', 0, '', '', '', NULL, NULL FROM generate_series(1, 20000) n`)
	execAll(t, admin,
		`INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, due_at, leased_until, created_at)
		SELECT tenant_id, entitlement_id, 1, d, gen_random_uuid(), s, 2, now(), CASE s WHEN 2 THEN now() END, now()
			FROM entitlements, unnest(ARRAY['d1', 'd2']) d, LATERAL (SELECT (ARRAY[1, 2, 3, 5])[1 + abs(hashtext(entitlement_id || d)) % 4] AS s) x`,
		`INSERT INTO settled_deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, created_at, settled_at)
		SELECT tenant_id, entitlement_id, 2, destination, gen_random_uuid(), 4, 2, created_at, now() FROM all_deliveries`,
		`INSERT INTO delivery_attempts (tenant_id, delivery_id, attempt_number, worker, started_at)
		SELECT tenant_id, delivery_id, 1, 'w', now() FROM all_deliveries`,
		`INSERT INTO operator_actions SELECT tenant_id, delivery_id, 1, 1, 5, 1, 'me', 'because', '', now() FROM all_deliveries WHERE state = 1`,
		`INSERT INTO notifications SELECT tenant_id, entitlement_id, 1, 'welcome', 'a@example.com', 'en', 'd1', now() FROM entitlements`,
		`INSERT INTO notifications_sent SELECT tenant_id, entitlement_id, 1, 'welcome', 'a@example.com', now() FROM entitlements`)
	t.Run("grown", func(t *testing.T) { check(t) })
	execAll(t, admin, `ANALYZE`)
	t.Run("analyzed", func(t *testing.T) { check(t) })
	// Everything is delivered, and the table of what waits is vacuumed; plans that are made then must be good for what comes.
	execAll(t, admin, `DELETE FROM deliveries WHERE tenant_id <> ''`, `VACUUM ANALYZE deliveries`)
	t.Run("drained", func(t *testing.T) { check(t) })
}

// A tenant with 200,000 entitlements of one type had all of them read for each check of it, and for each check or list of any other type too. A
// check must read what it names, and more only past what does not hold; and a list, what it shows.
func TestPlans_ChecksAndListsReadWhatTheyName(t *testing.T) {
	url := pgtest.New(t)
	admin := planSession(t, url, false)
	const insert = `
INSERT INTO entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint, recipe,
	operation_key, granted_at, ends_at, state, version, changed_at)
SELECT tenant, (lpad(to_hex(n), 12, '0') || right(md5(type || n), 20))::uuid, 'i' || n, type, 0, '{}', '', 1,
	'k' || n, now(), now() + make_interval(days => CASE type WHEN 'ended' THEN -1 ELSE 1 END), 1, 1, now()
  FROM (VALUES %s) AS v (tenant, type, rows), generate_series(1, rows) n`
	execAll(t, admin, fmt.Sprintf(insert, `('t1', 'team_access', 20000), ('t2', 'team_access', 20000)`))
	check := func(t *testing.T) {
		service := planSession(t, url, true)
		execAll(t, service, `PREPARE "check" AS `+checkSQL, `PREPARE "list" AS `+listByTypeSQL)
		for execute, want := range map[string]struct{ named, read int }{
			`"check" ('t1', 'team_access', NULL, 100)`:                                        {100, 100},
			`"check" ('t1', 'rare', NULL, 100)`:                                               {3, 3},
			`"check" ('t1', 'ended', NULL, 100)`:                                              {1, 2 * 7},
			`"check" ('t1', 'other', NULL, 100)`:                                              {1, 0},
			`"list" ('t1', '00000000-0000-0000-0000-000000000000', 0, 'team_access', '', 51)`: {51, 51},
			`"list" ('t1', '00000000-2710-ffff-ffff-ffffffffffff', 0, 'team_access', '', 51)`: {51, 51}, // behind 10,000
			`"list" ('t1', '00000000-0000-0000-0000-000000000000', 0, 'rare', '', 51)`:        {3, 3},
			`"list" ('t1', '00000000-0000-0000-0000-000000000000', 0, 'other', '', 51)`:       {0, 0},
		} {
			var text string
			if err := service.QueryRow(t.Context(), `EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE `+execute, pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
				t.Fatal(err)
			}
			var plans []struct{ Plan readNode }
			if err := json.Unmarshal([]byte(text), &plans); err != nil {
				t.Fatal(err)
			}
			top := &plans[0].Plan
			if int(top.Rows) != want.named || top.walked()+top.removed() != want.read {
				t.Errorf("%s: %v rows, %d walked, %d read in vain\n%s", execute, top.Rows, top.walked(), top.removed(), text)
			}
		}
	}
	execAll(t, admin, fmt.Sprintf(insert, `('t1', 'rare', 3), ('t1', 'ended', 7)`))
	t.Run("grown", check)
	execAll(t, admin, `ANALYZE`)
	t.Run("analyzed", check)
	// Statistics that know of one type alone: what is rare may not be in their sample.
	execAll(t, admin, `DELETE FROM entitlements WHERE entitlement_type <> 'team_access'`, `ANALYZE`, fmt.Sprintf(insert, `('t1', 'rare', 3), ('t1', 'ended', 7)`))
	t.Run("of one type", check)
}

func planSession(t *testing.T, url string, service bool) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["search_path"] = "grantd"
	if service {
		applySettings(&cfg.Config)
	}
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func execAll(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

func values(m map[string]string) []string {
	var all []string
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

// indexColumns lists the columns of each index of the service's tables.
func indexColumns(t *testing.T, conn *pgx.Conn) map[string][]string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum)
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relnamespace = 'grantd'::regnamespace GROUP BY c.relname`)
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string][]string)
	var name string
	var columns []string
	if _, err := pgx.ForEachRow(rows, []any{&name, &columns}, func() error {
		all[name] = columns
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// planNode is what EXPLAIN says of one step.
type planNode struct {
	NodeType  string     `json:"Node Type"`
	Relation  string     `json:"Relation Name"`
	Index     string     `json:"Index Name"`
	IndexCond string     `json:"Index Cond"`
	Plans     []planNode `json:"Plans"`
}

// explain returns the generic plan of a prepared statement, which is the one that the sessions use.
func explain(t *testing.T, conn *pgx.Conn, name string) (planNode, string) {
	t.Helper()
	var parameters int
	if err := conn.QueryRow(t.Context(), `SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = $1`, name).
		Scan(&parameters); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	nulls := strings.TrimSuffix(strings.Repeat("NULL, ", parameters), ", ")
	var text string
	if err := conn.QueryRow(t.Context(), fmt.Sprintf(`EXPLAIN (FORMAT JSON, COSTS OFF) EXECUTE %q (%s)`, name, nulls),
		pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	var plans []struct{ Plan planNode }
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan, text
}

var columnName = regexp.MustCompile(`[a-z_]+`)

// problems lists the steps that read more of a table than a key asks for.
func (n *planNode) problems(indexes map[string][]string, want func(index string, columns int) int) []string {
	var all []string
	switch {
	case n.NodeType == "Seq Scan":
		all = append(all, "reads the whole of "+n.Relation)
	case n.Index != "":
		columns, known := indexes[n.Index]
		if !known {
			all = append(all, "uses an unknown index "+n.Index)
		}
		names := columnName.FindAllString(n.IndexCond, -1)
		for _, c := range columns[:want(n.Index, len(columns))] {
			if !slices.Contains(names, c) {
				all = append(all, fmt.Sprintf("looks into %s without %s", n.Index, c))
			}
		}
	}
	for i := range n.Plans {
		all = append(all, n.Plans[i].problems(indexes, want)...)
	}
	return all
}
