package outbox

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
)

// jsonWriter appends the members of JSON objects in the JSON form of protocol buffers: int64 as text, and no member for what is empty, zero or
// nil. Names of members are the code's, and need no escaping.
type jsonWriter struct {
	b   []byte
	err error
}

// bytes is what was written, or why it cannot be: a time outside the years 1 to 9999, or text that is not UTF-8.
func (w *jsonWriter) bytes() ([]byte, error) {
	if w.err == nil && !utf8.Valid(w.b) {
		w.err = errors.New("invalid UTF-8")
	}
	return w.b, w.err
}

// open begins an object, which is a member unless it has no name.
func (w *jsonWriter) open(name string) {
	if name != "" {
		w.member(name)
	}
	w.b = append(w.b, '{')
}

func (w *jsonWriter) close() { w.b = append(w.b, '}') }

func (w *jsonWriter) member(name string) {
	w.comma()
	w.b = append(append(append(w.b, '"'), name...), '"', ':')
}

func (w *jsonWriter) comma() {
	if w.b[len(w.b)-1] != '{' {
		w.b = append(w.b, ',')
	}
}

func (w *jsonWriter) text(name, value string) {
	if value != "" {
		w.member(name)
		w.string(value)
	}
}

// texts writes an object with sorted names.
func (w *jsonWriter) texts(name string, values map[string]string) {
	if len(values) == 0 {
		return
	}
	w.open(name)
	for _, key := range slices.Sorted(maps.Keys(values)) {
		w.comma()
		w.string(key)
		w.b = append(w.b, ':')
		w.string(values[key])
	}
	w.close()
}

func (w *jsonWriter) int64(name string, value int64) {
	if value != 0 {
		w.member(name)
		w.b = append(strconv.AppendInt(append(w.b, '"'), value, 10), '"')
	}
}

// enum writes the value's name, and the number of one that this version does not know.
func (w *jsonWriter) enum(name string, value int32, names map[int32]string) {
	if value == 0 {
		return
	}
	w.member(name)
	if known, ok := names[value]; ok {
		w.string(known)
	} else {
		w.b = strconv.AppendInt(w.b, int64(value), 10)
	}
}

// time writes a time in UTC, with 0, 3, 6 or 9 digits of a second's fraction.
func (w *jsonWriter) time(name string, value *time.Time) {
	if value == nil {
		return
	}
	t := value.UTC()
	if year := t.Year(); year < 1 || year > 9999 {
		w.err = fmt.Errorf("%s is in the year %d", name, year)
		return
	}
	w.member(name)
	w.b = append(w.b, '"')
	start := len(w.b)
	w.b = t.AppendFormat(w.b, time.RFC3339Nano)
	w.b = w.b[:len(w.b)-len("Z")]
	for digits := len(w.b) - start - len("2006-01-02T15:04:05."); digits > 0 && digits%3 != 0; digits++ {
		w.b = append(w.b, '0')
	}
	w.b = append(w.b, 'Z', '"')
}

func (w *jsonWriter) string(s string) {
	const hex = "0123456789abcdef"
	w.b = append(w.b, '"')
	from := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		w.b = append(w.b, s[from:i]...)
		from = i + 1
		if c < ' ' {
			w.b = append(w.b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			w.b = append(w.b, '\\', c)
		}
	}
	w.b = append(append(w.b, s[from:]...), '"')
}
