package store

import (
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Operation is one row per idempotency key that had its effect or, as an alias, was told that it was there already.
type Operation struct {
	TenantID       string
	IdempotencyKey string
	Kind           entitlementv1.OperationKind
	// OwnerKey is the winner's key on an alias, and empty otherwise.
	OwnerKey    string
	Fingerprint Fingerprint
	Recipe      int16
	InvoiceID   string
	// EntitlementID and EntryNumber name the ledger entry that is the result; zero for RECORD_INVOICE_STATE.
	EntitlementID uuid.UUID
	EntryNumber   int64
	// Invoice is what RECORD_INVOICE_STATE recorded.
	Invoice   InvoiceVersion
	Actor     string
	Reason    string
	AttemptID uuid.UUID
	Origin    Origin
	AppliedAt time.Time
}

// Attempt is one row per arrival that the database answered.
type Attempt struct {
	TenantID         string
	At               time.Time
	ID               uuid.UUID
	IdempotencyKey   string
	Kind             entitlementv1.OperationKind
	Outcome          entitlementv1.Outcome
	MatchedBy        entitlementv1.MatchedBy
	Reason           entitlementv1.RejectionReason
	DifferingFields  []string
	InvoiceID        string
	EntitlementType  string
	OperationVersion int64
	Origin           Origin
	// WinnerTraceID is the trace of the attempt that won, where it was another one; zero where it was this one, or there was none.
	WinnerTraceID [16]byte
	// PreviousTries is the client's own count of earlier tries of the same call.
	PreviousTries int32
}

// Alias is a later key bound to an operation.
type Alias struct {
	IdempotencyKey string
	BoundAt        time.Time
}
