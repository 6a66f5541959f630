package store

import (
	"time"
)

// Grant is what is granted: the payload that the fingerprint covers, as the caller sent it.
type Grant struct {
	TenantID         string
	InvoiceID        string
	EntitlementType  string
	OperationVersion int64
	// Scope is never nil-sensitive: absent and empty are the same grant.
	Scope map[string]string
	// Quantity is nil for "not counted", which differs from every number.
	Quantity *int64
	// StartsAt and ExpiresAt have microsecond precision; nil means unset.
	StartsAt  *time.Time
	ExpiresAt *time.Time
}

// BusinessKey names the effect within a tenant: the database holds at most one entitlement for it, for ever.
type BusinessKey struct {
	InvoiceID        string
	EntitlementType  string
	OperationVersion int64
}

// BusinessKey returns the grant's effect.
func (g *Grant) BusinessKey() BusinessKey {
	return BusinessKey{g.InvoiceID, g.EntitlementType, g.OperationVersion}
}
