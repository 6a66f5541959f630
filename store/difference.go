package store

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// Difference is one field that is not what was stored. A nil side lacks the field.
type Difference struct {
	Field     string
	Stored    *string
	Submitted *string
}

// differences collects differing fields; paths are those of the request's payload message.
type differences []Difference

// text notes a field that both sides always have.
func (d *differences) text(field, stored, submitted string) {
	d.optional(field, &stored, &submitted)
}

func (d *differences) number(field string, stored, submitted int64) {
	if stored != submitted {
		d.text(field, strconv.FormatInt(stored, 10), strconv.FormatInt(submitted, 10))
	}
}

func (d *differences) optional(field string, stored, submitted *string) {
	if stored == nil && submitted == nil || stored != nil && submitted != nil && *stored == *submitted {
		return
	}
	*d = append(*d, Difference{field, stored, submitted})
}

// between lists every field in which the submitted grant differs from the stored one, ordered by path. It is empty exactly
// when the grants' fingerprints are equal.
func between(stored, submitted *Grant) []Difference {
	var d differences
	d.text("tenant_id", stored.TenantID, submitted.TenantID)
	d.text("invoice_id", stored.InvoiceID, submitted.InvoiceID)
	d.text("entitlement_type", stored.EntitlementType, submitted.EntitlementType)
	d.number("operation_version", stored.OperationVersion, submitted.OperationVersion)
	for k, v := range stored.Scope {
		if w, ok := submitted.Scope[k]; ok {
			d.text("scope."+k, v, w)
		} else {
			d.optional("scope."+k, &v, nil)
		}
	}
	for k, w := range submitted.Scope {
		if _, ok := stored.Scope[k]; !ok {
			d.optional("scope."+k, nil, &w)
		}
	}
	d.optional("quantity", decimal(stored.Quantity), decimal(submitted.Quantity))
	d.optional("starts_at", rfc3339(stored.StartsAt), rfc3339(submitted.StartsAt))
	d.optional("expires_at", rfc3339(stored.ExpiresAt), rfc3339(submitted.ExpiresAt))
	slices.SortFunc(d, func(a, b Difference) int { return strings.Compare(a.Field, b.Field) })
	return d
}

func decimal(n *int64) *string {
	if n == nil {
		return nil
	}
	s := strconv.FormatInt(*n, 10)
	return &s
}

func rfc3339(t *time.Time) *string {
	if t == nil {
		return nil
	}
	s := t.UTC().Format("2006-01-02T15:04:05.999999Z07:00")
	return &s
}
