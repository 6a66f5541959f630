package store

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/grantd/grantd/internal/strictyaml"
)

// maxValidityDays is the most days that a time.Duration holds.
const maxValidityDays = 106751

const (
	ruleTypes      = "must be a mapping with one entitlement type at least"
	ruleType       = "must be a mapping of fields, {} for none"
	ruleTypeName   = "the name of a type must be 1 to 128 visible ASCII characters, no spaces"
	ruleRepeatable = "must be true or false"
	ruleScopeKeys  = "must be a list; [] allows no key, and without the field every key is allowed"
	ruleScopeKey   = "must be a lower-case letter, then at most 62 of a-z 0-9 _ and the dot"
	ruleValidity   = "must be a duration like 8760h or 365d, whole microseconds above 0 and at most 106751d"
)

var (
	typeNamePattern = regexp.MustCompile(`^[!-~]{1,128}$`)
	scopeKeyPattern = regexp.MustCompile(`^[a-z][a-z0-9_.]{0,62}$`)
	dayPattern      = regexp.MustCompile(`^[0-9]{1,6}d$`)
)

// ParseCatalog reads a catalogue's YAML text. Below `types`, each entitlement type has any of the fields description,
// repeatable, scope_keys and default_validity (a Go duration, or days of 24 hours as in 365d). A list of scope keys that is there
// and empty allows none, while its absence allows all.
//
// Whatever is not understood is refused. The error has a line for each problem, 20 at most, of the form
// `catalog.yaml:4: types.team_access.repeatable: must be true or false`, with name for the file.
func ParseCatalog(name string, text []byte) (*Catalog, error) {
	c := &Catalog{Types: make(map[string]CatalogType)}
	err := strictyaml.Read(name, text, "types", func(f *strictyaml.File, root *yaml.Node) { readCatalog(f, root, c) })
	if err != nil {
		return nil, err
	}
	return c, nil
}

func readCatalog(f *strictyaml.File, root *yaml.Node, c *Catalog) {
	typesLine := 0
	f.Fields(root, root.Line, "", "must be a mapping with the field types", func(key, value *yaml.Node) {
		if key.Value != "types" {
			f.Refuse(key.Line, strictyaml.Shown(key.Value), "unknown field; the only one here is types")
			return
		}
		typesLine = key.Line
		if value.Kind == yaml.MappingNode && len(value.Content) == 0 {
			f.Refuse(key.Line, "types", ruleTypes)
		}
		f.Fields(value, key.Line, "types", ruleTypes, func(key, value *yaml.Node) {
			if !typeNamePattern.MatchString(key.Value) {
				f.Refuse(key.Line, strictyaml.Under("types", strictyaml.Shown(key.Value)), ruleTypeName)
				return
			}
			c.Types[key.Value] = readCatalogType(f, key, value)
		})
	})
	if typesLine == 0 && !f.Problems() {
		f.Refuse(root.Line, "types", "required")
	}
}

// readCatalogType reads the fields of one type.
func readCatalogType(f *strictyaml.File, name, fields *yaml.Node) CatalogType {
	var t CatalogType
	path := strictyaml.Under("types", name.Value)
	f.Fields(fields, name.Line, path, ruleType, func(key, value *yaml.Node) {
		at, ok, rule := strictyaml.Under(path, strictyaml.Shown(key.Value)), false, ""
		switch key.Value {
		case "description":
			t.Description, ok, rule = value.Value, strictyaml.Text(value), strictyaml.RuleText
		case "repeatable":
			t.Repeatable, ok = strictyaml.Bool(value)
			rule = ruleRepeatable
		case "scope_keys":
			ok, rule = value.Kind == yaml.SequenceNode, ruleScopeKeys
			if ok {
				t.ScopeKeys = readScopeKeys(f, value, at)
			}
		case "default_validity":
			t.DefaultValidity, ok = yamlValidity(value)
			rule = ruleValidity
		default:
			rule = "unknown field; known are description, repeatable, scope_keys and default_validity"
		}
		if !ok {
			f.Refuse(key.Line, at, strictyaml.OrAlias(value, rule))
		}
	})
	return t
}

// readScopeKeys is never nil: a list that is empty allows no key.
func readScopeKeys(f *strictyaml.File, list *yaml.Node, path string) []string {
	keys := make([]string, 0, len(list.Content))
	for i, n := range list.Content {
		at := path + "[" + strconv.Itoa(i) + "]"
		switch {
		case !strictyaml.Text(n):
			f.Refuse(n.Line, at, strictyaml.OrAlias(n, strictyaml.RuleText))
		case !scopeKeyPattern.MatchString(n.Value):
			f.Refuse(n.Line, at, ruleScopeKey)
		case slices.Contains(keys, n.Value):
			f.Refuse(n.Line, at, n.Value+" stands in the list already")
		default:
			keys = append(keys, n.Value)
		}
	}
	return keys
}

func yamlValidity(n *yaml.Node) (time.Duration, bool) {
	if !strictyaml.Text(n) {
		return 0, false
	}
	if dayPattern.MatchString(n.Value) {
		days, err := strconv.Atoi(strings.TrimSuffix(n.Value, "d"))
		return time.Duration(days) * 24 * time.Hour, err == nil && days > 0 && days <= maxValidityDays
	}
	d, err := time.ParseDuration(n.Value)
	return d, err == nil && d > 0 && d%time.Microsecond == 0
}
