package store

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Evidence of commands that bring none: they lock the invoice's row, and neither make nor move it.
const (
	noState   = 0
	noVersion = -1
)

// evidence is what the command says of its invoice.
func (c *Command) evidence() InvoiceVersion {
	switch c.Kind {
	case entitlementv1.OperationKind_OPERATION_KIND_GRANT, entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE:
		return c.Invoice
	default:
		return InvoiceVersion{noState, noVersion}
	}
}

// mayWrite says whether a command needs its invoice's lock. Replays, and grants that are refused whatever the invoice says, never
// look at it.
func mayWrite(c *Command, f *facts, catalog *Catalog) bool {
	if f.known != nil {
		return false
	}
	return c.Kind != entitlementv1.OperationKind_OPERATION_KIND_GRANT || f.entitlement == nil && c.refusal(catalog) == nil
}

// lock is the second flight, for the commands that may write: it locks their invoices, moves the records forward, and reads
// again what may have changed before the locks were held. Grants that will be written need no second look at their keys: if a
// winner came between, the unique constraints stop the transaction, and the next one sees it.
func (t *transaction) lock(ctx context.Context, batch []*pending) error {
	lockers := t.places[:0]
	grantsOnly := true
	for i, p := range batch {
		if mayWrite(&p.command, &t.facts[i], t.catalog) {
			lockers = append(lockers, i)
			grantsOnly = grantsOnly && p.command.Kind == entitlementv1.OperationKind_OPERATION_KIND_GRANT
		}
	}
	t.places = lockers
	if t.locked {
		return t.readUnmoved(ctx, batch, lockers)
	}
	if len(lockers) == 0 {
		return nil
	}
	t.fold(batch, lockers)

	var b pgx.Batch
	b.Queue(lockInvoicesSQL, t.locks)
	if !grantsOnly {
		t.choose(batch, lockers)
		b.Queue(readInvoicesSQL, t.chosen)
		b.Queue(readFactsSQL, t.chosen)
	}
	b.Queue(clockSQL)
	results := t.session.conn.SendBatch(ctx, &b)
	defer results.Close()
	tag, err := results.Exec()
	if err != nil {
		return err
	}
	if !grantsOnly {
		if err := t.scanInvoices(results, lockers); err != nil {
			return err
		}
		t.forget(lockers)
		if err := t.scanFacts(results, lockers); err != nil {
			return err
		}
		for _, i := range lockers {
			if f := &t.facts[i]; f.known == nil && f.entitlement != nil && f.invoice == (InvoiceVersion{}) {
				// It was granted after its invoice was looked for, and so the invoice is not locked.
				return errRaced
			}
		}
	}
	if err := results.QueryRow().Scan(&t.now); err != nil {
		return err
	}
	if err := results.Close(); err != nil {
		return err
	}
	if !grantsOnly {
		return t.readOnInvoice(ctx, batch, lockers)
	}
	t.movedRows = tag.RowsAffected()
	return t.readUnmoved(ctx, batch, lockers)
}

// readUnmoved reads the records that grants have locked, unless all of them were moved to the evidence.
func (t *transaction) readUnmoved(ctx context.Context, batch []*pending, lockers []int) error {
	if t.movedRows == int64(len(t.locks)) {
		return nil
	}
	if len(lockers) > 0 {
		if err := t.readInvoices(ctx, batch, lockers); err != nil {
			return err
		}
	}
	if t.locked {
		// What is known was read after the locks were taken. A record that moved for a command of which something is known now moved
		// before its winner, which the lock waited for, was seen: that may not stay.
		for _, i := range lockers {
			f := &t.facts[i]
			if f.moved {
				t.movedRows--
			}
			if f.invoice.State == noState || f.invoice.Version < batch[i].command.Invoice.Version {
				// Something was known of it when the locks were looked for, and was purged since: its evidence was left out.
				return errRaced
			}
		}
		if t.movedRows != 0 {
			return errRaced
		}
		return nil
	}
	// A refusal inserts nothing, so no constraint would tell that a winner came between: it must be looked for.
	for _, i := range lockers {
		if _, refused := refusedByInvoice(t.facts[i].invoice); refused {
			return t.readAgain(ctx, batch, lockers)
		}
	}
	return nil
}

// readAgain replaces what was known before the locks were held, and keeps what was read of the invoices since.
func (t *transaction) readAgain(ctx context.Context, batch []*pending, places []int) error {
	t.forget(places)
	return t.readFacts(ctx, batch, places)
}

func (t *transaction) forget(places []int) {
	for _, i := range places {
		f := &t.facts[i]
		t.facts[i] = facts{invoice: f.invoice, moved: f.moved}
	}
}

