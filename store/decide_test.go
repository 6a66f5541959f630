package store

import (
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	kindGrant     = pb.OperationKind_OPERATION_KIND_GRANT
	kindRecord    = pb.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE
	kindReverse   = pb.OperationKind_OPERATION_KIND_REVERSE
	kindReinstate = pb.OperationKind_OPERATION_KIND_REINSTATE

	unpaid   = pb.InvoiceState_INVOICE_STATE_OPEN
	paid     = pb.InvoiceState_INVOICE_STATE_PAID
	voided   = pb.InvoiceState_INVOICE_STATE_VOIDED
	refunded = pb.InvoiceState_INVOICE_STATE_REFUNDED

	active   = pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE
	reversed = pb.EntitlementState_ENTITLEMENT_STATE_REVERSED
)

var (
	decideNow   = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	grantedThen = decideNow.Add(-time.Hour)
	theID       = uuid.MustParse("01900000-0000-7000-8000-000000000001")
	newIDs      = ids{
		attempt:     uuid.MustParse("01900000-0000-7000-8000-00000000000a"),
		entitlement: uuid.MustParse("01900000-0000-7000-8000-00000000000e"),
	}
)

// someGrant is the grant of the table: K1 granted it in the past.
func someGrant(key string) *Command {
	return &Command{
		Kind: kindGrant, TenantID: "t", IdempotencyKey: key,
		Grant:   Grant{TenantID: "t", InvoiceID: "i", EntitlementType: "x", Scope: map[string]string{"seats": "10"}},
		Invoice: InvoiceVersion{paid, 1},
	}
}

func someRecord(key string, state pb.InvoiceState, version int64) *Command {
	return &Command{Kind: kindRecord, TenantID: "t", IdempotencyKey: key, InvoiceID: "i", Invoice: InvoiceVersion{state, version}}
}

func someTurn(kind pb.OperationKind, key string) *Command {
	return &Command{
		Kind: kind, TenantID: "t", IdempotencyKey: key, Actor: "me", Reason: "asked for",
		Target: Target{EntitlementID: theID, BusinessKey: BusinessKey{InvoiceID: "i", EntitlementType: "x"}},
	}
}

func with(c *Command, change func(*Command)) *Command {
	change(c)
	return c
}

// stored is the row that the command left, as an owner or, when owner is set, as an alias.
func stored(c *Command, owner string) *Operation {
	op := c.operation(&facts{now: grantedThen}, ids{})
	op.OwnerKey = owner
	if c.Kind == kindRecord {
		op.Invoice = c.Invoice
	} else {
		op.EntitlementID, op.EntryNumber = theID, 1
	}
	return op
}

// someEntitlement is the one that K1 granted, after so many entries, all in the past.
func someEntitlement(version int64) *Entitlement {
	c := someGrant("K1")
	state := active
	if version%2 == 0 {
		state = reversed
	}
	return &Entitlement{
		ID: theID, Grant: c.Grant, Fingerprint: c.Grant.Fingerprint(), Recipe: CurrentRecipe, OperationKey: "K1",
		GrantedAt: grantedThen, State: state, Version: version, ChangedAt: grantedThen,
	}
}

func someEntry(number int64, key string) *Entry {
	kind := pb.EntryKind_ENTRY_KIND_GRANTED
	switch {
	case number%2 == 0:
		kind = pb.EntryKind_ENTRY_KIND_REVERSED
	case number > 1:
		kind = pb.EntryKind_ENTRY_KIND_REINSTATED
	}
	return &Entry{TenantID: "t", EntitlementID: theID, Number: number, Kind: kind, OperationKey: key, At: grantedThen}
}

// unknownRecipe marks a row as written by a newer build.
func unknownRecipe(f facts) facts {
	if f.known != nil {
		f.known.Recipe = 99
	}
	if f.entitlement != nil {
		f.entitlement.Recipe = 99
	}
	return f
}

