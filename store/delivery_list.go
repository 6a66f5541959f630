package store

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// DeliveryFilter says which of a tenant's deliveries are listed. Empty fields let all through.
type DeliveryFilter struct {
	TenantID    string
	Destination string
	State       entitlementv1.DeliveryState
}

func (f *DeliveryFilter) list() []string {
	return []string{"deliveries", f.TenantID, f.Destination, f.State.String()}
}

// The lists differ in the index that they walk, in its order, and no further than for a page: what waits for an operator has one of its own,
// all else is picked out of the tenant's deliveries, of the table that holds such. The view of both tables has no order to walk.
const (
	listDeliveriesSQL = listDeliveriesHead + `(` + listWaitingSQL + listConditionSQL + `)
        UNION ALL
        (` + listSettledSQL + listConditionSQL + `)` + listDeliveriesTail
	listWaitingDeliveriesSQL = listDeliveriesHead + listWaitingSQL + listConditionSQL + listDeliveriesTail
	listSettledDeliveriesSQL = listDeliveriesHead + listSettledSQL + listConditionSQL + listDeliveriesTail
	listStuckDeliveriesSQL   = listDeliveriesHead + listWaitingSQL + ` AND tenant_id > '' AND stuck > 0 AND stuck = $5::smallint` + listPageSQL +
		listDeliveriesTail

	listDeliveriesHead = `
SELECT` + deliveryColumnsSQL + `
  FROM (SELECT * FROM (
        `
	listWaitingSQL = `SELECT` + listColumnsSQL + ` due_at, leased_until, NULL::timestamptz AS settled_at, octet_length(body)::bigint AS body_bytes
           FROM deliveries WHERE tenant_id = $1`
	listSettledSQL = `SELECT` + listColumnsSQL + ` settled_at AS due_at, NULL::timestamptz AS leased_until, settled_at,
                COALESCE(body_bytes, octet_length(body)) AS body_bytes
           FROM settled_deliveries WHERE tenant_id = $1`
	listColumnsSQL = ` tenant_id, entitlement_id, entry_number, destination, delivery_id, state, attempts, poison, lease, last_error, created_at,
                content_type,`
	listConditionSQL = ` AND ($5::smallint = 0 OR state = $5)` + listPageSQL
	listPageSQL      = `
            AND (entitlement_id, entry_number, destination) > ($2, $3, $4) AND ($6::text = '' OR destination = $6)
          ORDER BY entitlement_id, entry_number, destination LIMIT $7`
	listDeliveriesTail = `) AS u
         ORDER BY entitlement_id, entry_number, destination LIMIT $7) AS d` + deliveryJoins + `
 ORDER BY d.entitlement_id, d.entry_number, d.destination`
)

// listSQL is the one for the state, 0 for all.
func listSQL(state entitlementv1.DeliveryState) string {
	switch state {
	case pendingState, sendingState:
		return listWaitingDeliveriesSQL
	case unknownState, deadState:
		return listStuckDeliveriesSQL
	case deliveredState, discardedState:
		return listSettledDeliveriesSQL
	default:
		return listDeliveriesSQL
	}
}

// Deliveries returns a page of a list, as they are now, in the order of granting and then of entries, and the token of the next page;
// empty when there is none.
func (s *Store) Deliveries(ctx context.Context, f DeliveryFilter, page Page) ([]*Delivery, string, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	place, err := s.tokens.place(f.list(), page.Token)
	if err != nil {
		return nil, "", err
	}
	entitlement, number, destination := readDeliveryPlace(place)
	limit := page.limit()
	var batch pgx.Batch
	batch.Queue(inOrderSQL)
	var all []*Delivery
	batch.Queue(listSQL(f.State), f.TenantID, entitlement, number, destination, int16(f.State), f.Destination, limit+1).Query(func(rows pgx.Rows) (err error) {
		all, err = scanDeliveries(rows)
		return err
	})
	if err := pgx.BeginFunc(ctx, s.reads, func(tx pgx.Tx) error { return tx.SendBatch(ctx, &batch).Close() }); err != nil {
		return nil, "", readFailure(err)
	}
	if len(all) <= limit {
		return all, "", nil
	}
	all = all[:limit]
	return all, s.tokens.after(f.list(), deliveryPlace(all[limit-1])), nil
}

// deliveryPlace is a delivery's place in a tenant's list.
func deliveryPlace(d *Delivery) string {
	n := &d.Event.Entry
	place := binary.BigEndian.AppendUint64(slices.Clone(n.EntitlementID[:]), uint64(n.Number))
	return string(append(place, d.Destination...))
}

// readDeliveryPlace reads one that was signed here.
func readDeliveryPlace(place string) (entitlement [16]byte, number int64, destination string) {
	if len(place) < 24 {
		return entitlement, 0, ""
	}
	copy(entitlement[:], place)
	return entitlement, int64(binary.BigEndian.Uint64([]byte(place[16:24]))), place[24:]
}

const deliverySQL = `
SELECT` + deliveryColumnsSQL + `
  FROM all_deliveries d` + deliveryJoins + `
 WHERE d.tenant_id = $1
   AND ($2::uuid IS NOT NULL AND d.delivery_id = $2
     OR $2::uuid IS NULL AND d.entitlement_id = $3 AND d.entry_number = $4 AND d.destination = $5)`

