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

// absenceAt says why an entitlement does not make its type held at a moment, or that it does (unspecified). The start is
// inclusive, the end exclusive.
func (e *Entitlement) absenceAt(at time.Time) entitlementv1.AbsenceReason {
	switch {
	case e.State != entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE:
		return entitlementv1.AbsenceReason_ABSENCE_REASON_REVERSED
	case e.EndsAt != nil && !at.Before(*e.EndsAt):
		return entitlementv1.AbsenceReason_ABSENCE_REASON_EXPIRED
	case e.Grant.StartsAt != nil && at.Before(*e.Grant.StartsAt):
		return entitlementv1.AbsenceReason_ABSENCE_REASON_NOT_STARTED
	default:
		return entitlementv1.AbsenceReason_ABSENCE_REASON_UNSPECIFIED
	}
}

// weigh adds what one entitlement says.
func (j *Judgement) weigh(e *Entitlement) {
	absence := e.absenceAt(j.At)
	if absence == entitlementv1.AbsenceReason_ABSENCE_REASON_UNSPECIFIED {
		if len(j.HeldBy) < heldByLimit {
			j.HeldBy = append(j.HeldBy, e)
		}
		return
	}
	j.Absence = max(j.Absence, absence)
}

// checkSQL walks one index, the tenant's entitlements of the type. The time of the database stands in each row, so that it is the
// same statement that asks for it.
const checkSQL = `
SELECT COALESCE($3, statement_timestamp()), entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity,
       starts_at, expires_at, fingerprint, recipe, operation_key, granted_at, ends_at, state, version, changed_at
  FROM entitlements
 WHERE tenant_id = $1 AND entitlement_type = $2 AND entitlement_type <> ''
 ORDER BY entitlement_id`

// Check judges whether the tenant holds the type at a moment, or now when that is nil.
func (s *Store) Check(ctx context.Context, tenant, entitlementType string, at *time.Time) (Judgement, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	j := Judgement{Absence: entitlementv1.AbsenceReason_ABSENCE_REASON_NEVER_GRANTED, At: time.Now()}
	var moment pgtype.Timestamptz
	if at != nil {
		j.At, moment = *at, pgtype.Timestamptz{Time: *at, Valid: true}
	}
	rows, err := s.reads.Query(ctx, checkSQL, tenant, entitlementType, moment)
	if err != nil {
		return Judgement{}, readFailure(err)
	}
	defer rows.Close()
	for rows.Next() {
		var r entitlementRow
		if err := rows.Scan(append([]any{&j.At}, r.destinations()...)...); err != nil {
			return Judgement{}, readFailure(err)
		}
		j.weigh(r.entitlement(tenant))
	}
	if err := rows.Err(); err != nil {
		return Judgement{}, readFailure(err)
	}
	if len(j.HeldBy) > 0 {
		j.Absence = entitlementv1.AbsenceReason_ABSENCE_REASON_UNSPECIFIED
	}
	return j, nil
}