func TestDecide_Ladder(t *testing.T) {
	granted := func(version int64) facts {
		op := stored(someGrant("K1"), "")
		return facts{winner: op, entitlement: someEntitlement(version), entry: someEntry(1, "K1"), invoice: InvoiceVersion{paid, 1}}
	}
	knownGrant := func(version int64) facts {
		f := granted(version)
		f.known = f.winner
		return f
	}
	aliasOf := func(c *Command, f facts) facts {
		f.known = stored(c, f.winner.IdempotencyKey)
		return f
	}
	// reversedFacts are those of a command with a new key that names an entitlement that R1 reversed.
	reversedFacts := func() facts {
		return facts{winner: stored(someTurn(kindReverse, "R1"), ""), entitlement: someEntitlement(2), entry: someEntry(2, "R1"),
			invoice: InvoiceVersion{paid, 1}}
	}
	knownReversal := func() facts {
		f := reversedFacts()
		f.known = f.winner
		return f
	}
	recorded := func(state pb.InvoiceState, version int64) facts {
		return facts{winner: stored(someRecord("S1", state, version), ""), invoice: InvoiceVersion{state, version}}
	}
	knownRecord := func() facts {
		f := recorded(refunded, 5)
		f.known = f.winner
		f.onInvoice, f.reversedBy = []*Entitlement{someEntitlement(3), someEntitlement(1)}, []*Entry{someEntry(2, "S1"), nil}
		return f
	}
	catalog := &Catalog{Types: map[string]CatalogType{"x": {ScopeKeys: []string{"seats"}}}}
	narrow := &Catalog{Types: map[string]CatalogType{"other": {}}}

	for _, c := range []struct {
		name    string
		command *Command
		facts   facts
		catalog *Catalog

		outcome  pb.Outcome
		by       pb.MatchedBy
		reason   pb.RejectionReason
		differ   []string
		winner   string // key of the operation that is named
		version  int64  // of the result
		current  int64
		reversed int    // entitlements that the answer names as taken back
		binds    string // owner of the operation that is written, "-" for an owner's row
		entries  []pb.EntryKind
		unknown  bool
	}{
		// NEWLY_APPLIED
		{name: "grant", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{paid, 1}},
			outcome: 1, winner: "K2", version: 1, current: 1, binds: "-", entries: []pb.EntryKind{1}},
		{name: "grant allowed by the catalogue", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{paid, 1}}, catalog: catalog,
			outcome: 1, winner: "K2", version: 1, current: 1, binds: "-", entries: []pb.EntryKind{1}},
		{name: "record of an invoice that nobody has seen", command: someRecord("S2", refunded, 1),
			facts:   facts{invoice: InvoiceVersion{refunded, 1}, moved: true},
			outcome: 1, winner: "S2", binds: "-"},
		{name: "record of a payment", command: someRecord("S2", paid, 2),
			facts:   facts{invoice: InvoiceVersion{paid, 2}, moved: true, onInvoice: []*Entitlement{someEntitlement(1)}, reversedBy: []*Entry{nil}},
			outcome: 1, winner: "S2", binds: "-"},
		{name: "record of a refund", command: someRecord("S2", refunded, 2),
			facts: facts{invoice: InvoiceVersion{refunded, 2}, moved: true,
				onInvoice: []*Entitlement{someEntitlement(1), someEntitlement(2), someEntitlement(3)}, reversedBy: make([]*Entry, 3)},
			outcome: 1, winner: "S2", binds: "-", reversed: 2, entries: []pb.EntryKind{2, 2}},
		{name: "record of a void", command: someRecord("S2", voided, 2),
			facts:   facts{invoice: InvoiceVersion{voided, 2}, moved: true, onInvoice: []*Entitlement{someEntitlement(1)}, reversedBy: make([]*Entry, 1)},
			outcome: 1, winner: "S2", binds: "-", reversed: 1, entries: []pb.EntryKind{2}},
		{name: "reverse", command: someTurn(kindReverse, "R2"), facts: granted(1),
			outcome: 1, winner: "R2", version: 2, current: 2, binds: "-", entries: []pb.EntryKind{2}},
		{name: "reverse under a refunded invoice", command: someTurn(kindReverse, "R2"),
			facts:   func() facts { f := granted(1); f.invoice = InvoiceVersion{refunded, 2}; return f }(),
			outcome: 1, winner: "R2", version: 2, current: 2, binds: "-", entries: []pb.EntryKind{2}},
		{name: "reinstate", command: someTurn(kindReinstate, "R2"), facts: reversedFacts(),
			outcome: 1, winner: "R2", version: 3, current: 3, binds: "-", entries: []pb.EntryKind{3}},

		// ALREADY_APPLIED
		{name: "grant, same key", command: someGrant("K1"), facts: knownGrant(1), outcome: 2, by: byKey, winner: "K1", version: 1, current: 1},
		{name: "grant, same key, reversed since", command: someGrant("K1"), facts: knownGrant(2),
			outcome: 2, by: byKey, winner: "K1", version: 1, current: 2},
		{name: "grant, same key, other evidence", command: with(someGrant("K1"), func(c *Command) { c.Invoice = InvoiceVersion{voided, 9} }),
			facts: knownGrant(1), outcome: 2, by: byKey, winner: "K1", version: 1, current: 1},
		{name: "grant, same key, invoice refunded", command: someGrant("K1"),
			facts:   func() facts { f := knownGrant(2); f.invoice = InvoiceVersion{refunded, 9}; return f }(),
			outcome: 2, by: byKey, winner: "K1", version: 1, current: 2},
		{name: "grant, same key, dropped from the catalogue", command: someGrant("K1"), facts: knownGrant(1), catalog: narrow,
			outcome: 2, by: byKey, winner: "K1", version: 1, current: 1},
		{name: "grant, alias", command: someGrant("K2"), facts: aliasOf(someGrant("K2"), granted(1)),
			outcome: 2, by: byKey, winner: "K1", version: 1, current: 1},
		{name: "grant, business key", command: someGrant("K2"), facts: granted(2),
			outcome: 2, by: byBusinessKey, winner: "K1", version: 1, current: 2, binds: "K1"},
		{name: "grant, business key, unpaid evidence", command: with(someGrant("K2"), func(c *Command) { c.Invoice.State = unpaid }),
			facts: granted(1), outcome: 2, by: byBusinessKey, winner: "K1", version: 1, current: 1, binds: "K1"},
		{name: "grant, business key, dropped from the catalogue", command: someGrant("K2"), facts: granted(1), catalog: narrow,
			outcome: 2, by: byBusinessKey, winner: "K1", version: 1, current: 1, binds: "K1"},
		{name: "record, same key", command: someRecord("S1", refunded, 5), facts: knownRecord(), outcome: 2, by: byKey, winner: "S1", reversed: 1},
		{name: "record, same key, overtaken by a higher version", command: someRecord("S1", refunded, 5),
			facts:   func() facts { f := knownRecord(); f.invoice = InvoiceVersion{paid, 6}; return f }(),
			outcome: 2, by: byKey, winner: "S1", reversed: 1},
		{name: "record, same version and state", command: someRecord("S2", refunded, 5), facts: recorded(refunded, 5),
			outcome: 2, by: byBusinessKey, winner: "S1", binds: "S1"},
		{name: "record, same version and state as a grant's evidence", command: someRecord("S2", paid, 1),
			facts:   facts{winner: stored(someGrant("K1"), ""), invoice: InvoiceVersion{paid, 1}},
			outcome: 2, by: byBusinessKey, winner: "K1", binds: "K1"},
		{name: "record, alias", command: someRecord("S2", refunded, 5), facts: aliasOf(someRecord("S2", refunded, 5), recorded(refunded, 5)),
			outcome: 2, by: byKey, winner: "S1"},
		{name: "reverse, same key", command: someTurn(kindReverse, "R1"), facts: knownReversal(),
			outcome: 2, by: byKey, winner: "R1", version: 2, current: 2},
		{name: "reverse, same key, reinstated since", command: someTurn(kindReverse, "R1"),
			facts:   func() facts { f := knownReversal(); f.entitlement = someEntitlement(3); return f }(),
			outcome: 2, by: byKey, winner: "R1", version: 2, current: 3},
		{name: "reverse, reversed by another key", command: someTurn(kindReverse, "R2"), facts: reversedFacts(),
			outcome: 2, by: byBusinessKey, winner: "R1", version: 2, current: 2, binds: "R1"},
		{name: "reverse, reversed by another key, for another reason",
			command: with(someTurn(kindReverse, "R2"), func(c *Command) { c.Reason = "other" }), facts: reversedFacts(),
			outcome: 2, by: byBusinessKey, winner: "R1", version: 2, current: 2, binds: "R1"},
		{name: "reverse, alias", command: someTurn(kindReverse, "R2"), facts: aliasOf(someTurn(kindReverse, "R2"), reversedFacts()),
			outcome: 2, by: byKey, winner: "R1", version: 2, current: 2},
		{name: "reinstate what is active", command: someTurn(kindReinstate, "R2"), facts: granted(1),
			outcome: 2, by: byBusinessKey, winner: "K1", version: 1, current: 1, binds: "K1"},

		// CONFLICTING_PAYLOAD
		{name: "grant, same key, other scope", command: with(someGrant("K1"), func(c *Command) { c.Grant.Scope = map[string]string{"seats": "20"} }),
			facts: knownGrant(1), outcome: 3, by: byKey, winner: "K1", differ: []string{"scope.seats"}},
		{name: "grant, same key, other invoice", command: with(someGrant("K1"), func(c *Command) { c.Grant.InvoiceID = "j" }),
			facts: knownGrant(1), outcome: 3, by: byKey, winner: "K1", differ: []string{"invoice_id"}},
		{name: "grant, key of a reversal", command: someGrant("R1"), facts: knownReversal(),
			outcome: 3, by: byKey, winner: "R1", differ: []string{"kind"}},
		{name: "grant, key of a record", command: someGrant("S1"), facts: knownRecord(),
			outcome: 3, by: byKey, winner: "S1", differ: []string{"kind"}},
		{name: "grant, alias, other quantity", command: with(someGrant("K2"), func(c *Command) { c.Grant.Quantity = ptr(int64(1)) }),
			facts: aliasOf(someGrant("K2"), granted(1)), outcome: 3, by: byKey, winner: "K1", differ: []string{"quantity"}},
		{name: "grant, business key, other scope", command: with(someGrant("K2"), func(c *Command) { c.Grant.Scope = nil }),
			facts: granted(1), outcome: 3, by: byBusinessKey, winner: "K1", differ: []string{"scope.seats"}},
		{name: "grant, business key, other scope, unpaid evidence and an unknown type",
			command: with(someGrant("K2"), func(c *Command) { c.Grant.Scope, c.Invoice.State = nil, unpaid }),
			facts:   granted(1), catalog: narrow, outcome: 3, by: byBusinessKey, winner: "K1", differ: []string{"scope.seats"}},
		{name: "record, same key, other everything", command: with(someRecord("S1", paid, 6), func(c *Command) { c.InvoiceID = "j" }),
			facts: knownRecord(), outcome: 3, by: byKey, winner: "S1", differ: []string{"invoice_id", "state", "version"}},
		{name: "record, key of a grant", command: someRecord("K1", paid, 1), facts: knownGrant(1),
			outcome: 3, by: byKey, winner: "K1", differ: []string{"kind"}},
		{name: "record, same version, other state", command: someRecord("S2", paid, 5), facts: recorded(refunded, 5),
			outcome: 3, by: byBusinessKey, winner: "S1", differ: []string{"state"}},
		{name: "reverse, same key, other everything",
			command: with(someTurn(kindReverse, "R1"), func(c *Command) { c.Actor, c.Reason, c.Target.EntitlementID = "you", "other", newIDs.entitlement }),
			facts:   knownReversal(), outcome: 3, by: byKey, winner: "R1", differ: []string{"actor", "entitlement_id", "reason"}},
		{name: "reverse, same key, a target that is not there",
			command: with(someTurn(kindReverse, "R1"), func(c *Command) {
				c.Target = Target{BusinessKey: BusinessKey{InvoiceID: "j", EntitlementType: "x"}}
			}),
			facts: knownReversal(), outcome: 3, by: byKey, winner: "R1", differ: []string{"entitlement_id"}},
		{name: "reverse, alias, other reason", command: with(someTurn(kindReverse, "R2"), func(c *Command) { c.Reason = "other" }),
			facts: aliasOf(someTurn(kindReverse, "R2"), reversedFacts()), outcome: 3, by: byKey, winner: "R1", differ: []string{"reason"}},
		{name: "reinstate, key of a reversal", command: someTurn(kindReinstate, "R1"), facts: knownReversal(),
			outcome: 3, by: byKey, winner: "R1", differ: []string{"kind"}},

		// REJECTED
		{name: "grant, unknown type", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{paid, 1}}, catalog: narrow,
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE},
		{name: "grant, the catalogue before the evidence", command: with(someGrant("K2"), func(c *Command) { c.Invoice.State = unpaid }), catalog: narrow,
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE},
		{name: "grant, unpaid evidence", command: with(someGrant("K2"), func(c *Command) { c.Invoice.State = unpaid }),
			facts: facts{invoice: InvoiceVersion{paid, 1}}, outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID},
		{name: "grant, refunded evidence", command: with(someGrant("K2"), func(c *Command) { c.Invoice.State = refunded }),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID},
		{name: "grant, voided evidence", command: with(someGrant("K2"), func(c *Command) { c.Invoice.State = voided }),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID},
		{name: "grant, open on record", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{unpaid, 7}},
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID},
		{name: "grant, voided on record", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{voided, 7}},
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED},
		{name: "grant, refunded on record", command: someGrant("K2"), facts: facts{invoice: InvoiceVersion{refunded, 7}},
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED},
		{name: "record, older version", command: someRecord("S2", paid, 4), facts: recorded(refunded, 5),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_STALE_VERSION},
		{name: "record, older version, same state", command: someRecord("S2", refunded, 4), facts: recorded(refunded, 5),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_STALE_VERSION},
		{name: "reverse what was never granted", command: someTurn(kindReverse, "R2"),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_NOT_GRANTED},
		{name: "reinstate what was never granted", command: someTurn(kindReinstate, "R2"),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_NOT_GRANTED},
		{name: "reinstate under a refunded invoice", command: someTurn(kindReinstate, "R2"),
			facts:   func() facts { f := reversedFacts(); f.invoice = InvoiceVersion{refunded, 2}; return f }(),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED},
		{name: "reinstate under an open invoice", command: someTurn(kindReinstate, "R2"),
			facts:   func() facts { f := reversedFacts(); f.invoice = InvoiceVersion{unpaid, 2}; return f }(),
			outcome: 4, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID},

		// A recipe of a newer build: no answer.
		{name: "grant, known key, newer recipe", command: someGrant("K1"), facts: unknownRecipe(knownGrant(1)), unknown: true},
		{name: "grant, business key, newer recipe", command: someGrant("K2"), facts: unknownRecipe(granted(1)), unknown: true},
		{name: "reverse, known key, newer recipe", command: someTurn(kindReverse, "R1"), facts: unknownRecipe(knownReversal()), unknown: true},
		{name: "record, known key, newer recipe", command: someRecord("S1", refunded, 5), facts: unknownRecipe(knownRecord()), unknown: true},
		{name: "key of another kind, newer recipe", command: someRecord("K1", paid, 1), facts: unknownRecipe(knownGrant(1)),
			outcome: 3, by: byKey, winner: "K1", differ: []string{"kind"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.facts.now = decideNow
			a, ch, ok := decide(c.command, &c.facts, c.catalog, newIDs)
			if ok == c.unknown {
				t.Fatalf("decided: %v, want %v", ok, !c.unknown)
			}
			if a.Outcome != c.outcome || a.MatchedBy != c.by {
				t.Fatalf("got %v by %v, want %v by %v", a.Outcome, a.MatchedBy, c.outcome, c.by)
			}
			checkShape(t, &a)
			if a.Rejection != nil && a.Rejection.Reason != c.reason {
				t.Errorf("rejected for %v, want %v", a.Rejection.Reason, c.reason)
			}
			if got := a.Conflict.fields(); !slices.Equal(got, c.differ) {
				t.Errorf("differences %q, want %q", got, c.differ)
			}
			winner := ""
			if a.Operation != nil {
				winner = a.Operation.IdempotencyKey
			} else if a.Conflict != nil {
				winner = a.Conflict.Stored.IdempotencyKey
			}
			if winner != c.winner {
				t.Errorf("names the operation %q, want %q", winner, c.winner)
			}
			version := int64(0)
			if a.Entitlement != nil {
				version = a.Entitlement.Version
			}
			if version != c.version || a.CurrentVersion != c.current {
				t.Errorf("result has version %d and the entitlement %d, want %d and %d", version, a.CurrentVersion, c.version, c.current)
			}
			if len(a.Reversed) != c.reversed {
				t.Errorf("names %d reversed entitlements, want %d", len(a.Reversed), c.reversed)
			}
			binds := ""
			if op := ch.operation; op != nil {
				if binds = op.OwnerKey; binds == "" {
					binds = "-"
				}
				if op.IdempotencyKey != c.command.IdempotencyKey || op.AttemptID != newIDs.attempt || op.Fingerprint != c.command.fingerprint() {
					t.Errorf("the operation is not the command's own: %+v", op)
				}
			}
			if binds != c.binds {
				t.Errorf("binds the key to %q, want %q", binds, c.binds)
			}
			var kinds []pb.EntryKind
			for _, n := range ch.entries {
				kinds = append(kinds, n.Kind)
			}
			if !slices.Equal(kinds, c.entries) {
				t.Errorf("appends %v, want %v", kinds, c.entries)
			}
			checkLedger(t, &ch)
		})
	}
}

