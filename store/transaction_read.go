package store

import (
	"context"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// choose makes the commands at these places of the batch the ones that the next statements are about.
func (t *transaction) choose(batch []*pending, places []int) {
	t.chosen = t.chosen[:0]
	for _, i := range places {
		t.chosen = append(t.chosen, batch[i])
	}
}

// readOnInvoice reads the invoices' entitlements for those of the commands that take them back, or have done so.
func (t *transaction) readOnInvoice(ctx context.Context, batch []*pending, places []int) error {
	var reversing []int
	for _, i := range places {
		c := &batch[i].command
		if c.Kind == entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE && c.Invoice.reverses() {
			reversing = append(reversing, i)
		}
	}
	if len(reversing) == 0 {
		return nil
	}
	t.choose(batch, reversing)
	rows, err := t.session.conn.Query(ctx, readOnInvoiceSQL, t.chosen)
	if err != nil {
		return err
	}
	return scanOnInvoice(rows, func(position int) (*facts, string) {
		return &t.facts[reversing[position-1]], t.chosen[position-1].command.TenantID
	})
}

// read is the first flight. Grants of one invoice each, as most batches hold, are locked in it, unless something is known of
// them; where all of them are new and move their records, nothing is left to be read. What is known is read behind the locks, and so
// shows the winners that they waited for.
func (t *transaction) read(ctx context.Context, batch []*pending) error {
	t.places = t.places[:0]
	for i := range batch {
		t.places = append(t.places, i)
	}
	t.facts = slices.Grow(t.facts[:0], len(batch))[:len(batch)]
	clear(t.facts)
	t.locked = !t.replayed && !slices.ContainsFunc(batch, func(p *pending) bool {
		return p.command.Kind != entitlementv1.OperationKind_OPERATION_KIND_GRANT || p.command.refusal(t.catalog) != nil
	})
	if t.locked {
		t.fold(batch, t.places)
		if t.locked = len(t.locks) == len(batch); !t.locked {
			clear(t.facts)
		}
	}

	var b pgx.Batch
	b.Queue(beginSQL)
	if t.lockTimeout > 0 {
		b.Queue(lockTimeoutSQL, strconv.FormatInt(t.lockTimeout.Milliseconds(), 10))
	}
	if !t.locked {
		return t.readUnlocked(ctx, batch, &b)
	}
	preamble := b.Len()
	b.Queue(lockIfUnknownSQL, t.locks)
	b.Queue(clockSQL)
	results := t.session.conn.SendBatch(ctx, &b)
	defer results.Close()
	if err := skip(results, preamble); err != nil {
		return err
	}
	tag, err := results.Exec()
	if err != nil {
		return err
	}
	t.movedRows = tag.RowsAffected()
	if err := results.QueryRow().Scan(&t.now); err != nil {
		return err
	}
	if err := results.Close(); err != nil {
		return err
	}
	if t.movedRows == int64(len(batch)) {
		return nil
	}
	clear(t.facts)
	return t.readFacts(ctx, batch, t.places)
}

// readUnlocked is the first flight of other batches. Where the batch before held replays, more will come, and what is known is read at
// once; else it asks first of which commands anything is. Replays and refusals are answered from that without a lock.
func (t *transaction) readUnlocked(ctx context.Context, batch []*pending, b *pgx.Batch) error {
	preamble, atOnce := b.Len(), t.replayed
	if atOnce {
		t.choose(batch, t.places)
		b.Queue(readFactsSQL, t.chosen)
	} else {
		b.Queue(findKnownSQL, batch)
	}
	b.Queue(clockSQL)
	results := t.session.conn.SendBatch(ctx, b)
	defer results.Close()
	if err := skip(results, preamble); err != nil {
		return err
	}
	known := t.places
	var err error
	if atOnce {
		err = t.scanFacts(results, known)
	} else {
		known, err = scanPlaces(results, known[:0])
	}
	if err != nil {
		return err
	}
	if err := results.QueryRow().Scan(&t.now); err != nil {
		return err
	}
	if err := results.Close(); err != nil || len(known) == 0 {
		return err
	}
	if !atOnce {
		return t.readFacts(ctx, batch, known)
	}
	return t.readReplayed(ctx, batch, known)
}

// skip takes the answers of statements that return nothing of interest.
func skip(results pgx.BatchResults, statements int) error {
	for range statements {
		if _, err := results.Exec(); err != nil {
			return err
		}
	}
	return nil
}

// findKnownSQL returns the positions of the commands of which anything may be known.
const findKnownSQL = `
SELECT c.position::int
  FROM unnest($1::command_row[]) WITH ORDINALITY
       AS c (tenant_id, idempotency_key, kind, invoice_id, entitlement_type, operation_version, position)
  LEFT JOIN operations o ON o.tenant_id = c.tenant_id AND o.idempotency_key = c.idempotency_key
  LEFT JOIN entitlements b ON b.tenant_id = c.tenant_id AND b.invoice_id = c.invoice_id
        AND b.entitlement_type = c.entitlement_type AND b.operation_version = c.operation_version
 WHERE o.idempotency_key IS NOT NULL OR b.invoice_id IS NOT NULL OR c.kind = 2`

func scanPlaces(results pgx.BatchResults, places []int) ([]int, error) {
	rows, err := results.Query()
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var position int
	dest := []any{&position}
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
		places = append(places, position-1)
	}
	return places, rows.Err()
}