// queries is what a pool and a transaction have in common.
type queries interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func deliveryIn(ctx context.Context, q queries, tenant string, name DeliveryName) (*Delivery, error) {
	rows, err := q.Query(ctx, deliverySQL, tenant, nullUUID(name.ID), nullUUID(name.EntitlementID), name.EntryNumber, name.Destination)
	if err != nil {
		return nil, err
	}
	all, err := scanDeliveries(rows)
	if err == nil && len(all) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// Delivery returns one with its story, or ErrNotFound.
func (s *Store) Delivery(ctx context.Context, tenant string, name DeliveryName) (*DeliveryStory, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	d, err := deliveryIn(ctx, s.reads, tenant, name)
	if errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if err != nil {
		return nil, readFailure(err)
	}
	stories, _, err := s.storiesOf(ctx, tenant, []*Delivery{d})
	if err != nil {
		return nil, err
	}
	return &stories[0], nil
}

// deliveriesOfSQL reads the latest deliveries of some entries of a tenant. OFFSET keeps the planner from reading all of the tenant's instead.
const deliveriesOfSQL = `
SELECT` + deliveryColumnsSQL + `
  FROM (SELECT d.*
          FROM unnest($2::uuid[], $3::bigint[]) AS c (entitlement_id, entry_number)
         CROSS JOIN LATERAL (SELECT * FROM all_deliveries a
                              WHERE a.tenant_id = $1 AND a.entitlement_id = c.entitlement_id AND a.entry_number = c.entry_number
                             OFFSET 0) AS d
         ORDER BY d.entitlement_id DESC, d.entry_number DESC, d.destination DESC LIMIT $4) AS d` + deliveryJoins + `
 ORDER BY d.entitlement_id, d.entry_number, d.destination`

// deliveriesOf reports also whether something of their stories was left out.
func (s *Store) deliveriesOf(ctx context.Context, tenant string, entries []Entry) (_ []DeliveryStory, cut bool, _ error) {
	k := entryKeys(entries)
	rows, err := s.reads.Query(ctx, deliveriesOfSQL, tenant, k.entitlement, k.number, storyLimit+1)
	if err != nil {
		return nil, false, readFailure(err)
	}
	all, err := scanDeliveries(rows)
	if err != nil {
		return nil, false, readFailure(err)
	}
	return s.storiesOf(ctx, tenant, all)
}

func entryKeys(entries []Entry) (k deliveryKeys) {
	for i := range entries {
		k.add(entries[i].TenantID, entries[i].EntitlementID, entries[i].Number)
	}
	return k
}

const deliveryAttemptsOfSQL = `
SELECT delivery_id, attempt_number, worker, started_at, ended_at, outcome, status_code, error, note
  FROM all_delivery_attempts WHERE tenant_id = $1 AND delivery_id = ANY ($2)
 ORDER BY started_at DESC, attempt_number DESC LIMIT $3`

// storiesOf adds the attempts and the operators' actions, at most the latest storyLimit of each in all, and reports whether there are more.
func (s *Store) storiesOf(ctx context.Context, tenant string, deliveries []*Delivery) (_ []DeliveryStory, cut bool, _ error) {
	if len(deliveries) == 0 {
		return nil, false, nil
	}
	stories := make([]DeliveryStory, len(deliveries))
	ids := make([][16]byte, len(deliveries))
	place := make(map[uuid.UUID]*DeliveryStory, len(deliveries))
	for i, d := range deliveries {
		stories[i].Delivery, ids[i] = d, d.ID
		place[d.ID] = &stories[i]
	}
	rows, err := s.reads.Query(ctx, deliveryAttemptsOfSQL, tenant, ids, storyLimit)
	if err != nil {
		return nil, false, readFailure(err)
	}
	var id pgtype.UUID
	var a DeliveryAttempt
	var ended *time.Time
	var outcome int16
	if _, err := pgx.ForEachRow(rows, []any{&id, &a.Number, &a.Worker, &a.StartedAt, &ended, &outcome, &a.StatusCode, &a.Error, &a.Note},
		func() error {
			a.EndedAt, a.Outcome = ended, entitlementv1.DeliveryAttemptOutcome(outcome)
			ended = nil
			story := place[id.Bytes]
			story.Attempts = append(story.Attempts, a)
			return nil
		}); err != nil {
		return nil, false, readFailure(err)
	}
	if rows, err = s.reads.Query(ctx, actionsOfSQL, tenant, ids, storyLimit+1); err != nil {
		return nil, false, readFailure(err)
	}
	actions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[actionRow])
	if err != nil {
		return nil, false, readFailure(err)
	}
	if cut = len(actions) > storyLimit; cut {
		actions = actions[:storyLimit]
	}
	for i := range actions {
		story := place[actions[i].ID]
		story.Actions = append(story.Actions, actions[i].action())
	}
	for i := range stories {
		slices.Reverse(stories[i].Attempts)
		slices.Reverse(stories[i].Actions)
		cut = cut || int64(len(stories[i].Attempts)) < stories[i].Delivery.Attempts
	}
	return stories, cut, nil
}
