package client

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	maxKeyLength = 200
	keyAlphabet  = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/@+=-"
)

// Key joins its arguments with ':' to an idempotency key of the recommended form, <producer>:<operation>:<business key>, for
// example billing:grant:INV-A:team_access. Different arguments never give the same key: within an argument, ':', '~' and every
// byte that a key must not hold are written as '~' and two hexadecimal digits. Nothing is folded, trimmed or shortened.
//
// Empty arguments are refused, being mostly a value that is missing, and so are keys of more than 200 characters: a hash in their
// place would hide from support what the key is about.
func Key(producer, operation string, parts ...string) (string, error) {
	if len(parts) == 0 {
		return "", errors.New("grantd: idempotency key without a business key")
	}
	var b strings.Builder
	for i, part := range append([]string{producer, operation}, parts...) {
		if part == "" {
			return "", fmt.Errorf("grantd: part %d of the idempotency key %q is empty", i+1, b.String())
		}
		if i > 0 {
			b.WriteByte(':')
		}
		for j := range len(part) {
			if c := part[j]; strings.IndexByte(keyAlphabet, c) >= 0 {
				b.WriteByte(c)
			} else {
				fmt.Fprintf(&b, "~%02X", c)
			}
		}
		if b.Len() > maxKeyLength {
			return "", fmt.Errorf("grantd: idempotency key %.40q... is longer than %d characters", b.String(), maxKeyLength)
		}
	}
	return b.String(), nil
}

// GrantKey is the recommended key of a grant: <producer>:grant:<invoice>:<type>, and the operation version behind it when that is
// not 0. Keys belong to a tenant, so the tenant is not in it. What is granted is not in it either: the same invoice and type with
// another scope or quantity is a conflict, as it should be.
func GrantKey(producer string, g *entitlementv1.Grant) (string, error) {
	parts := []string{g.GetInvoiceId(), g.GetEntitlementType()}
	if v := g.GetOperationVersion(); v != 0 {
		parts = append(parts, strconv.FormatInt(v, 10))
	}
	return Key(producer, "grant", parts...)
}
