package acceptance_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// ledgerCall is one call of one tenant, as both the model and the server take it.
type ledgerCall struct {
	method ledgerMethod
	key    string
	effect effect
	// seats make one grant differ from another.
	seats string
	// state and version are a grant's evidence, or what is recorded.
	state   pb.InvoiceState
	version int64
	reason  string
	// id names the entitlement of a reversal or reinstatement; empty: its business key does.
	id string
}

type ledgerMethod string

const (
	callGrant     ledgerMethod = "grant"
	callRecord    ledgerMethod = "record"
	callReverse   ledgerMethod = "reverse"
	callReinstate ledgerMethod = "reinstate"
	// callLook names an operation by its key, callLookGrant by the key and the grant, callLookEffect by the effect.
	callLook       ledgerMethod = "look"
	callLookGrant  ledgerMethod = "look with grant"
	callLookEffect ledgerMethod = "look by effect"
	callRead       ledgerMethod = "get"
	callCheck      ledgerMethod = "check"
)

// effect is a business key without operation version, which a service without a catalogue does not accept.
type effect struct{ invoice, typeName string }

func (e effect) String() string { return e.invoice + "/" + e.typeName }

func (c ledgerCall) String() string {
	text := fmt.Sprintf("%s %s %s", c.method, c.key, c.effect)
	switch c.method {
	case callGrant:
		text += fmt.Sprintf(" of %s seats, %s %d", c.seats, short(c.state), c.version)
	case callRecord:
		text = fmt.Sprintf("record %s %s %s %d", c.key, c.effect.invoice, short(c.state), c.version)
	case callReverse, callReinstate:
		text += fmt.Sprintf(" because %q", c.reason)
		if c.id != "" {
			text += " by id"
		}
	}
	return text
}

// ledgerModel is the contract of one tenant, one call after the other: what grantd has to look like from outside, however
// many callers and servers there are.
type ledgerModel struct {
	operations map[string]modelOperation
	invoices   map[string]modelInvoice
	// entitlements hold the keys of the ledger's entries; every second entry reverses.
	entitlements map[effect]modelEntitlement
}

type modelOperation struct {
	kind pb.OperationKind
	// owner is the key of the winner: the operation's own, unless it is an alias.
	owner string
	// call is the payload.
	call ledgerCall
	// entry is the number of the entry that is the result; of a recording, 0.
	entry int
}

type modelInvoice struct {
	state   pb.InvoiceState
	version int64
	by      string
}

type modelEntitlement struct {
	seats   string
	entries []string
}

func (e modelEntitlement) state() pb.EntitlementState { return stateOfEntry(len(e.entries)) }

func stateOfEntry(number int) pb.EntitlementState {
	if number%2 == 0 {
		return reversed
	}
	return active
}

func newLedgerModel() ledgerModel {
	return ledgerModel{
		operations: map[string]modelOperation{}, invoices: map[string]modelInvoice{}, entitlements: map[effect]modelEntitlement{},
	}
}

func (m ledgerModel) clone() ledgerModel {
	return ledgerModel{maps.Clone(m.operations), maps.Clone(m.invoices), maps.Clone(m.entitlements)}
}

func (m ledgerModel) equal(n ledgerModel) bool {
	return maps.Equal(m.operations, n.operations) && maps.Equal(m.invoices, n.invoices) &&
		maps.EqualFunc(m.entitlements, n.entitlements, func(a, b modelEntitlement) bool {
			return a.seats == b.seats && slices.Equal(a.entries, b.entries)
		})
}

// purgeAliases is what the retention of aliases does.
func (m ledgerModel) purgeAliases() {
	maps.DeleteFunc(m.operations, func(key string, op modelOperation) bool { return op.owner != key })
}

// apply changes the model as the call does, and returns the answer.
func (m ledgerModel) apply(c ledgerCall) string {
	switch c.method {
	case callGrant, callRecord, callReverse, callReinstate:
		if _, known := m.operations[c.key]; known {
			return m.byKey(c)
		}
	}
	switch c.method {
	case callGrant:
		return m.grant(c)
	case callRecord:
		return m.record(c)
	case callReverse, callReinstate:
		return m.turn(c)
	case callLook:
		if _, known := m.operations[c.key]; !known {
			return "NOT_APPLIED"
		}
		return m.replay(byKey, c.key)
	case callLookGrant:
		if _, known := m.operations[c.key]; known {
			c.method = callGrant
			return m.byKey(c)
		}
		if e, taken := m.entitlements[c.effect]; taken {
			return m.byEffect(c, e)
		}
		return "NOT_APPLIED"
	case callLookEffect:
		if e, taken := m.entitlements[c.effect]; taken {
			return m.replay(byBusinessKey, e.entries[0])
		}
		return "NOT_APPLIED"
	case callRead:
		e, granted := m.entitlements[c.effect]
		if !granted {
			return "NOT_FOUND"
		}
		return m.result(c.effect, len(e.entries))
	default:
		return m.check(c.effect.typeName)
	}
}

