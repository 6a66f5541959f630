package store

import (
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	byKey         = entitlementv1.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY
	byBusinessKey = entitlementv1.MatchedBy_MATCHED_BY_BUSINESS_KEY
)

// facts is what the database says about one command, read after its locks were taken.
type facts struct {
	// now is database time.
	now time.Time
	// known is the row under the command's own key; an alias carries its own payload.
	known *Operation
	// winner is the operation whose result a replay gets.
	winner *Operation
	// entitlement is the one that the known operation is about or, when the key is new, the one under the business key, as it
	// is now.
	entitlement *Entitlement
	// entry is the line of its ledger that is the result of a replay.
	entry *Entry
	// invoice is the authority's record, zero where there is none, and moved says that this command's evidence moved it there
	// in this very transaction. Only read where the command may write.
	invoice InvoiceVersion
	moved   bool
	// onInvoice are the entitlements of the invoice that a RECORD_INVOICE_STATE is about, as they are now, and reversedBy says for
	// each the entry that the winner appended, if any.
	onInvoice  []*Entitlement
	reversedBy []*Entry
}

// change is what a command writes besides its attempt. The zero change writes nothing.
type change struct {
	// operation is the owner of an effect, or an alias.
	operation *Operation
	// granted is a new entitlement.
	granted *Entitlement
	// turned are entitlements as the entries below leave them.
	turned []*Entitlement
	// entries are new ledger lines.
	entries []*Entry
}

// ids are made outside the decision, so that it stays a pure function.
type ids struct {
	attempt     uuid.UUID
	entitlement uuid.UUID
}

// decide is the ladder that every write climbs: the key is known; the business key is taken; a precondition fails; else
// the write. It reports false when a stored payload has a recipe that this build does not know, or when a row that is kept for ever
// is gone: then somebody has had his hands in the tables.
func decide(c *Command, f *facts, catalog *Catalog, id ids) (Answer, change, bool) {
	if f.winner == nil && f.entitlement != nil {
		return Answer{}, change{}, false
	}
	if f.known != nil {
		return replayOfKey(c, f)
	}
	switch c.Kind {
	case entitlementv1.OperationKind_OPERATION_KIND_GRANT:
		return decideGrant(c, f, catalog, id)
	case entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE:
		a, ch := decideRecord(c, f, id)
		return a, ch, true
	default:
		a, ch := decideTurn(c, f, id)
		return a, ch, true
	}
}

// replayOfKey answers a command whose key is known. It never looks at the invoice.
func replayOfKey(c *Command, f *facts) (Answer, change, bool) {
	if e := f.entitlement; e != nil && c.Target.EntitlementID == uuid.Nil && c.Target.BusinessKey == e.Grant.BusinessKey() {
		// Granted, and turned by this very key, between the look for the target and the lock.
		c.Target.EntitlementID = e.ID
	}
	if c.Kind == f.known.Kind {
		same, recipeKnown := c.sameAs(f.known)
		if !recipeKnown {
			return Answer{}, change{}, false
		}
		if same {
			return already(byKey, f), change{}, true
		}
	}
	return conflicting(byKey, c.differencesFrom(f.known, f.entitlement), f.winner), change{}, true
}

// already is the stored result of the winner, with the current state beside it.
func already(by entitlementv1.MatchedBy, f *facts) Answer {
	a := Answer{
		Outcome:        entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED,
		MatchedBy:      by,
		Operation:      f.winner,
		CurrentInvoice: f.invoice,
	}
	if f.entitlement != nil {
		a.Entitlement = f.entitlement.asOf(f.entry)
		a.CurrentState, a.CurrentVersion = f.entitlement.State, f.entitlement.Version
	}
	if f.known != nil {
		a.Recorded = f.known.Invoice
	}
	for i, n := range f.reversedBy {
		if n != nil {
			a.Reversed = append(a.Reversed, f.onInvoice[i].asOf(n))
		}
	}
	return a
}

func decideGrant(c *Command, f *facts, catalog *Catalog, id ids) (Answer, change, bool) {
	if e := f.entitlement; e != nil {
		sum, recipeKnown := c.Grant.fingerprintUnder(e.Recipe)
		if !recipeKnown {
			return Answer{}, change{}, false
		}
		if sum != e.Fingerprint {
			return conflicting(byBusinessKey, between(&e.Grant, &c.Grant), f.winner), change{}, true
		}
		return already(byBusinessKey, f), change{operation: c.alias(f, id)}, true
	}
	if r := c.refusal(catalog); r != nil {
		return rejected(r.Reason, r.Retry, r.Message), change{}, true
	}
	if a, refused := refusedByInvoice(f.invoice); refused {
		return a, change{}, true
	}

	op := c.operation(f, id)
	e := &Entitlement{
		ID: id.entitlement, Grant: c.Grant, Fingerprint: op.Fingerprint, Recipe: op.Recipe,
		OperationKey: c.IdempotencyKey, GrantedAt: f.now, EndsAt: catalog.endsAt(&c.Grant, f.now),
		State: entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE, Version: 1, ChangedAt: f.now,
	}
	op.EntitlementID, op.EntryNumber = e.ID, 1
	return newly(op, e, e), change{
		operation: op,
		granted:   e,
		entries: []*Entry{{
			TenantID: c.TenantID, EntitlementID: e.ID, Number: 1, Kind: entitlementv1.EntryKind_ENTRY_KIND_GRANTED,
			OperationKey: c.IdempotencyKey, InvoiceVersion: f.invoice.Version, At: f.now,
		}},
	}, true
}

