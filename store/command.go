package store

import (
	"crypto/sha256"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Command is one arrival of a write request, already validated. Which of its fields count follows from Kind.
type Command struct {
	Kind           entitlementv1.OperationKind
	TenantID       string
	IdempotencyKey string

	// Grant is the payload of GRANT.
	Grant Grant
	// Invoice is the evidence of GRANT, which stands outside the payload, and the payload of RECORD_INVOICE_STATE.
	Invoice InvoiceVersion
	// InvoiceID is the invoice of RECORD_INVOICE_STATE. For GRANT it is the grant's; for REVERSE and REINSTATE the store finds it
	// with the target.
	InvoiceID string
	// Target names the entitlement of REVERSE and REINSTATE.
	Target Target
	// Actor and Reason are part of the payload of REVERSE and REINSTATE.
	Actor  string
	Reason string
	// Notify is who is told of what the command appends, nil for nobody. It is no part of the payload.
	Notify *Notify

	Origin Origin
	// PreviousTries is how often the client says that it has tried this call before.
	PreviousTries int32
}

// Target names an entitlement by id or, when the id is zero, by business key.
type Target struct {
	EntitlementID uuid.UUID
	BusinessKey   BusinessKey
}

// Origin is where an arrival came from. It is kept with the attempt, and never compared.
type Origin struct {
	EventID string
	Source  string
	Caller  string
	// TraceID and SpanID are zero when the call carried no trace.
	TraceID [16]byte
	SpanID  [8]byte
	// Sampled says that the trace is recorded. It is kept with operations alone.
	Sampled bool
}

// InvoiceVersion is a state of an invoice with the version that the billing system gave it.
type InvoiceVersion struct {
	State   entitlementv1.InvoiceState
	Version int64
}

// reverses says whether recording the state takes back the invoice's active entitlements.
func (v InvoiceVersion) reverses() bool {
	return v.State == entitlementv1.InvoiceState_INVOICE_STATE_VOIDED ||
		v.State == entitlementv1.InvoiceState_INVOICE_STATE_REFUNDED
}

// businessKey is the effect that the command is about. For RECORD_INVOICE_STATE only the invoice of it is set.
func (c *Command) businessKey() BusinessKey {
	switch c.Kind {
	case entitlementv1.OperationKind_OPERATION_KIND_GRANT:
		return c.Grant.BusinessKey()
	case entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE:
		return BusinessKey{InvoiceID: c.InvoiceID}
	default:
		return c.Target.BusinessKey
	}
}

// fingerprint is that of the command's own payload, under CurrentRecipe.
func (c *Command) fingerprint() Fingerprint {
	if c.Kind == entitlementv1.OperationKind_OPERATION_KIND_GRANT {
		return c.Grant.Fingerprint()
	}
	e := make(encoding, 0, payloadBytes)
	e = e.number(fieldKind, int64(c.Kind))
	e = e.text(fieldTenant, c.TenantID)
	if c.Kind == entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE {
		e = e.text(fieldInvoice, c.InvoiceID)
		e = e.number(fieldInvoiceState, int64(c.Invoice.State))
		e = e.number(fieldInvoiceVersion, c.Invoice.Version)
	} else {
		e = e.text(fieldTarget, string(c.Target.EntitlementID[:]))
		e = e.text(fieldActor, c.Actor)
		e = e.text(fieldReason, c.Reason)
	}
	return sha256.Sum256(e)
}

// sameAs compares the command's payload with a stored operation of the same kind, under the recipe it was stored with.
func (c *Command) sameAs(stored *Operation) (same, recipeKnown bool) {
	if stored.Recipe != CurrentRecipe {
		if c.Kind != entitlementv1.OperationKind_OPERATION_KIND_GRANT {
			return false, false
		}
		sum, ok := c.Grant.fingerprintUnder(stored.Recipe)
		return sum == stored.Fingerprint, ok
	}
	return c.fingerprint() == stored.Fingerprint, true
}

// differencesFrom lists how the command's payload differs from a stored operation's. A grant's stored payload stands
// with its entitlement.
func (c *Command) differencesFrom(stored *Operation, entitlement *Entitlement) []Difference {
	var d differences
	if c.Kind != stored.Kind {
		d.text("kind", stored.Kind.String(), c.Kind.String())
		return d
	}
	switch c.Kind {
	case entitlementv1.OperationKind_OPERATION_KIND_GRANT:
		return between(&entitlement.Grant, &c.Grant)
	case entitlementv1.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE:
		d.text("invoice_id", stored.InvoiceID, c.InvoiceID)
		d.text("state", stored.Invoice.State.String(), c.Invoice.State.String())
		d.number("version", stored.Invoice.Version, c.Invoice.Version)
	default:
		d.text("actor", stored.Actor, c.Actor)
		target := ""
		if c.Target.EntitlementID != uuid.Nil {
			target = c.Target.EntitlementID.String()
		}
		d.text("entitlement_id", stored.EntitlementID.String(), target)
		d.text("reason", stored.Reason, c.Reason)
	}
	return d
}