var kindOf = map[ledgerMethod]pb.OperationKind{
	callGrant: opGrant, callRecord: opRecord, callReverse: opReverse, callReinstate: opReinstate,
}

// byKey is the first step of the ladder.
func (m ledgerModel) byKey(c ledgerCall) string {
	stored := m.operations[c.key]
	if fields := differingFields(stored, c); len(fields) > 0 {
		return m.conflict(byKey, stored.owner, fields)
	}
	return m.replay(byKey, c.key)
}

func differingFields(stored modelOperation, c ledgerCall) []string {
	if stored.kind != kindOf[c.method] {
		return []string{"kind"}
	}
	var fields []string
	differ := func(field string, differs bool) {
		if differs {
			fields = append(fields, field)
		}
	}
	s := stored.call
	switch stored.kind {
	case opGrant:
		differ("entitlement_type", s.effect.typeName != c.effect.typeName)
		differ("invoice_id", s.effect.invoice != c.effect.invoice)
		differ("scope.seats", s.seats != c.seats)
	case opRecord:
		differ("invoice_id", s.effect.invoice != c.effect.invoice)
		differ("state", s.state != c.state)
		differ("version", s.version != c.version)
	default:
		differ("entitlement_id", s.effect != c.effect)
		differ("reason", s.reason != c.reason)
	}
	return fields
}

// replay is the stored result under a known key, with the current state beside it.
func (m ledgerModel) replay(by pb.MatchedBy, key string) string {
	op := m.operations[key]
	if op.kind == opRecord {
		return m.recorded("ALREADY_APPLIED by "+short(by), op)
	}
	return m.applied("ALREADY_APPLIED by "+short(by), op)
}

func (m ledgerModel) conflict(by pb.MatchedBy, owner string, fields []string) string {
	return fmt.Sprintf("CONFLICTING_PAYLOAD by %s with %s: %s", short(by), m.name(owner), strings.Join(fields, ", "))
}

// name is an operation in an answer.
func (m ledgerModel) name(key string) string { return key + " " + short(m.operations[key].kind) }

// applied is an answer about an entitlement.
func (m ledgerModel) applied(outcome string, op modelOperation) string {
	now := m.entitlements[op.call.effect]
	return fmt.Sprintf("%s, %s: %s, now %s %d", outcome, m.name(op.owner), m.result(op.call.effect, op.entry), short(now.state()), len(now.entries))
}

func (m ledgerModel) result(e effect, entry int) string {
	return fmt.Sprintf("%s of %s seats %s %d", e, m.entitlements[e].seats, short(stateOfEntry(entry)), entry)
}

// recorded is an answer about an invoice.
func (m ledgerModel) recorded(outcome string, op modelOperation) string {
	var took []string
	for e, is := range m.entitlements {
		for i, key := range is.entries {
			if e.invoice == op.call.effect.invoice && key == op.owner && i%2 == 1 {
				took = append(took, m.result(e, i+1))
			}
		}
	}
	slices.Sort(took)
	return fmt.Sprintf("%s, %s: %s %s %d reverses %q", outcome, m.name(op.owner), op.call.effect.invoice, short(op.call.state), op.call.version, took)
}

// byEffect is the second step of the ladder, for a grant.
func (m ledgerModel) byEffect(c ledgerCall, e modelEntitlement) string {
	if e.seats != c.seats {
		return m.conflict(byBusinessKey, e.entries[0], []string{"scope.seats"})
	}
	return m.replay(byBusinessKey, e.entries[0])
}

func (m ledgerModel) grant(c ledgerCall) string {
	if e, taken := m.entitlements[c.effect]; taken {
		if e.seats == c.seats {
			m.operations[c.key] = modelOperation{kind: opGrant, owner: e.entries[0], call: payload(c), entry: 1}
		}
		return m.byEffect(c, e)
	}
	if c.state != paid {
		return refusal("INVOICE_NOT_PAID")
	}
	record, known := m.invoices[c.effect.invoice]
	if !known || c.version > record.version {
		record = modelInvoice{c.state, c.version, c.key}
	}
	if r := refusedBy(record); r != "" {
		return r
	}
	m.invoices[c.effect.invoice] = record
	m.entitlements[c.effect] = modelEntitlement{c.seats, []string{c.key}}
	op := modelOperation{kind: opGrant, owner: c.key, call: payload(c), entry: 1}
	m.operations[c.key] = op
	return m.applied("NEWLY_APPLIED", op)
}

