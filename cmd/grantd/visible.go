package main

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
)

// visible writes out, as JSON would, what a terminal obeys or what changes the direction of writing. It may be used on JSON itself,
// where such characters stand in strings alone.
func visible(s string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}
