package server

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// The rules for single fields, each with the sentence that callers are told. Whatever breaks one is refused: nothing is
// trimmed, folded or normalised, so names that look alike stay apart or are refused.
const (
	ruleIdempotencyKey  = "Required: 1 to 200 of the characters A-Z a-z 0-9 . _ : / ~ @ + = -"
	ruleIdentifier      = "Required: 1 to 128 visible ASCII characters, no spaces."
	ruleUUID            = "Required: a UUID of 32 lower-case hexadecimal digits with hyphens, as grantd returned it."
	ruleVersion         = "Must not be negative."
	ruleQuantity        = "Must be at least 1 when set; leave it unset for \"not counted\"."
	ruleRequired        = "Required."
	ruleDiagnostic      = "Must be at most 200 bytes of valid UTF-8 without NUL."
	ruleInvoiceState    = "Required: must be OPEN, PAID, VOIDED or REFUNDED."
	ruleView            = "Must be BASIC or FULL, or unset."
	ruleScopeEntries    = "Must have at most 32 entries."
	ruleScopeBytes      = "Keys and values together must be at most 2048 bytes."
	ruleScopeKey        = "The key must be a lower-case letter, then at most 62 of a-z 0-9 _ and the dot."
	ruleScopeValue      = "The value must be at most 256 bytes of valid UTF-8 without NUL."
	ruleTimestamp       = "Must be a valid time from the year 1 to the year 9999."
	ruleMicroseconds    = "Must be whole microseconds; finer is refused."
	ruleWindow          = "Must be after starts_at."
	ruleUnknownField    = "This version does not know a field of this number."
	ruleBatchItems      = "Must have 1 to 1000 items."
	ruleBatchBytes      = "All items together must be at most 1 MiB."
	ruleOperationName   = "Required: idempotency_key or business_key, unless grant names the operation."
	ruleEntitlementName = "Required: entitlement_id or business_key."
	ruleSameTenant      = "Must be the tenant_id of the look-up."
	ruleSameEffect      = "Must be the same as in business_key."

	ruleRecordedVersion  = "Required: must be at least 1."
	ruleReason           = "Required: 1 to 500 bytes of valid UTF-8 without control characters, not all of them spaces."
	ruleActor            = "Required: 1 to 200 bytes of valid UTF-8 without control characters, not all of them spaces."
	ruleEntitlementState = "Must be ACTIVE or REVERSED, or unset."
	ruleEventFilter      = "Must be 1 to 200 bytes of valid UTF-8 without NUL."
	ruleOperationFilter  = "Required: event_id, invoice_id or entitlement_type."
	rulePageSize         = "Must be 0 to 1000."
	rulePageToken        = "Must be the next_page_token of the same list."

	ruleRecipient     = "Required: an e-mail address of 3 to 254 bytes, with one @ between two parts, and no spaces or control characters."
	ruleLocale        = "Required: 2 to 35 of the characters A-Z a-z 0-9 -"
	ruleDestination   = "Must be a lower-case letter, then at most 62 of a-z 0-9 _ and -"
	ruleDeliveryState = "Must be a known state, or unset."
	ruleDeliveryName  = "Required: delivery_id, delivery_key or reference."
	ruleDeliveryKey   = "Must be 64 lower-case hexadecimal digits."
	ruleEntryNumber   = "Required: must be at least 1."
	ruleResolution    = "Required: must be DELIVERED or SEND_AGAIN."
)

const (
	maxIdempotencyKeyBytes = 200
	maxIdentifierBytes     = 128
	maxDiagnosticBytes     = 200
	maxScopeEntries        = 32
	maxScopeBytes          = 2 << 10
	maxScopeKeyBytes       = 63
	maxScopeValueBytes     = 256
	maxBatchItems          = 1000
	maxBatchBytes          = 1 << 20
	maxReasonBytes         = 500
	maxActorBytes          = 200
	maxPageSize            = 1000
	minRecipientBytes      = 3
	maxRecipientBytes      = 254
	minLocaleBytes         = 2
	maxLocaleBytes         = 35
	maxDestinationBytes    = 63
	deliveryKeyDigits      = 64
)

// byteSet holds the bytes that a text may be made of.
type byteSet [256]bool