// fold leaves one row for each invoice, the evidence of the highest version, in bytewise order. Until the records are read, each
// command takes its invoice's for moved to that.
func (t *transaction) fold(batch []*pending, lockers []int) {
	t.locks = t.locks[:0]
	slices.SortFunc(lockers, func(i, j int) int {
		a, b := &batch[i].claims.invoice, &batch[j].claims.invoice
		return cmp.Or(strings.Compare(a.tenant, b.tenant), strings.Compare(a.name, b.name),
			cmp.Compare(batch[j].command.evidence().Version, batch[i].command.evidence().Version))
	})
	for n, i := range lockers {
		c, f := &batch[i].command, &t.facts[i]
		if n > 0 && batch[i].claims.invoice == batch[lockers[n-1]].claims.invoice {
			f.invoice = t.facts[lockers[n-1]].invoice
			continue
		}
		f.invoice, f.moved = c.evidence(), true
		t.locks = append(t.locks, batch[i])
	}
}

// lockInvoicesSQL locks the rows and moves them forward. The rows come in bytewise order, as in every transaction of every
// replica: no two of them wait for each other. The row count says how many were made or moved.
const (
	lockInvoicesSQL = lockHead + `
  FROM unnest($1::invoice_row[]) AS c
       -- Reversals and reinstatements lock a row that is there, and never make one. A subquery of another form would be hashed
       -- over the whole table.
 WHERE state <> 0 OR (SELECT true FROM invoices r WHERE r.tenant_id = c.tenant_id AND r.invoice_id = c.invoice_id)` + lockTail

	// lockIfUnknownSQL does so for grants of one invoice each, but for those whose key or effect is taken: it needs no question before
	// it, and where every record is moved, none after it.
	lockIfUnknownSQL = lockHead + `
  FROM unnest($1::invoice_row[]) AS c
 WHERE NOT EXISTS (SELECT FROM operations o WHERE o.tenant_id = c.tenant_id AND o.idempotency_key = c.idempotency_key)
   AND NOT EXISTS (SELECT FROM entitlements e WHERE e.tenant_id = c.tenant_id AND e.invoice_id = c.invoice_id
                      AND e.entitlement_type = c.entitlement_type AND e.operation_version = c.operation_version)` + lockTail

	// The placeholders of those that bring no evidence must pass the table's checks, which come before the conflict.
	lockHead = `
INSERT INTO invoices AS i (tenant_id, invoice_id, state, version, recorded_by, recorded_at)
SELECT tenant_id, invoice_id, GREATEST(state, 1::smallint), GREATEST(version, 0), idempotency_key, clock_timestamp()`

	lockTail = `
    ON CONFLICT (tenant_id, invoice_id) DO UPDATE
   SET state = excluded.state, version = excluded.version,
       recorded_by = excluded.recorded_by, recorded_at = excluded.recorded_at
       -- The row is locked also where this is false.
 WHERE excluded.version > i.version`
)

// readInvoicesSQL reads, for each command, its invoice's record after the locks were taken, and whether this very transaction moved
// it, by this command's evidence.
const readInvoicesSQL = `
SELECT c.position::int, i.state, i.version, i.recorded_by = c.idempotency_key AND i.xmin = pg_current_xact_id()::xid
  FROM unnest($1::command_row[]) WITH ORDINALITY
       AS c (tenant_id, idempotency_key, kind, invoice_id, entitlement_type, operation_version, position)
  JOIN invoices i ON i.tenant_id = c.tenant_id AND i.invoice_id = c.invoice_id
       -- They are locked already, but for a row that was made after the locking statement had looked for it. That one must not be waited
       -- for out of its order, since its holder may wait for one of ours: where it is held, it is taken for absent as before.
   FOR NO KEY UPDATE OF i SKIP LOCKED`

// readInvoices is sent where some record was there before and did not move.
func (t *transaction) readInvoices(ctx context.Context, batch []*pending, places []int) error {
	t.choose(batch, places)
	var b pgx.Batch
	b.Queue(readInvoicesSQL, t.chosen)
	results := t.session.conn.SendBatch(ctx, &b)
	defer results.Close()
	if err := t.scanInvoices(results, places); err != nil {
		return err
	}
	return results.Close()
}

func (t *transaction) scanInvoices(results pgx.BatchResults, places []int) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	for _, i := range places {
		t.facts[i].invoice, t.facts[i].moved = InvoiceVersion{}, false
	}
	var position int
	var state int16
	var version int64
	var moved bool
	dest := []any{&position, &state, &version, &moved}
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return err
		}
		f := &t.facts[places[position-1]]
		f.invoice, f.moved = InvoiceVersion{entitlementv1.InvoiceState(state), version}, moved
	}
	return rows.Err()
}