// checkShape holds an answer against what its outcome promises: no caller can mistake a conflict or a refusal for success.
func checkShape(t *testing.T, a *Answer) {
	t.Helper()
	success := a.Outcome == pb.Outcome_OUTCOME_NEWLY_APPLIED || a.Outcome == pb.Outcome_OUTCOME_ALREADY_APPLIED
	if (a.Operation != nil) != success {
		t.Errorf("%v with operation %+v", a.Outcome, a.Operation)
	}
	if !success && (a.Entitlement != nil || a.Reversed != nil || a.CurrentVersion != 0) {
		t.Errorf("%v tells of an entitlement: %+v", a.Outcome, a)
	}
	if (a.Conflict != nil) != (a.Outcome == pb.Outcome_OUTCOME_CONFLICTING_PAYLOAD) {
		t.Errorf("%v with conflict %+v", a.Outcome, a.Conflict)
	}
	if (a.Rejection != nil) != (a.Outcome == pb.Outcome_OUTCOME_REJECTED) {
		t.Errorf("%v with rejection %+v", a.Outcome, a.Rejection)
	}
	if a.Rejection != nil && (a.Rejection.Message == "" || a.Rejection.Retry == 0) {
		t.Errorf("a rejection without message or advice: %+v", a.Rejection)
	}
}