// payload is what counts of a call once it is stored.
func payload(c ledgerCall) ledgerCall {
	switch c.method {
	case callGrant:
		return ledgerCall{effect: c.effect, seats: c.seats}
	case callRecord:
		return ledgerCall{effect: effect{invoice: c.effect.invoice}, state: c.state, version: c.version}
	default:
		return ledgerCall{effect: c.effect, reason: c.reason}
	}
}

func refusal(reason string) string { return "REJECTED: " + reason }

func refusedBy(record modelInvoice) string {
	switch record.state {
	case paid:
		return ""
	case voided, refunded:
		return refusal("INVOICE_REVERSED")
	default:
		return refusal("INVOICE_NOT_PAID")
	}
}

func (m ledgerModel) record(c ledgerCall) string {
	record, known := m.invoices[c.effect.invoice]
	op := modelOperation{kind: opRecord, owner: c.key, call: payload(c)}
	switch {
	case known && record.version > c.version:
		return fmt.Sprintf("%s, now %s %d", refusal("STALE_VERSION"), short(record.state), record.version)
	case known && record.version == c.version && record.state != c.state:
		return m.conflict(byBusinessKey, record.by, []string{"state"})
	case known && record.version == c.version:
		op.owner = record.by
		m.operations[c.key] = op
		return m.recorded("ALREADY_APPLIED by BUSINESS_KEY", op)
	}
	m.invoices[c.effect.invoice] = modelInvoice{c.state, c.version, c.key}
	m.operations[c.key] = op
	if c.state == voided || c.state == refunded {
		for e, is := range m.entitlements {
			if e.invoice == c.effect.invoice && is.state() == active {
				m.entitlements[e] = is.with(c.key)
			}
		}
	}
	return m.recorded("NEWLY_APPLIED", op)
}

func (e modelEntitlement) with(key string) modelEntitlement {
	e.entries = append(slices.Clip(e.entries), key)
	return e
}

func (m ledgerModel) turn(c ledgerCall) string {
	e, granted := m.entitlements[c.effect]
	if !granted {
		return refusal("NOT_GRANTED")
	}
	wanted := reversed
	if c.method == callReinstate {
		wanted = active
	}
	op := modelOperation{kind: kindOf[c.method], owner: c.key, call: payload(c), entry: len(e.entries)}
	if e.state() == wanted {
		op.owner = e.entries[len(e.entries)-1]
		m.operations[c.key] = op
		return m.replay(byBusinessKey, c.key)
	}
	if wanted == active {
		if r := refusedBy(m.invoices[c.effect.invoice]); r != "" {
			return r
		}
	}
	m.entitlements[c.effect] = e.with(c.key)
	op.entry++
	m.operations[c.key] = op
	return m.applied("NEWLY_APPLIED", op)
}

func (m ledgerModel) check(typeName string) string {
	var held []string
	absence := pb.AbsenceReason_ABSENCE_REASON_NEVER_GRANTED
	for e, is := range m.entitlements {
		switch {
		case e.typeName != typeName:
		case is.state() == active:
			held = append(held, m.result(e, len(is.entries)))
		default:
			absence = pb.AbsenceReason_ABSENCE_REASON_REVERSED
		}
	}
	if len(held) == 0 {
		return "not held: " + short(absence)
	}
	slices.Sort(held)
	return fmt.Sprintf("held by %q", held)
}

