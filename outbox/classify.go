package outbox

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// classifyHTTP says what a status means for a delivery.
//
//   - 2xx: delivered.
//   - 408, 425, 429, 5xx: transient. 502 and 504 are a proxy's, which does not know whether the receiver behind it had the event, so
//     they are uncertain.
//   - 410: gone.
//   - Other 4xx: permanent. The receiver has seen this very event, and does not want it.
//   - 3xx: transient, and never counted against the delivery. A redirect is not followed, since the event would go where nobody sent
//     it; but it is about the address, which is as wrong for every other event: the destination counts as down until somebody
//     corrects the file, and its events wait, in order, instead of dying one by one.
//   - 1xx and anything else: transient.
func classifyHTTP(status int) result {
	r := result{verdict: transient, statusCode: status, reason: strings.TrimSpace(strconv.Itoa(status) + " " + http.StatusText(status))}
	switch {
	case status >= 200 && status < 300:
		return result{verdict: delivered, statusCode: status}
	case status >= 300 && status < 400:
		r.unreachable = true
		r.reason += ": redirects are not followed"
	case status == http.StatusRequestTimeout, status == http.StatusTooEarly:
	case status == http.StatusTooManyRequests:
		// Too many is said of the calls, not of this one.
		r.unreachable = true
	case status == http.StatusGone:
		r.verdict = gone
	case status >= 400 && status < 500:
		r.verdict = permanent
	case status == http.StatusBadGateway, status == http.StatusGatewayTimeout:
		r.verdict = uncertain
	}
	return r
}

// retryAfter reads the header of that name, which has seconds or a date. 0 is none, or none that can be read; maxDelay stands for more.
func retryAfter(header string, now time.Time) time.Duration {
	header = strings.TrimSpace(header)
	if n, err := strconv.ParseUint(header, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		return time.Duration(min(n, uint64(maxDelay/time.Second))) * time.Second
	}
	at, err := http.ParseTime(header)
	if err != nil {
		return 0
	}
	return max(at.Sub(now), 0)
}

// maxReasonBytes bounds what is stored of a failure.
const maxReasonBytes = 1024

// sanitise makes text from outside fit to be stored and printed: valid UTF-8, one line, nothing that a terminal obeys or that
// changes the direction of writing, and at most 1 KiB.
func sanitise(text string) string {
	var b strings.Builder
	space := false
	for _, r := range text {
		switch {
		case unicode.IsSpace(r):
			space = b.Len() > 0
			continue
		case r == utf8.RuneError, !unicode.IsGraphic(r):
			r = '\uFFFD'
		}
		if b.Len()+utf8.RuneLen(r)+1 > maxReasonBytes {
			break
		}
		if space {
			b.WriteByte(' ')
			space = false
		}
		b.WriteRune(r)
	}
	return b.String()
}
