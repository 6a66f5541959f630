package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// takeUnknownSQL hands UNKNOWN deliveries out to one asker at a time.
const takeUnknownSQL = `
UPDATE deliveries d
   SET due_at = statement_timestamp() + make_interval(secs => $3)
  FROM (SELECT tenant_id, entitlement_id, entry_number, destination FROM deliveries
         WHERE destination = $1 AND destination > '' AND stuck > 0 AND stuck = 3 AND due_at <= statement_timestamp()
           AND ` + notPausedSQL + `
         ORDER BY due_at LIMIT $2
           FOR NO KEY UPDATE SKIP LOCKED) AS c
 WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
   AND d.destination = c.destination AND d.state = 3
RETURNING d.tenant_id, d.entitlement_id, d.entry_number`

// unknownByKeySQL reads them, with what a look-up tells the destination.
const unknownByKeySQL = `
SELECT` + ownColumnsSQL + bodyColumnsSQL + notifyColumnsSQL + heldBySQL + `,` + eventColumnsSQL + `
  FROM unnest($1::text[], $2::uuid[], $3::bigint[]) WITH ORDINALITY AS c (tenant_id, entitlement_id, entry_number, position)
  JOIN deliveries d ON d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
        AND d.destination = $4` + deliveryJoins + byPositionSQL

// TakeUnknown returns up to limit UNKNOWN deliveries of a destination that is not paused, for whoever can look up whether they arrived and then calls
// Resolve, with Attempts as ObservedAttempts. None of them is handed out again for the given time, by any replica.
func (s *Store) TakeUnknown(ctx context.Context, destination string, again time.Duration, limit int) ([]*Delivery, error) {
	var all []*Delivery
	err := s.inTransaction(ctx, func(tx pgx.Tx) error {
		var k deliveryKeys
		rows, err := tx.Query(ctx, takeUnknownSQL, destination, limit, again.Seconds())
		if err != nil {
			return err
		}
		var tenant string
		var id pgtype.UUID
		var number int64
		if _, err := pgx.ForEachRow(rows, []any{&tenant, &id, &number}, func() error {
			k.add(tenant, id.Bytes, number)
			return nil
		}); err != nil || len(k.tenant) == 0 {
			return err
		}
		if rows, err = tx.Query(ctx, unknownByKeySQL, k.tenant, k.entitlement, k.number, destination); err != nil {
			return err
		}
		all, err = scanDeliveries(rows)
		return err
	})
	if err != nil {
		return nil, readFailure(err)
	}
	return all, nil
}
