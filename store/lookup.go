package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Lookup names an operation by its key or, when that is empty, by its effect.
type Lookup struct {
	TenantID       string
	IdempotencyKey string
	BusinessKey    BusinessKey
	// Grant, when set, is compared with what is stored. Its business key is looked up where the key is unknown.
	Grant *Grant
	// Full asks for the story too.
	Full bool
}

// Found is what a replay would be told, without an attempt being written.
type Found struct {
	Answer Answer
	// Story is only read on demand.
	Attempts []Attempt
	Aliases  []Alias
	Entries  []Entry
	// Deliveries and Notifications are those of the entries.
	Deliveries    []DeliveryStory
	Notifications []Notification
	// Pauses are those that held while one of the deliveries was not settled.
	Pauses []Pause
	// Truncated says that one of these has more than an answer holds.
	Truncated bool
}

// storyLimit bounds the attempts and aliases of one answer, and entriesLimit its entries, so that it stays one that clients accept.
const (
	storyLimit   = 500
	entriesLimit = 1000
)

// lookupSQL reads what is known, and in the same statement whether this is a writable primary: only such a one may say that there
// is nothing. It returns a row in any case.
const lookupSQL = `
SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off',` + factsColumns + `
  FROM (VALUES ($1::text, $2::text, $3::smallint, $4::text, $5::text, $6::bigint))
       AS c (tenant_id, idempotency_key, kind, invoice_id, entitlement_type, operation_version)` + factsFrom

// Operation looks an operation up. NOT_APPLIED is answered by a writable primary alone; elsewhere a *Failure is.
func (s *Store) Operation(ctx context.Context, l Lookup) (Found, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	business := l.BusinessKey
	if l.Grant != nil {
		business = l.Grant.BusinessKey()
	}
	var writable bool
	var r factsRow
	err := s.reads.QueryRow(ctx, lookupSQL, l.TenantID, l.IdempotencyKey, int16(entitlementv1.OperationKind_OPERATION_KIND_GRANT),
		business.InvoiceID, business.EntitlementType, business.OperationVersion).
		Scan(append([]any{&writable}, r.destinations()...)...)
	if err != nil {
		return Found{}, readFailure(err)
	}
	var f facts
	r.fill(&f, l.TenantID)

	found := Found{}
	switch {
	case f.winner != nil:
		if err = s.readReversed(ctx, &f); err != nil {
			return Found{}, err
		}
		if found.Answer, err = foretell(&l, &f); err != nil {
			return Found{}, err
		}
	case f.entitlement != nil:
		return Found{}, winnerGone(f.entitlement)
	case !writable:
		return Found{}, &Failure{Reason: ReasonReadOnly, RetryDelay: jitter(time.Second)}
	default:
		found.Answer.Outcome = entitlementv1.Outcome_OUTCOME_NOT_APPLIED
	}
	if l.Full {
		err = s.readStory(ctx, &l, business, &f, &found)
	}
	return found, err
}

// foretell is what a replay would be told, given that something is known.
func foretell(l *Lookup, f *facts) (Answer, error) {
	by := byBusinessKey
	if f.known != nil {
		by = byKey
	}
	if l.Grant != nil {
		replay := Command{Kind: entitlementv1.OperationKind_OPERATION_KIND_GRANT, TenantID: l.TenantID, Grant: *l.Grant}
		stored := f.known
		if stored == nil {
			stored = f.winner
		}
		same, recipeKnown := stored.Kind == replay.Kind, true
		if same {
			same, recipeKnown = replay.sameAs(stored)
		}
		if !recipeKnown {
			return Answer{}, newerRecipe()
		}
		if !same {
			return conflicting(by, replay.differencesFrom(stored, f.entitlement), f.winner), nil
		}
	}
	return already(by, f), nil
}

// readReversed completes the stored result of an operation that recorded an invoice's state.
func (s *Store) readReversed(ctx context.Context, f *facts) error {
	w := f.winner
	if w.Kind != entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE {
		return nil
	}
	if f.known == nil {
		f.known = w
	}
	replay := pending{command: Command{Kind: w.Kind, TenantID: w.TenantID, IdempotencyKey: w.IdempotencyKey, InvoiceID: w.InvoiceID}}
	rows, err := s.reads.Query(ctx, readOnInvoiceSQL, []*pending{&replay})
	if err == nil {
		err = scanOnInvoice(rows, func(int) (*facts, string) { return f, w.TenantID })
	}
	if err != nil {
		return readFailure(err)
	}
	return nil
}

