package store

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"time"
)

// Fingerprint is a SHA-256 over a payload: two payloads of one kind have the same fingerprint under one recipe exactly
// when they are equal.
type Fingerprint [sha256.Size]byte

// CurrentRecipe is the recipe that new payloads are stored under. Rows keep the recipe they were stored with, and later
// payloads are compared under that one. A recipe, once released, never changes.
//
// Recipe 1 writes each present field as its number, then its content: text as its length (uvarint) and bytes, numbers and
// times (microseconds since 1970) as eight bytes, big endian; each scope entry is a field of two texts, in the bytewise
// order of the keys. Nothing is joined by a separator, so no two payloads share an encoding.
const CurrentRecipe int16 = 1

// Field numbers of recipe 1. Grants use those of the Grant message; the other kinds start at 32, so that no payload
// of one kind has the encoding of another.
const (
	fieldTenant = iota + 1
	fieldInvoice
	fieldType
	fieldOperationVersion
	fieldScope
	fieldQuantity
	fieldStartsAt
	fieldExpiresAt

	fieldKind = iota + 24
	fieldInvoiceState
	fieldInvoiceVersion
	fieldTarget
	fieldActor
	fieldReason
)

// encoding is the bytes of recipe 1.
type encoding []byte

// payloadBytes holds nearly every payload, so that its encoding stays on the stack.
const payloadBytes = 512

func (e encoding) text(field byte, s string) encoding {
	return append(e, field).chunk(s)
}

func (e encoding) chunk(s string) encoding {
	return append(binary.AppendUvarint(e, uint64(len(s))), s...)
}

func (e encoding) number(field byte, n int64) encoding {
	return binary.BigEndian.AppendUint64(append(e, field), uint64(n))
}

func (e encoding) time(field byte, t *time.Time) encoding {
	if t == nil {
		return e
	}
	return e.number(field, t.UnixMicro())
}

// fingerprintUnder computes the grant's fingerprint under a stored row's recipe. It reports false for a recipe that this
// build does not know: a newer one wrote the row. A later recipe must also report, here, when the grant has a field set
// that the asked-for recipe lacks, since such a field is a difference.
func (g *Grant) fingerprintUnder(recipe int16) (Fingerprint, bool) {
	if recipe != 1 {
		return Fingerprint{}, false
	}
	return g.Fingerprint(), true
}

// Fingerprint computes the grant's fingerprint under CurrentRecipe.
func (g *Grant) Fingerprint() Fingerprint {
	e := make(encoding, 0, payloadBytes)
	e = e.text(fieldTenant, g.TenantID)
	e = e.text(fieldInvoice, g.InvoiceID)
	e = e.text(fieldType, g.EntitlementType)
	if g.OperationVersion != 0 {
		e = e.number(fieldOperationVersion, g.OperationVersion)
	}
	for _, k := range sortedKeys(g.Scope) {
		e = e.text(fieldScope, k).chunk(g.Scope[k])
	}
	if g.Quantity != nil {
		e = e.number(fieldQuantity, *g.Quantity)
	}
	e = e.time(fieldStartsAt, g.StartsAt)
	e = e.time(fieldExpiresAt, g.ExpiresAt)
	return sha256.Sum256(e)
}

// sortedKeys returns the scope's keys in bytewise order.
func sortedKeys(scope map[string]string) []string {
	if len(scope) == 0 {
		return nil
	}
	keys := make([]string, 0, len(scope))
	for k := range scope {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
