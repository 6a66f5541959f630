package store

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// EntitlementFilter says which of a tenant's entitlements are listed. Empty fields let all through.
type EntitlementFilter struct {
	TenantID        string
	EntitlementType string
	InvoiceID       string
	State           entitlementv1.EntitlementState
}

func (f *EntitlementFilter) list() []string {
	return []string{"entitlements", f.TenantID, f.EntitlementType, f.InvoiceID, f.State.String()}
}

const entitlementColumnsSQL = `
SELECT entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity, starts_at, expires_at, fingerprint, recipe,
       operation_key, granted_at, ends_at, state, version, changed_at
  FROM entitlements`

// The three lists differ in the index that they walk. Ids are UUIDs of version 7, so their order is that of granting, by the replicas'
// clocks.
const (
	listByTenantSQL  = entitlementColumnsSQL + ` WHERE tenant_id = $1 AND entitlement_id > $2` + listTail + `entitlement_id LIMIT $6`
	listByInvoiceSQL = entitlementColumnsSQL + ` WHERE tenant_id = $1 AND entitlement_id > $2 AND invoice_id = $5 AND ($4 = '' OR entitlement_type = $4)` +
		listTail + `entitlement_id LIMIT $6`
	// A range, as in ofTypeSQL, that begins where the page does.
	listByTypeSQL = entitlementColumnsSQL + `
 WHERE tenant_id = $1 AND (entitlement_type, entitlement_id) > ($4, $2) AND entitlement_type <= $4 AND entitlement_type <> ''` +
		listTail + `entitlement_type, entitlement_id LIMIT $6`

	// The types of $4 and $5 are given where a list does not use them otherwise.
	listTail = `
   AND ($3::smallint = 0 OR state = $3) AND $4::text IS NOT NULL AND $5::text IS NOT NULL
 ORDER BY `
)

// Entitlements returns a page of a list, as they are now, and the token of the next page; empty when there is none.
func (s *Store) Entitlements(ctx context.Context, f EntitlementFilter, page Page) ([]*Entitlement, string, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	place, err := s.tokens.place(f.list(), page.Token)
	if err != nil {
		return nil, "", err
	}
	var after uuid.UUID
	copy(after[:], place)
	sql := listByTenantSQL
	switch {
	case f.InvoiceID != "":
		sql = listByInvoiceSQL
	case f.EntitlementType != "":
		sql = listByTypeSQL
	}
	limit := page.limit()
	rows, err := s.reads.Query(ctx, sql, f.TenantID, [16]byte(after), int16(f.State), f.EntitlementType, f.InvoiceID, limit+1)
	if err != nil {
		return nil, "", readFailure(err)
	}
	defer rows.Close()
	var all []*Entitlement
	for rows.Next() {
		var r entitlementRow
		if err := rows.Scan(r.destinations()...); err != nil {
			return nil, "", readFailure(err)
		}
		all = append(all, r.entitlement(f.TenantID))
	}
	if err := rows.Err(); err != nil {
		return nil, "", readFailure(err)
	}
	if len(all) <= limit {
		return all, "", nil
	}
	last := all[limit-1].ID
	return all[:limit], s.tokens.after(f.list(), string(last[:])), nil
}

// OperationFilter says which of a tenant's keys are listed; exactly one of the other fields is set.
type OperationFilter struct {
	TenantID        string
	EventID         string
	InvoiceID       string
	EntitlementType string
}

func (f *OperationFilter) list() []string {
	return []string{"operations", f.TenantID, f.EventID, f.InvoiceID, f.EntitlementType}
}

// ListedOperation is one key that was found.
type ListedOperation struct {
	IdempotencyKey string
	// Operation is what the key stands for, nil where only refusals or conflicts are known.
	Operation *Operation
	// LastAttempt is nil where no attempt is kept.
	LastAttempt *Attempt
}