// send makes the call, and returns the answer as the model writes it.
func (b *bundle) send(ctx context.Context, tenant string, c ledgerCall) (string, error) {
	switch c.method {
	case callGrant:
		r, err := b.GrantEntitlement(ctx, c.grantOf(tenant))
		return rendered(r), err
	case callRecord:
		r, err := b.RecordInvoiceState(ctx, recording(tenant, c.key, c.effect.invoice, c.state, c.version))
		text := rendered(r)
		if r.GetRejection().GetReason() == pb.RejectionReason_REJECTION_REASON_STALE_VERSION {
			text += fmt.Sprintf(", now %s %d", short(r.GetCurrentState()), r.GetCurrentVersion())
		}
		return text, err
	case callReverse:
		r, err := b.ReverseEntitlement(ctx, reversal(tenant, c.key, c.effect.invoice, c.effect.typeName, func(r *pb.ReverseEntitlementRequest) {
			r.Reason = c.reason
			if c.id != "" {
				r.Target = &pb.ReverseEntitlementRequest_EntitlementId{EntitlementId: c.id}
			}
		}))
		return rendered(r), err
	case callReinstate:
		r, err := b.ReinstateEntitlement(ctx, reinstatement(tenant, c.key, c.effect.invoice, c.effect.typeName, func(r *pb.ReinstateEntitlementRequest) {
			r.Reason = c.reason
			if c.id != "" {
				r.Target = &pb.ReinstateEntitlementRequest_EntitlementId{EntitlementId: c.id}
			}
		}))
		return rendered(r), err
	case callLook:
		return b.looked(ctx, byName(tenant, c.key, 0))
	case callLookGrant:
		r := byName(tenant, c.key, 0)
		r.Grant = c.grantOf(tenant).GetGrant()
		return b.looked(ctx, r)
	case callLookEffect:
		return b.looked(ctx, byEffect(tenant, c.effect.invoice, c.effect.typeName))
	case callRead:
		e, err := b.entitlement(ctx, tenant, c.effect)
		if err != nil || e == nil {
			return "NOT_FOUND", err
		}
		return resultOf(e), nil
	default:
		r, err := b.CheckEntitlement(ctx, &pb.CheckEntitlementRequest{TenantId: tenant, EntitlementType: c.effect.typeName})
		if err != nil {
			return "", err
		}
		if !r.GetHeld() {
			return "not held: " + short(r.GetAbsenceReason()), nil
		}
		return fmt.Sprintf("held by %q", resultsOf(r.GetEntitlements())), nil
	}
}

func (c ledgerCall) grantOf(tenant string) *pb.GrantEntitlementRequest {
	return grant(tenant, c.key, c.effect.invoice, ofType(c.effect.typeName), seats(c.seats), evidence(c.state, c.version))
}

func (b *bundle) looked(ctx context.Context, r *pb.GetOperationRequest) (string, error) {
	resp, err := b.GetOperation(ctx, r)
	if resp.GetConflict() != nil {
		// Here the stored operation stands as the operation too.
		resp.Operation = nil
	}
	return rendered(resp), err
}

// rendered writes an answer as the model does, from the fields that the answer has.
func rendered(resp interface {
	GetOutcome() pb.Outcome
	GetMatchedBy() pb.MatchedBy
	GetOperation() *pb.Operation
	GetConflict() *pb.Conflict
}) string {
	text := short(resp.GetOutcome())
	if by := resp.GetMatchedBy(); by != 0 {
		text += " by " + short(by)
	}
	if r, ok := resp.(interface{ GetRejection() *pb.Rejection }); ok && r.GetRejection() != nil {
		text += ": " + short(r.GetRejection().GetReason())
	}
	if c := resp.GetConflict(); c != nil {
		text += " with " + nameOf(c.GetStoredOperation()) + ": " + strings.Join(differing(c), ", ")
	}
	if op := resp.GetOperation(); op != nil {
		text += ", " + nameOf(op) + ":"
	}
	if r, ok := resp.(interface{ GetEntitlement() *pb.Entitlement }); ok && r.GetEntitlement() != nil {
		now := resp.(interface {
			GetCurrentState() pb.EntitlementState
			GetCurrentVersion() int64
		})
		text += fmt.Sprintf(" %s, now %s %d", resultOf(r.GetEntitlement()), short(now.GetCurrentState()), now.GetCurrentVersion())
	}
	if r, ok := resp.(interface{ GetRecorded() *pb.RecordedInvoice }); ok && r.GetRecorded() != nil {
		is := r.GetRecorded()
		text += fmt.Sprintf(" %s %s %d reverses %q", is.GetInvoiceId(), short(is.GetState()), is.GetVersion(), resultsOf(is.GetReversed()))
	}
	return text
}

func nameOf(op *pb.Operation) string { return op.GetIdempotencyKey() + " " + short(op.GetKind()) }

func resultOf(e *pb.Entitlement) string {
	return fmt.Sprintf("%s/%s of %s seats %s %d",
		e.GetGrant().GetInvoiceId(), e.GetGrant().GetEntitlementType(), e.GetGrant().GetScope()["seats"], short(e.GetState()), e.GetVersion())
}

// resultsOf sorts, since the order in which simultaneous grants came is not the model's to know.
func resultsOf(all []*pb.Entitlement) []string {
	texts := make([]string, len(all))
	for i, e := range all {
		texts[i] = resultOf(e)
	}
	slices.Sort(texts)
	return texts
}
