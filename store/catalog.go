package store

import (
	"fmt"
	"slices"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Catalog is the set of entitlement types that may be granted. The nil catalogue accepts every type, and none as
// repeatable. It is a precondition of new grants only: a replay's answer never depends on it.
type Catalog struct {
	Types map[string]CatalogType
}

// CatalogType is what the catalogue says of one type.
type CatalogType struct {
	Description string
	// Repeatable allows operation versions above 0.
	Repeatable bool
	// ScopeKeys are the keys that a grant's scope may have; nil allows every key.
	ScopeKeys []string
	// DefaultValidity ends a grant without expires_at this long after its start; 0 leaves it without end.
	DefaultValidity time.Duration
}

// refusal says why the catalogue forbids a new grant, or nil.
func (c *Catalog) refusal(g *Grant) *Rejection {
	var t CatalogType
	if c != nil {
		known := false
		if t, known = c.Types[g.EntitlementType]; !known {
			return &Rejection{
				Reason:  entitlementv1.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE,
				Message: fmt.Sprintf("the catalogue has no entitlement type %q", g.EntitlementType),
				Retry:   entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
			}
		}
		for _, k := range sortedKeys(g.Scope) {
			if t.ScopeKeys != nil && !slices.Contains(t.ScopeKeys, k) {
				return &Rejection{
					Reason:  entitlementv1.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY,
					Message: fmt.Sprintf("the catalogue does not allow the scope key %q for %q", k, g.EntitlementType),
					Retry:   entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
				}
			}
		}
	}
	if g.OperationVersion > 0 && !t.Repeatable {
		return &Rejection{
			Reason:  entitlementv1.RejectionReason_REJECTION_REASON_NOT_REPEATABLE,
			Message: fmt.Sprintf("%q is not repeatable, so its operation_version must be 0", g.EntitlementType),
			Retry:   entitlementv1.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE,
		}
	}
	return nil
}

// endsAt is when a new grant ends: as it says, or by the type's default validity, counted from its start.
func (c *Catalog) endsAt(g *Grant, now time.Time) *time.Time {
	if g.ExpiresAt != nil || c == nil {
		return g.ExpiresAt
	}
	validity := c.Types[g.EntitlementType].DefaultValidity
	if validity == 0 {
		return nil
	}
	end := now
	if g.StartsAt != nil {
		end = *g.StartsAt
	}
	if end = end.Add(validity); end.After(lastEnd) {
		end = lastEnd
	}
	return &end
}

// lastEnd is the latest time that the contract can carry.
var lastEnd = time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)