// readFacts reads what is known of the commands at these places.
func (t *transaction) readFacts(ctx context.Context, batch []*pending, places []int) error {
	t.choose(batch, places)
	var b pgx.Batch
	b.Queue(readFactsSQL, t.chosen)
	results := t.session.conn.SendBatch(ctx, &b)
	defer results.Close()
	if err := t.scanFacts(results, places); err != nil {
		return err
	}
	if err := results.Close(); err != nil {
		return err
	}
	return t.readReplayed(ctx, batch, places)
}

// readReplayed reads what only replays need. What is new reads it under the lock.
func (t *transaction) readReplayed(ctx context.Context, batch []*pending, places []int) error {
	replays := slices.DeleteFunc(slices.Clone(places), func(i int) bool { return t.facts[i].known == nil })
	return t.readOnInvoice(ctx, batch, replays)
}

// factsColumns and factsFrom read what is known of the commands c: the row under the key, the winner, the entitlement
// that either of them or the business key names, and the entry that is the result.
const (
	// operationColumnsSQL are those of the winner.
	operationColumnsSQL = `
       COALESCE(w.idempotency_key, ''), COALESCE(w.kind, 0), COALESCE(w.owner_key, ''), COALESCE(w.fingerprint, ''), COALESCE(w.recipe, 0),
       COALESCE(w.invoice_id, ''), w.entitlement_id, COALESCE(w.entry_number, 0), COALESCE(w.invoice_state, 0),
       COALESCE(w.invoice_version, 0), COALESCE(w.actor, ''), COALESCE(w.reason, ''), w.attempt_id, COALESCE(w.event_id, ''),
       COALESCE(w.source, ''), COALESCE(w.caller, ''), w.trace_id, w.span_id, COALESCE(w.applied_at, 'epoch'), COALESCE(w.trace_sampled, false)`

	// knownEntitlementSQL are those of the entitlement, where there is one.
	knownEntitlementSQL = `
       e.entitlement_id, COALESCE(e.invoice_id, ''), COALESCE(e.entitlement_type, ''), COALESCE(e.operation_version, 0), e.scope,
       e.quantity, e.starts_at, e.expires_at, COALESCE(e.fingerprint, ''), COALESCE(e.recipe, 0), COALESCE(e.operation_key, ''),
       COALESCE(e.granted_at, 'epoch'), e.ends_at, COALESCE(e.state, 0), COALESCE(e.version, 0), COALESCE(e.changed_at, 'epoch')`

	factsColumns = `
       COALESCE(o.idempotency_key, ''), COALESCE(o.kind, 0), COALESCE(o.owner_key, ''), COALESCE(o.fingerprint, ''), COALESCE(o.recipe, 0),
       COALESCE(o.invoice_id, ''), o.entitlement_id, COALESCE(o.entry_number, 0), COALESCE(o.invoice_state, 0),
       COALESCE(o.invoice_version, 0), COALESCE(o.actor, ''), COALESCE(o.reason, ''), o.attempt_id, COALESCE(o.event_id, ''),
       COALESCE(o.source, ''), COALESCE(o.caller, ''), o.trace_id, o.span_id, COALESCE(o.applied_at, 'epoch'), COALESCE(o.trace_sampled, false),` + operationColumnsSQL + `,` + knownEntitlementSQL + `,
       COALESCE(n.entry_number, 0), COALESCE(n.kind, 0), COALESCE(n.operation_key, ''), COALESCE(n.invoice_version, 0),
       COALESCE(n.actor, ''), COALESCE(n.reason, ''), COALESCE(n.at, 'epoch'),
       COALESCE(r.state, 0), COALESCE(r.version, 0)`

	// factsFrom looks up who the winner is only where the known key is not its own: a known key is the answer, whatever the business
	// key says, and an owner is its own winner. Where two columns of a key come from several tables, both are taken from the same
	// ones, so that the planner takes both for the index, also before it has statistics.
	factsFrom = `
  LEFT JOIN operations o ON o.tenant_id = c.tenant_id AND o.idempotency_key = c.idempotency_key
  LEFT JOIN entitlements b ON b.tenant_id = c.tenant_id AND b.invoice_id = c.invoice_id
        AND b.entitlement_type = c.entitlement_type AND b.operation_version = c.operation_version AND o.idempotency_key IS NULL
  LEFT JOIN entitlements e ON e.tenant_id = COALESCE(o.tenant_id, b.tenant_id)
        AND e.entitlement_id = COALESCE(o.entitlement_id, b.entitlement_id)
        -- A grant's result is its first entry; that of a reversal or reinstatement under a new key, the last one.
  LEFT JOIN entries n ON n.tenant_id = e.tenant_id AND n.entitlement_id = e.entitlement_id
        AND n.entry_number = COALESCE(o.entry_number, CASE c.kind WHEN 1 THEN 1 ELSE e.version END)
  LEFT JOIN invoices r ON c.kind = 2 AND r.tenant_id = c.tenant_id AND r.invoice_id = c.invoice_id
  LEFT JOIN operations w ON w.tenant_id = COALESCE(o.tenant_id, n.tenant_id, r.tenant_id)
        AND w.idempotency_key = CASE WHEN o.idempotency_key IS NULL THEN COALESCE(n.operation_key, r.recorded_by) ELSE o.owner_key END`
)

