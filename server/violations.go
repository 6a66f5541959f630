package server

import (
	"strconv"
	"unicode/utf8"
)

// violation is one broken rule about one field.
type violation struct {
	// field is the path within the message, for example `grant.tenant_id`; empty for the message as a whole.
	field string
	// rule says in one sentence what would be accepted. It never holds a submitted value.
	rule string
}

// violations are the broken rules of one message; none means that the message is valid. A hostile message can break
// hundreds of thousands of rules, so only the first are kept and the others counted.
type violations struct {
	kept    []violation
	omitted int
}

const (
	maxKeptViolations = 64
	// itemViolationBytes bounds the violations of one batch item: a thousand malformed items take a quarter of the 4 MiB that
	// clients accept.
	itemViolationBytes = 1 << 10
	// maxEchoedKeyBytes bounds how much of an illegal scope key stands in a path.
	maxEchoedKeyBytes = 64
)

func (v *violations) none() bool { return len(v.kept) == 0 }

func (v *violations) full() bool { return len(v.kept) == maxKeptViolations }

func (v *violations) add(field, rule string) {
	if v.full() {
		v.omitted++
		return
	}
	v.kept = append(v.kept, violation{field, rule})
}

func (v *violations) check(ok bool, field, rule string) {
	if !ok {
		v.add(field, rule)
	}
}

// within returns as many violations as fit into a number of bytes when encoded, which is at least 512. If some do not fit, or
// were not kept, the last one returned says how many.
func (v *violations) within(maxBytes int) []violation {
	const overheadBytes = 8 // tags and lengths of the message and its two fields
	// What the violation that counts takes is set aside from the start.
	left := maxBytes - 64
	for i, one := range v.kept {
		left -= len(one.field) + len(one.rule) + overheadBytes
		if left < 0 {
			return cutOff(v.kept[:i], len(v.kept)-i+v.omitted)
		}
	}
	if v.omitted > 0 {
		return cutOff(v.kept, v.omitted)
	}
	return v.kept
}

func cutOff(shown []violation, hidden int) []violation {
	rule := strconv.Itoa(hidden) + " more violations are not listed."
	if hidden == 1 {
		rule = "1 more violation is not listed."
	}
	return append(shown[:len(shown):len(shown)], violation{rule: rule})
}

// scopePath is the path of a scope entry: `grant.scope.seats` for a legal key, `grant.scope["Bad Key"]` for any other, in
// ASCII and cut off, since it came from outside and may go through a header.
func scopePath(key string) string {
	if isScopeKey(key) {
		return "grant.scope." + key
	}
	if len(key) <= maxEchoedKeyBytes {
		return "grant.scope[" + strconv.QuoteToASCII(key) + "]"
	}
	cut := maxEchoedKeyBytes
	for cut > maxEchoedKeyBytes-utf8.UTFMax && !utf8.RuneStart(key[cut]) {
		cut--
	}
	return "grant.scope[" + strconv.QuoteToASCII(key[:cut]) + "...]"
}