func bytesOf(all string) *byteSet {
	var set byteSet
	for i := range len(all) {
		set[all[i]] = true
	}
	return &set
}

const (
	lowerCase = "abcdefghijklmnopqrstuvwxyz"
	digits    = "0123456789"
)

var (
	keyBytes         = bytesOf(lettersAndDigits + "._:/~@+=-")
	scopeKeyBytes    = bytesOf(lowerCase + digits + "_.")
	localeBytes      = bytesOf(lettersAndDigits + "-")
	destinationBytes = bytesOf(lowerCase + digits + "_-")
	hexBytes         = bytesOf("abcdef" + digits)
)

// isMadeOf accepts a text of least to most bytes, all of them in the set.
func isMadeOf(s string, least, most int, set *byteSet) bool {
	if len(s) < least || len(s) > most {
		return false
	}
	for i := range len(s) {
		if !set[s[i]] {
			return false
		}
	}
	return true
}

func isIdempotencyKey(s string) bool { return isMadeOf(s, 1, maxIdempotencyKeyBytes, keyBytes) }

func isIdentifier(s string) bool {
	if len(s) < 1 || len(s) > maxIdentifierBytes {
		return false
	}
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// isUUID accepts the canonical form alone: one entitlement has one name.
func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		if hyphen := i == 8 || i == 13 || i == 18 || i == 23; hyphen && s[i] != '-' || !hyphen && !hexBytes[s[i]] {
			return false
		}
	}
	return true
}

func isScopeKey(s string) bool {
	return isMadeOf(s, 1, maxScopeKeyBytes, scopeKeyBytes) && 'a' <= s[0] && s[0] <= 'z'
}

// isText accepts up to a number of bytes, empty too. The wire cannot carry invalid UTF-8, but a caller in the same process
// can, and PostgreSQL stores neither that nor NUL.
func isText(s string, maxBytes int) bool {
	return len(s) <= maxBytes && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}

// isStatement accepts what a person says in one line. It is kept for ever, and blank would tell nobody anything.
func isStatement(s string, maxBytes int) bool {
	return strings.TrimSpace(s) != "" && isText(s, maxBytes) && !strings.ContainsFunc(s, unicode.IsControl)
}

// isRecipient accepts an address that a mail can be sent to, and looks at its form no closer than that: only its own server knows more.
func isRecipient(s string) bool {
	local, domain, found := strings.Cut(s, "@")
	return len(s) >= minRecipientBytes && isText(s, maxRecipientBytes) &&
		found && local != "" && domain != "" && strings.IndexByte(domain, '@') < 0 &&
		!strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) })
}

func isLocale(s string) bool { return isMadeOf(s, minLocaleBytes, maxLocaleBytes, localeBytes) }

func isDestination(s string) bool {
	return isMadeOf(s, 1, maxDestinationBytes, destinationBytes) && 'a' <= s[0] && s[0] <= 'z'
}

func isDeliveryKey(s string) bool { return isMadeOf(s, deliveryKeyDigits, deliveryKeyDigits, hexBytes) }

func isInvoiceState(s entitlementv1.InvoiceState) bool {
	switch s {
	case entitlementv1.InvoiceState_INVOICE_STATE_OPEN,
		entitlementv1.InvoiceState_INVOICE_STATE_PAID,
		entitlementv1.InvoiceState_INVOICE_STATE_VOIDED,
		entitlementv1.InvoiceState_INVOICE_STATE_REFUNDED:
		return true
	}
	return false
}

func isOperationView(v entitlementv1.OperationView) bool {
	switch v {
	case entitlementv1.OperationView_OPERATION_VIEW_UNSPECIFIED,
		entitlementv1.OperationView_OPERATION_VIEW_BASIC,
		entitlementv1.OperationView_OPERATION_VIEW_FULL:
		return true
	}
	return false
}

// checkTime reports whether an optional time is set and keeps the rules, so that it can be compared.
func checkTime(v *violations, field string, t *timestamppb.Timestamp) bool {
	switch {
	case t == nil:
		return false
	case !t.IsValid():
		v.add(field, ruleTimestamp)
		return false
	case t.Nanos%1000 != 0:
		v.add(field, ruleMicroseconds)
		return false
	}
	return true
}