// checkLedger holds what is written against itself: each entry follows the entitlement's last one, and the row says what the entry
// says.
func checkLedger(t *testing.T, ch *change) {
	t.Helper()
	after := ch.turned
	if ch.granted != nil {
		after = append(slices.Clone(after), ch.granted)
	}
	if len(after) != len(ch.entries) {
		t.Fatalf("%d entries for %d entitlements", len(ch.entries), len(after))
	}
	for i, n := range ch.entries {
		e := after[i]
		if n.EntitlementID != e.ID || n.Number != e.Version || stateAfter(n.Kind) != e.State || !n.At.Equal(e.ChangedAt) {
			t.Errorf("the entry %+v leaves the entitlement as %+v", n, e)
		}
		if ch.operation == nil || n.OperationKey != ch.operation.IdempotencyKey || ch.operation.OwnerKey != "" {
			t.Errorf("the entry %+v has no owner: %+v", n, ch.operation)
		}
	}
	if op := ch.operation; op != nil && op.Kind != kindRecord && op.OwnerKey == "" {
		if len(ch.entries) != 1 || op.EntitlementID != after[0].ID || op.EntryNumber != ch.entries[0].Number || !op.AppliedAt.Equal(ch.entries[0].At) {
			t.Errorf("the operation %+v does not name its entry", op)
		}
	}
}

