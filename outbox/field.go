package outbox

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/grantd/grantd/internal/strictyaml"
)

// field is one value of the destinations' file, with where it stands. Its methods read the value, and refuse one of another shape
// with the rule it breaks.
type field struct {
	file  *strictyaml.File
	line  int
	path  string
	value *yaml.Node
}

func (f field) refuse(rule string) {
	f.file.Refuse(f.line, f.path, strictyaml.OrAlias(f.value, rule))
}

// fields calls each for every field of a mapping. Where each does not know one, it returns false; known lists those it does.
func (f field) fields(known string, each func(name string, f field) bool) {
	f.file.Fields(f.value, f.line, f.path, "must be a mapping of fields: "+known, func(key, value *yaml.Node) {
		at := field{f.file, key.Line, strictyaml.Under(f.path, strictyaml.Shown(key.Value)), value}
		if !each(key.Value, at) {
			at.file.Refuse(key.Line, at.path, "unknown field; known are "+known)
		}
	})
}

// items calls each for every item of a list.
func (f field) items(each func(f field)) {
	if f.value.Kind != yaml.SequenceNode {
		f.refuse("must be a list")
		return
	}
	for i, n := range f.value.Content {
		each(field{f.file, n.Line, f.path + "[" + strconv.Itoa(i) + "]", n})
	}
}

func (f field) text() string {
	if !strictyaml.Text(f.value) || f.value.Value == "" {
		f.refuse(strictyaml.RuleText)
		return ""
	}
	return f.value.Value
}

// match reads text that a pattern describes, and refuses other text with the rule.
func (f field) match(pattern *regexp.Regexp, rule string) string {
	if !strictyaml.Text(f.value) || !pattern.MatchString(f.value.Value) {
		f.refuse(rule)
		return ""
	}
	return f.value.Value
}

func (f field) bool() bool {
	value, ok := strictyaml.Bool(f.value)
	if !ok {
		f.refuse("must be true or false")
	}
	return value
}

func (f field) duration(least, most time.Duration) time.Duration {
	d, err := time.ParseDuration(f.value.Value)
	if f.value.Kind != yaml.ScalarNode || err != nil || d < least || d > most {
		f.refuse(fmt.Sprintf("must be a duration like 10s or 15m, from %s to %s", least, most))
		return 0
	}
	return d
}

func (f field) integer(least, most int) int {
	n, err := strconv.Atoi(f.value.Value)
	if f.value.Kind != yaml.ScalarNode || f.value.ShortTag() != "!!int" || err != nil || n < least || n > most {
		f.refuse(fmt.Sprintf("must be a whole number from %d to %d", least, most))
		return 0
	}
	return n
}

// url reads an absolute URL of one of the schemes. A password in it is refused: the file is no place for secrets.
func (f field) url(schemes ...string) *url.URL {
	rule := fmt.Sprintf("must be an absolute URL of %v, without a user or a fragment", schemes)
	if !strictyaml.Text(f.value) {
		f.refuse(rule)
		return nil
	}
	u, err := url.Parse(f.value.Value)
	if err != nil || u.Host == "" || u.User != nil || u.Fragment != "" || !slices.Contains(schemes, u.Scheme) {
		f.refuse(rule)
		return nil
	}
	return u
}

func (f field) secret() secret {
	var s secret
	f.fields("file or env", func(name string, f field) bool {
		switch name {
		case "file":
			s.file = f.text()
		case "env":
			s.env = f.text()
		default:
			return false
		}
		return true
	})
	if f.value.Kind == yaml.MappingNode && (s.file == "") == (s.env == "") {
		f.refuse("must name a file or an environment variable, one of the two")
	}
	return s
}