// The keys that a filter finds. Winners of an event stand in its attempts; those of an invoice or type are found through
// entitlements and their entries, since the attempts' indexes leave winners out, and retention removes attempts.
const (
	keysByEventSQL   = `SELECT idempotency_key AS key FROM attempts WHERE tenant_id = $1 AND event_id = $2 AND event_id <> ''`
	keysByInvoiceSQL = `
        SELECT n.operation_key AS key
          FROM entitlements e JOIN entries n ON n.tenant_id = e.tenant_id AND n.entitlement_id = e.entitlement_id
         WHERE e.tenant_id = $1 AND e.invoice_id = $2
        UNION ALL
        SELECT idempotency_key FROM operations
         WHERE tenant_id = $1 AND invoice_id = $2 AND (kind <> 1 OR owner_key > '')
        UNION ALL
        SELECT idempotency_key FROM attempts WHERE tenant_id = $1 AND invoice_id = $2 AND outcome <> 1`
	keysByTypeSQL = `
        SELECT n.operation_key AS key
          FROM entitlements e,
               -- OFFSET keeps this a probe for each: as a join, it is now and then taken for one with all of the tenant's entries.
               LATERAL (SELECT operation_key FROM entries WHERE tenant_id = e.tenant_id AND entitlement_id = e.entitlement_id OFFSET 0) n
         WHERE e.tenant_id = $1 AND e.entitlement_type = $2 AND e.entitlement_type <> ''
        UNION ALL
        -- No index of attempts has the type: a grant should not pay for one. This walks the tenant's attempts.
        SELECT idempotency_key FROM attempts WHERE tenant_id = $1 AND entitlement_type = $2 AND outcome <> 1`

	// listOperationsHead and listOperationsTail go around one of them. Each key comes with its operation, and with the winner where it is
	// an alias.
	listOperationsHead = `
SELECT k.key,` + operationColumnsSQL + `
  FROM (SELECT DISTINCT key FROM (`
	listOperationsTail = `) AS found WHERE key COLLATE "C" > $3 ORDER BY key LIMIT $4) AS k
  LEFT JOIN operations o ON o.tenant_id = $1 AND o.idempotency_key = k.key
  LEFT JOIN operations w ON w.tenant_id = $1 AND w.idempotency_key = COALESCE(o.owner_key, o.idempotency_key)
 ORDER BY k.key`
)

// lastAttemptsSQL finds the latest attempt of each key: the latest that did not win, or the winner's own.
const lastAttemptsSQL = `
SELECT DISTINCT ON (idempotency_key) * FROM (` + attemptColumnsSQL + `
 WHERE tenant_id = $1 AND outcome <> 1 AND idempotency_key = ANY ($2)
 UNION ALL` + attemptColumnsSQL + `
 WHERE tenant_id = $1 AND (at, attempt_id) IN (SELECT * FROM unnest($3::timestamptz[], $4::uuid[]))) AS a
 ORDER BY idempotency_key, at DESC, attempt_id DESC`

// maxOperationsPage keeps a page, of operations with an attempt each, one that clients accept.
const maxOperationsPage = 500

// Operations returns a page of the keys that a filter finds, in bytewise order, and the token of the next page; empty when there is none.
func (s *Store) Operations(ctx context.Context, f OperationFilter, page Page) ([]ListedOperation, string, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	place, err := s.tokens.place(f.list(), page.Token)
	if err != nil {
		return nil, "", err
	}
	keys, value := keysByTypeSQL, f.EntitlementType
	switch {
	case f.EventID != "":
		keys, value = keysByEventSQL, f.EventID
	case f.InvoiceID != "":
		keys, value = keysByInvoiceSQL, f.InvoiceID
	}
	limit := min(page.limit(), maxOperationsPage)
	rows, err := s.reads.Query(ctx, listOperationsHead+keys+listOperationsTail, f.TenantID, value, place, limit+1)
	if err != nil {
		return nil, "", readFailure(err)
	}
	defer rows.Close()
	var all []ListedOperation
	for rows.Next() {
		var l ListedOperation
		var r operationRow
		if err := rows.Scan(append([]any{&l.IdempotencyKey}, r.destinations()...)...); err != nil {
			return nil, "", readFailure(err)
		}
		l.Operation = r.operation(f.TenantID)
		all = append(all, l)
	}
	if err := rows.Err(); err != nil {
		return nil, "", readFailure(err)
	}
	token := ""
	if len(all) > limit {
		all = all[:limit]
		token = s.tokens.after(f.list(), all[limit-1].IdempotencyKey)
	}
	return all, token, s.addLastAttempts(ctx, f.TenantID, all)
}

func (s *Store) addLastAttempts(ctx context.Context, tenant string, all []ListedOperation) error {
	keys := make([]string, len(all))
	var at []pgtype.Timestamptz
	var ids []pgtype.UUID
	place := make(map[string]int, len(all))
	for i, l := range all {
		keys[i], place[l.IdempotencyKey] = l.IdempotencyKey, i
		if l.Operation != nil && l.Operation.IdempotencyKey == l.IdempotencyKey {
			at = append(at, pgtype.Timestamptz{Time: l.Operation.AppliedAt, Valid: true})
			ids = append(ids, pgtype.UUID{Bytes: l.Operation.AttemptID, Valid: true})
		}
	}
	rows, err := s.reads.Query(ctx, lastAttemptsSQL, tenant, keys, at, ids)
	if err != nil {
		return readFailure(err)
	}
	attempts, err := scanAttempts(rows, tenant)
	if err != nil {
		return err
	}
	for i := range attempts {
		all[place[attempts[i].IdempotencyKey]].LastAttempt = &attempts[i]
	}
	return nil
}