func TestDecide_StaleVersionIsForEver(t *testing.T) {
	f := facts{now: decideNow, winner: stored(someRecord("S1", refunded, 5), ""), invoice: InvoiceVersion{refunded, 5}}
	a, _, _ := decide(someRecord("S2", paid, 4), &f, nil, newIDs)
	want := Rejection{
		Reason: pb.RejectionReason_REJECTION_REASON_STALE_VERSION, Retry: pb.RetryAdvice_RETRY_ADVICE_NEVER,
		Message: "version 5 of the invoice is on record, as REFUNDED",
	}
	if *a.Rejection != want {
		t.Errorf("got %+v, want %+v", *a.Rejection, want)
	}
}

// A new primary's clock may be behind the old one's, and now() precedes the wait for a lock: an entry still never lies before the
// one that it follows.
func TestDecide_EntryNeverBeforeThePreviousOne(t *testing.T) {
	ahead := decideNow.Add(time.Minute)
	e := someEntitlement(1)
	e.ChangedAt = ahead
	for _, c := range []*Command{someTurn(kindReverse, "R1"), someRecord("S1", refunded, 2)} {
		f := facts{
			now: decideNow, winner: stored(someGrant("K1"), ""), entitlement: e, entry: someEntry(1, "K1"),
			invoice: InvoiceVersion{refunded, 2}, moved: c.Kind == kindRecord, onInvoice: []*Entitlement{e}, reversedBy: []*Entry{nil},
		}
		_, ch, _ := decide(c, &f, nil, newIDs)
		if len(ch.entries) != 1 || !ch.entries[0].At.Equal(ahead) || !ch.turned[0].ChangedAt.Equal(ahead) {
			t.Errorf("%v: entries %+v, want one at %v", c.Kind, ch.entries, ahead)
		}
	}
}