// decideRecord decides RECORD_INVOICE_STATE. The locking upsert has already moved the record where the version was
// higher.
func decideRecord(c *Command, f *facts, id ids) (Answer, change) {
	if !f.moved {
		switch {
		case f.invoice.Version > c.Invoice.Version:
			a := rejected(entitlementv1.RejectionReason_REJECTION_REASON_STALE_VERSION,
				entitlementv1.RetryAdvice_RETRY_ADVICE_NEVER,
				fmt.Sprintf("version %d of the invoice is on record, as %s", f.invoice.Version, stateName(f.invoice.State)))
			a.CurrentInvoice = f.invoice
			return a, change{}
		case f.invoice.State != c.Invoice.State:
			var d differences
			d.text("state", f.invoice.State.String(), c.Invoice.State.String())
			a := conflicting(byBusinessKey, d, f.winner)
			a.CurrentInvoice = f.invoice
			return a, change{}
		default:
			alias := c.alias(f, id)
			alias.Invoice = f.invoice
			a := already(byBusinessKey, f)
			a.Recorded = f.invoice
			return a, change{operation: alias}
		}
	}

	op := c.operation(f, id)
	op.Invoice = c.Invoice
	a := Answer{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, Operation: op, Recorded: c.Invoice, CurrentInvoice: f.invoice}
	ch := change{operation: op}
	if c.Invoice.reverses() {
		for _, e := range f.onInvoice {
			if e.State != entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE {
				continue
			}
			n := e.next(c, entitlementv1.EntryKind_ENTRY_KIND_REVERSED, c.Invoice.Version, "the invoice is "+stateName(c.Invoice.State), f.now)
			then := e.after(n)
			ch.entries = append(ch.entries, n)
			ch.turned = append(ch.turned, then)
			a.Reversed = append(a.Reversed, then)
		}
	}
	return a, ch
}

// decideTurn decides REVERSE and REINSTATE, which turn an entitlement to the other state.
func decideTurn(c *Command, f *facts, id ids) (Answer, change) {
	e := f.entitlement
	if e == nil {
		return rejected(entitlementv1.RejectionReason_REJECTION_REASON_NOT_GRANTED,
			entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE, "the tenant has no such entitlement"), change{}
	}
	// Granted between the look for the target and the lock, or found by its business key alone.
	c.Target.EntitlementID = e.ID
	kind := entitlementv1.EntryKind_ENTRY_KIND_REVERSED
	if c.Kind == entitlementv1.OperationKind_OPERATION_KIND_REINSTATE {
		kind = entitlementv1.EntryKind_ENTRY_KIND_REINSTATED
	}
	if e.State == stateAfter(kind) {
		return already(byBusinessKey, f), change{operation: c.alias(f, id)}
	}
	if kind == entitlementv1.EntryKind_ENTRY_KIND_REINSTATED {
		if a, refused := refusedByInvoice(f.invoice); refused {
			return a, change{}
		}
	}

	n := e.next(c, kind, f.invoice.Version, c.Reason, f.now)
	then := e.after(n)
	op := c.operation(f, id)
	op.EntitlementID, op.EntryNumber = e.ID, n.Number
	return newly(op, then, then), change{operation: op, turned: []*Entitlement{then}, entries: []*Entry{n}}
}

func newly(op *Operation, result, current *Entitlement) Answer {
	return Answer{
		Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, Operation: op, Entitlement: result,
		CurrentState: current.State, CurrentVersion: current.Version,
	}
}

// refusal is a precondition of a grant that needs no look at the database: the catalogue's rules, then the evidence. A
// command refused by it takes no lock and moves no invoice.
func (c *Command) refusal(catalog *Catalog) *Rejection {
	if c.Kind != entitlementv1.OperationKind_OPERATION_KIND_GRANT {
		return nil
	}
	if r := catalog.refusal(&c.Grant); r != nil {
		return r
	}
	if c.Invoice.State != entitlementv1.InvoiceState_INVOICE_STATE_PAID {
		return &Rejection{
			Reason:  entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID,
			Message: fmt.Sprintf("the evidence says that the invoice is %s", stateName(c.Invoice.State)),
			Retry:   entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
		}
	}
	return nil
}

// refusedByInvoice lets the authority's own record of the invoice decide.
func refusedByInvoice(record InvoiceVersion) (Answer, bool) {
	if record.State == entitlementv1.InvoiceState_INVOICE_STATE_PAID {
		return Answer{}, false
	}
	reason := entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID
	if record.reverses() {
		reason = entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_REVERSED
	}
	return rejected(reason, entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
		fmt.Sprintf("version %d of the invoice is on record, as %s", record.Version, stateName(record.State))), true
}

// operation is the row of a command that writes; the caller adds what it wrote.
func (c *Command) operation(f *facts, id ids) *Operation {
	return &Operation{
		TenantID: c.TenantID, IdempotencyKey: c.IdempotencyKey, Kind: c.Kind,
		Fingerprint: c.fingerprint(), Recipe: CurrentRecipe,
		InvoiceID: c.businessKey().InvoiceID, Actor: c.Actor, Reason: c.Reason,
		AttemptID: id.attempt, Origin: c.Origin, AppliedAt: f.now,
	}
}

// alias binds the command's key to the winner, with the command's own payload.
func (c *Command) alias(f *facts, id ids) *Operation {
	op := c.operation(f, id)
	op.OwnerKey = f.winner.IdempotencyKey
	if f.entitlement != nil {
		op.EntitlementID, op.EntryNumber = f.entitlement.ID, f.entry.Number
	}
	return op
}

// stateName is the state without the enum's prefix, for messages to people.
func stateName(s entitlementv1.InvoiceState) string {
	return strings.TrimPrefix(s.String(), "INVOICE_STATE_")
}
