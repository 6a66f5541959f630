package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Judgement is whether a tenant holds an entitlement type at a moment.
type Judgement struct {
	// HeldBy are the entitlements that say so, oldest first, at most heldByLimit; none where it is not held.
	HeldBy []*Entitlement
	// Absence is why not: of all the entitlements, the reason that comes closest.
	Absence entitlementv1.AbsenceReason
	At      time.Time
}

// heldByLimit bounds how many entitlements are named.
const heldByLimit = 100

// absenceSQL is why an entitlement does not make its type held at a moment, as a number of AbsenceReason, or 0 where it does. This is the
// one place that judges windows: the start is inclusive, the end exclusive.
const (
	absenceSQL = `CASE WHEN state <> 1 THEN 2 WHEN ends_at <= ` + momentSQL + ` THEN 3 WHEN starts_at > ` + momentSQL + ` THEN 4 ELSE 0 END`
	momentSQL  = `COALESCE($3, statement_timestamp())`
)

// checkSQL walks the tenant's entitlements of the type up to as many as are named: past those that do not hold, and no further. Only where
// none holds it walks them again, all of them, for the reason. It returns a row in any case.
const (
	checkSQL = `
WITH held AS (
    SELECT * FROM entitlements WHERE` + ofTypeSQL + ` AND ` + absenceSQL + ` < 1
     ORDER BY entitlement_type, entitlement_id LIMIT $4)
SELECT ` + momentSQL + `,
       CASE WHEN e.entitlement_id IS NULL THEN (SELECT COALESCE(max(` + absenceSQL + `), 1) FROM entitlements WHERE` + ofTypeSQL + `) ELSE 0 END,` + knownEntitlementSQL + `
  FROM (VALUES (true)) AS always LEFT JOIN held e ON true
 ORDER BY e.entitlement_id`

	// ofTypeSQL names one type as a range, so that entitlements_by_type alone has the order. Told that it is one, the planner may walk the
	// primary key for it, which has the same order, and everything else that the tenant holds: it does so where most rows are of one type.
	ofTypeSQL = ` tenant_id = $1 AND entitlement_type BETWEEN $2 AND $2 AND entitlement_type <> ''`
)

// Check judges whether the tenant holds the type at a moment, or now when that is nil.
func (s *Store) Check(ctx context.Context, tenant, entitlementType string, at *time.Time) (Judgement, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var moment pgtype.Timestamptz
	if at != nil {
		moment = pgtype.Timestamptz{Time: *at, Valid: true}
	}
	rows, err := s.reads.Query(ctx, checkSQL, tenant, entitlementType, moment, heldByLimit)
	if err != nil {
		return Judgement{}, readFailure(err)
	}
	defer rows.Close()
	var j Judgement
	for rows.Next() {
		var r entitlementRow
		if err := rows.Scan(append([]any{&j.At, &j.Absence}, r.destinations()...)...); err != nil {
			return Judgement{}, readFailure(err)
		}
		if e := r.entitlement(tenant); e != nil {
			j.HeldBy = append(j.HeldBy, e)
		}
	}
	if err := rows.Err(); err != nil {
		return Judgement{}, readFailure(err)
	}
	return j, nil
}
