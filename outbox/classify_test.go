package outbox

import (
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"
)

func TestClassifyHTTP(t *testing.T) {
	for status, want := range map[int]struct {
		verdict     verdict
		unreachable bool
	}{
		200: {delivered, false}, 201: {delivered, false}, 202: {delivered, false}, 204: {delivered, false}, 299: {delivered, false},
		300: {transient, true}, 301: {transient, true}, 302: {transient, true}, 303: {transient, true}, 307: {transient, true}, 308: {transient, true},
		400: {permanent, false}, 401: {permanent, false}, 403: {permanent, false}, 404: {permanent, false}, 409: {permanent, false}, 422: {permanent, false},
		408: {transient, false}, 425: {transient, false}, 429: {transient, true},
		410: {gone, false},
		500: {transient, false}, 501: {transient, false}, 503: {transient, false}, 599: {transient, false},
		502: {uncertain, false}, 504: {uncertain, false},
		199: {transient, false}, 999: {transient, false},
	} {
		got := classifyHTTP(status)
		if got.verdict != want.verdict || got.unreachable != want.unreachable || got.statusCode != status {
			t.Errorf("%d: %+v", status, got)
		}
		if (got.reason == "") != (want.verdict == delivered) {
			t.Errorf("%d: the reason %q", status, got.reason)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for header, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, " 7 ": 7 * time.Second, "0": 0, "-7": 0, "soon": 0, "1.5": 0,
		"99999999999999999999": maxDelay, "4294967295": maxDelay, "86399": 86399 * time.Second,
		now.Add(time.Minute).Format(http.TimeFormat):  time.Minute,
		now.Add(-time.Minute).Format(http.TimeFormat): 0,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
}

func TestSanitise(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "",
		" plain \n text\t":       "plain text",
		"\x1b[31mred\x00":        "\uFFFD[31mred\uFFFD",
		"bad \xff\xfe":           "bad \uFFFD\uFFFD",
		"right\u202eleft\u200b":  "right\uFFFDleft\uFFFD",
		"café \u00a0 naïve":      "café naïve",
		strings.Repeat("é", 600): strings.Repeat("é", 511),
	} {
		if got := sanitise(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzSanitise(f *testing.F) {
	f.Add("a\nb")
	f.Fuzz(func(t *testing.T, in string) {
		got := sanitise(in)
		if len(got) > maxReasonBytes || !utf8.ValidString(got) || got != sanitise(got) {
			t.Errorf("%q: %q", in, got)
		}
		for _, r := range got {
			if !unicode.IsGraphic(r) {
				t.Errorf("%q has %U", got, r)
			}
		}
	})
}
