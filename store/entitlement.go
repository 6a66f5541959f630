package store

import (
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Entitlement is one row per effect, as of one entry of its ledger. As of the last entry it is the row itself.
type Entitlement struct {
	ID           uuid.UUID
	Grant        Grant
	Fingerprint  Fingerprint
	Recipe       int16
	OperationKey string
	GrantedAt    time.Time
	// EndsAt is when it ends, exclusive: what the grant says or else what the catalogue's default made of it when it was
	// granted; nil for never.
	EndsAt    *time.Time
	State     entitlementv1.EntitlementState
	Version   int64
	ChangedAt time.Time
}

// Entry is one immutable line of an entitlement's ledger.
type Entry struct {
	TenantID       string
	EntitlementID  uuid.UUID
	Number         int64
	Kind           entitlementv1.EntryKind
	OperationKey   string
	InvoiceVersion int64
	Actor          string
	Reason         string
	At             time.Time
}

// stateAfter is what an entry of this kind makes of the entitlement.
func stateAfter(kind entitlementv1.EntryKind) entitlementv1.EntitlementState {
	if kind == entitlementv1.EntryKind_ENTRY_KIND_REVERSED {
		return entitlementv1.EntitlementState_ENTITLEMENT_STATE_REVERSED
	}
	return entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE
}

// asOf returns the entitlement as it was when the entry was its last.
func (e *Entitlement) asOf(n *Entry) *Entitlement {
	if n.Number == e.Version {
		return e
	}
	return e.after(n)
}

// next is the entry that follows the entitlement's last one. Its time never lies before that one's, whatever the clock
// of a new primary says.
func (e *Entitlement) next(c *Command, kind entitlementv1.EntryKind, invoiceVersion int64, reason string, now time.Time) *Entry {
	if now.Before(e.ChangedAt) {
		now = e.ChangedAt
	}
	return &Entry{
		TenantID: c.TenantID, EntitlementID: e.ID, Number: e.Version + 1, Kind: kind,
		OperationKey: c.IdempotencyKey, InvoiceVersion: invoiceVersion,
		Actor: c.Actor, Reason: reason, At: now,
	}
}

// after returns the entitlement as the entry leaves it.
func (e *Entitlement) after(n *Entry) *Entitlement {
	then := *e
	then.State, then.Version, then.ChangedAt = stateAfter(n.Kind), n.Number, n.At
	return &then
}