func (s *Store) readStory(ctx context.Context, l *Lookup, business BusinessKey, f *facts, found *Found) (err error) {
	keys := []string{l.IdempotencyKey}
	if f.winner != nil {
		keys = append(keys, f.winner.IdempotencyKey)
		if found.Aliases, err = s.aliases(ctx, l.TenantID, f.winner.IdempotencyKey); err != nil {
			return err
		}
		found.Aliases = latest(found.Aliases, storyLimit, &found.Truncated)
		for _, a := range found.Aliases {
			keys = append(keys, a.IdempotencyKey)
		}
		if found.Entries, err = s.entriesOf(ctx, f.winner); err != nil {
			return err
		}
		found.Entries = latest(found.Entries, entriesLimit, &found.Truncated)
		var cut bool
		if found.Deliveries, cut, err = s.deliveriesOf(ctx, l.TenantID, found.Entries); err != nil {
			return err
		}
		found.Truncated = found.Truncated || cut
		found.Deliveries = latest(found.Deliveries, storyLimit, &found.Truncated)
		if found.Pauses, err = s.pausesOf(ctx, found.Deliveries); err != nil {
			return err
		}
		found.Pauses = latest(found.Pauses, storyLimit, &found.Truncated)
		if found.Notifications, err = s.notificationsOf(ctx, l.TenantID, found.Entries); err != nil {
			return err
		}
		found.Notifications = latest(found.Notifications, storyLimit, &found.Truncated)
	}
	found.Attempts, err = s.attemptsUnder(ctx, l.TenantID, keys, business, f.winner)
	found.Attempts = latest(found.Attempts, storyLimit, &found.Truncated)
	return err
}

// latest keeps the end of a list, of which one more was read than an answer holds, and notes where that is not all.
func latest[T any](all []T, limit int, truncated *bool) []T {
	if len(all) <= limit {
		return all
	}
	*truncated = true
	return all[len(all)-limit:]
}

const aliasesSQL = `
SELECT idempotency_key, applied_at FROM operations
 WHERE tenant_id = $1 AND owner_key = $2 AND owner_key IS NOT NULL
 ORDER BY applied_at DESC, idempotency_key LIMIT $3`

func (s *Store) aliases(ctx context.Context, tenant, owner string) ([]Alias, error) {
	rows, err := s.reads.Query(ctx, aliasesSQL, tenant, owner, storyLimit+1)
	if err != nil {
		return nil, readFailure(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Alias])
	if err != nil {
		return nil, readFailure(err)
	}
	slices.Reverse(all)
	return all, nil
}

// entriesOfSQL reads the ledger of the operation's entitlement, or the entries that the operation appended on its invoice; the latest
// first, since there may be more than an answer holds.
const entriesOfSQL = `
SELECT n.entitlement_id, n.entry_number, n.kind, n.operation_key, n.invoice_version, n.actor, n.reason, n.at
  FROM entitlements e
  JOIN entries n ON n.tenant_id = e.tenant_id AND n.entitlement_id = e.entitlement_id
 WHERE e.tenant_id = $1
   AND ($2::uuid IS NOT NULL AND e.entitlement_id = $2
     OR $2::uuid IS NULL AND e.invoice_id = $3 AND n.operation_key = $4)
 ORDER BY n.entitlement_id DESC, n.entry_number DESC LIMIT $5`

func (s *Store) entriesOf(ctx context.Context, op *Operation) ([]Entry, error) {
	id := pgtype.UUID{Bytes: op.EntitlementID, Valid: op.EntitlementID != uuid.Nil}
	rows, err := s.reads.Query(ctx, entriesOfSQL, op.TenantID, id, op.InvoiceID, op.IdempotencyKey, entriesLimit+1)
	if err != nil {
		return nil, readFailure(err)
	}
	defer rows.Close()
	var all []Entry
	for rows.Next() {
		var entitlement pgtype.UUID
		var r entryRow
		if err := rows.Scan(append([]any{&entitlement}, r.destinations()...)...); err != nil {
			return nil, readFailure(err)
		}
		all = append(all, *r.entry(op.TenantID, entitlement.Bytes))
	}
	if err := rows.Err(); err != nil {
		return nil, readFailure(err)
	}
	slices.Reverse(all)
	return all, nil
}