func TestDecide_ReversalSaysWhoAndWhy(t *testing.T) {
	f := facts{now: decideNow, winner: stored(someGrant("K1"), ""), entitlement: someEntitlement(1), entry: someEntry(1, "K1"),
		invoice: InvoiceVersion{paid, 3}}
	_, ch, _ := decide(someTurn(kindReverse, "R1"), &f, nil, newIDs)
	n := ch.entries[0]
	if n.Actor != "me" || n.Reason != "asked for" || n.OperationKey != "R1" || n.InvoiceVersion != 3 || n.Number != 2 {
		t.Errorf("got %+v", n)
	}
	f = facts{now: decideNow, invoice: InvoiceVersion{voided, 4}, moved: true, onInvoice: []*Entitlement{someEntitlement(1)}, reversedBy: make([]*Entry, 1)}
	_, ch, _ = decide(someRecord("S1", voided, 4), &f, nil, newIDs)
	n = ch.entries[0]
	if n.Actor != "" || n.Reason != "the invoice is VOIDED" || n.OperationKey != "S1" || n.InvoiceVersion != 4 || n.Number != 2 {
		t.Errorf("got %+v", n)
	}
}

// The look for a reversal's target precedes its place in the queue. A grant and a first arrival of the reversal may both commit in
// between; the second arrival then meets its own key without having found its target.
func TestDecide_ReplayOfReversalWhoseTargetCameLate(t *testing.T) {
	c := someTurn(kindReverse, "R1")
	known := stored(c, "")
	c.Target.EntitlementID = uuid.Nil
	f := facts{now: decideNow, known: known, winner: known, entitlement: someEntitlement(2), entry: someEntry(2, "R1")}
	if a, _, _ := decide(c, &f, nil, newIDs); a.Outcome != pb.Outcome_OUTCOME_ALREADY_APPLIED {
		t.Errorf("got %v %q, want ALREADY_APPLIED", a.Outcome, a.Conflict.fields())
	}
}