// readFactsSQL returns a row for each command of which anything is known.
const readFactsSQL = `
SELECT c.position::int,` + factsColumns + `
  FROM unnest($1::command_row[]) WITH ORDINALITY
       AS c (tenant_id, idempotency_key, kind, invoice_id, entitlement_type, operation_version, position)` + factsFrom + `
 WHERE o.idempotency_key IS NOT NULL OR e.entitlement_id IS NOT NULL OR w.idempotency_key IS NOT NULL OR r.state IS NOT NULL`

// scanFacts puts the rows to the commands at these places of the batch.
func (t *transaction) scanFacts(results pgx.BatchResults, places []int) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var position int
		var r factsRow
		if err := rows.Scan(append([]any{&position}, r.destinations()...)...); err != nil {
			return err
		}
		r.fill(&t.facts[places[position-1]], t.chosen[position-1].command.TenantID)
	}
	return rows.Err()
}

// readOnInvoiceSQL returns, for each command that records an invoice's state, the invoice's entitlements, each with the entry
// that the winner appended to it, if the command is a replay.
const readOnInvoiceSQL = `
SELECT c.position::int, e.entitlement_id, e.invoice_id, e.entitlement_type, e.operation_version, e.scope,
       e.quantity, e.starts_at, e.expires_at, e.fingerprint, e.recipe, e.operation_key,
       e.granted_at, e.ends_at, e.state, e.version, e.changed_at,
       COALESCE(n.entry_number, 0), COALESCE(n.kind, 0), COALESCE(n.operation_key, ''), COALESCE(n.invoice_version, 0),
       COALESCE(n.actor, ''), COALESCE(n.reason, ''), COALESCE(n.at, 'epoch')
  FROM unnest($1::command_row[]) WITH ORDINALITY
       AS c (tenant_id, idempotency_key, kind, invoice_id, entitlement_type, operation_version, position)
  JOIN invoices i ON i.tenant_id = c.tenant_id AND i.invoice_id = c.invoice_id
  LEFT JOIN operations o ON o.tenant_id = c.tenant_id AND o.idempotency_key = c.idempotency_key
  JOIN entitlements e ON e.tenant_id = c.tenant_id AND e.invoice_id = COALESCE(o.invoice_id, c.invoice_id)
  LEFT JOIN entries n ON n.tenant_id = e.tenant_id AND n.entitlement_id = e.entitlement_id AND n.kind = 2
        AND n.operation_key = COALESCE(o.owner_key, o.idempotency_key, i.recorded_by)
 WHERE c.kind = 2
 ORDER BY c.position, e.entitlement_id`

// scanOnInvoice adds each row to the facts of its command, given its position from 1.
func scanOnInvoice(rows pgx.Rows, of func(position int) (*facts, string)) error {
	defer rows.Close()
	for rows.Next() {
		var position int
		var e entitlementRow
		var n entryRow
		dest := append([]any{&position}, e.destinations()...)
		if err := rows.Scan(append(dest, n.destinations()...)...); err != nil {
			return err
		}
		f, tenant := of(position)
		entitlement := e.entitlement(tenant)
		f.onInvoice = append(f.onInvoice, entitlement)
		f.reversedBy = append(f.reversedBy, n.entry(tenant, entitlement.ID))
	}
	return rows.Err()
}