const attemptColumnsSQL = `
SELECT at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, differing_fields, invoice_id, entitlement_type,
       operation_version, event_id, source, caller, trace_id, span_id, winner_trace_id, COALESCE(previous_tries, 0)
  FROM attempts`

// attemptsUnderSQL finds the winning attempt, which its operation names, and all others by their keys and, where a look-up names no
// key, by the effect that they asked for. The indexes leave winners out, so that a grant need not
// pay for them.
const attemptsUnderSQL = attemptColumnsSQL + `
 WHERE tenant_id = $1 AND outcome <> 1 AND idempotency_key = ANY ($2)` + `
 UNION ALL` + attemptColumnsSQL + `
 WHERE tenant_id = $1 AND outcome <> 1 AND $3 AND invoice_id = $4 AND entitlement_type = $5 AND operation_version = $6
   AND idempotency_key <> ALL ($2)
 UNION ALL` + attemptColumnsSQL + `
 WHERE tenant_id = $1 AND at = $7 AND attempt_id = $8
 ORDER BY at DESC, attempt_id DESC LIMIT $9`

func (s *Store) attemptsUnder(ctx context.Context, tenant string, keys []string, b BusinessKey, winner *Operation) ([]Attempt, error) {
	byEffect := keys[0] == ""
	var at pgtype.Timestamptz
	var id pgtype.UUID
	if winner != nil {
		at, id = pgtype.Timestamptz{Time: winner.AppliedAt, Valid: true}, pgtype.UUID{Bytes: winner.AttemptID, Valid: true}
	}
	rows, err := s.reads.Query(ctx, attemptsUnderSQL, tenant, keys, byEffect, b.InvoiceID, b.EntitlementType, b.OperationVersion,
		at, id, storyLimit+1)
	if err != nil {
		return nil, readFailure(err)
	}
	all, err := scanAttempts(rows, tenant)
	slices.Reverse(all)
	return all, err
}

// scanAttempts reads rows of attemptColumnsSQL.
func scanAttempts(rows pgx.Rows, tenant string) ([]Attempt, error) {
	defer rows.Close()
	var all []Attempt
	for rows.Next() {
		a := Attempt{TenantID: tenant}
		var id pgtype.UUID
		var kind, outcome, matchedBy, reason int16
		var traceID, spanID, winnerTraceID []byte
		if err := rows.Scan(&a.At, &id, &a.IdempotencyKey, &kind, &outcome, &matchedBy, &reason, &a.DifferingFields, &a.InvoiceID,
			&a.EntitlementType, &a.OperationVersion, &a.Origin.EventID, &a.Origin.Source, &a.Origin.Caller, &traceID, &spanID,
			&winnerTraceID, &a.PreviousTries); err != nil {
			return nil, readFailure(err)
		}
		a.ID = id.Bytes
		a.Kind, a.Outcome = entitlementv1.OperationKind(kind), entitlementv1.Outcome(outcome)
		a.MatchedBy, a.Reason = entitlementv1.MatchedBy(matchedBy), entitlementv1.RejectionReason(reason)
		copy(a.Origin.TraceID[:], traceID)
		copy(a.Origin.SpanID[:], spanID)
		copy(a.WinnerTraceID[:], winnerTraceID)
		all = append(all, a)
	}
	if err := rows.Err(); err != nil {
		return nil, readFailure(err)
	}
	return all, nil
}

const entitlementSQL = entitlementColumnsSQL + `
 WHERE tenant_id = $1 AND (entitlement_id = $2
    OR invoice_id = $3 AND entitlement_type = $4 AND operation_version = $5)`

// Entitlement returns one as it is now, or ErrNotFound.
func (s *Store) Entitlement(ctx context.Context, tenant string, t Target) (*Entitlement, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	id := pgtype.UUID{Bytes: t.EntitlementID, Valid: t.EntitlementID != uuid.Nil}
	b := t.BusinessKey
	var r entitlementRow
	err := s.reads.QueryRow(ctx, entitlementSQL, tenant, id, b.InvoiceID, b.EntitlementType, b.OperationVersion).Scan(r.destinations()...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, readFailure(err)
	}
	return r.entitlement(tenant), nil
}
