package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// maxCatalogProblems bounds the problems that one error lists.
const maxCatalogProblems = 20

// maxValidityDays is the most days that a time.Duration holds.
const maxValidityDays = 106751

const (
	ruleTypes      = "must be a mapping with one entitlement type at least"
	ruleType       = "must be a mapping of fields, {} for none"
	ruleTypeName   = "the name of a type must be 1 to 128 visible ASCII characters, no spaces"
	ruleText       = "must be text, in quotes if it looks like something else"
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
	root, err := decodeCatalog(text)
	if err != nil {
		return nil, syntaxError(name, text, err)
	}
	f := catalogFile{name: name}
	c := &Catalog{Types: make(map[string]CatalogType)}
	typesLine := 0
	f.fields(root, root.Line, "", "must be a mapping with the field types", func(key, value *yaml.Node) {
		if key.Value != "types" {
			f.refuse(key.Line, shown(key.Value), "unknown field; the only one here is types")
			return
		}
		typesLine = key.Line
		if value.Kind == yaml.MappingNode && len(value.Content) == 0 {
			f.refuse(key.Line, "types", ruleTypes)
		}
		f.fields(value, key.Line, "types", ruleTypes, func(key, value *yaml.Node) {
			if !typeNamePattern.MatchString(key.Value) {
				f.refuse(key.Line, under("types", shown(key.Value)), ruleTypeName)
				return
			}
			c.Types[key.Value] = f.catalogType(key, value)
		})
	})
	if typesLine == 0 && len(f.problems) == 0 {
		f.refuse(root.Line, "types", "required")
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	return c, nil
}

var (
	errEmpty         = errors.New("the file is empty; it must have the field types")
	errManyDocuments = errors.New("must be a single YAML document")
)

// decodeCatalog returns the root node of the text's only document.
func decodeCatalog(text []byte) (*yaml.Node, error) {
	var document, another yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&document); errors.Is(err, io.EOF) {
		return nil, errEmpty
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(&another); err == nil {
		return nil, errManyDocuments
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	root := document.Content[0]
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" {
		return nil, errEmpty
	}
	return root, nil
}

var yamlLinePattern = regexp.MustCompile(`^line ([0-9]+): `)

// syntaxError names the line of an error of the parser. Some come without one: theirs is the first line up to which the text
// brings the same error.
func syntaxError(name string, text []byte, err error) error {
	if errors.Is(err, errEmpty) {
		return fmt.Errorf("%s:1: %w", name, err)
	}
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLinePattern.FindStringSubmatch(message); m != nil {
		return fmt.Errorf("%s:%s: %s", name, m[1], message[len(m[0]):])
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	before := sort.Search(len(lines)-1, func(n int) bool {
		_, with := decodeCatalog(bytes.Join(lines[:n+1], nil))
		return with != nil && with.Error() == err.Error()
	})
	return fmt.Errorf("%s:%d: %s", name, before+1, message)
}

// catalogFile collects what is wrong with a file.
type catalogFile struct {
	name     string
	problems []string
	// omitted counts the problems beyond the bound.
	omitted int
}

func (f *catalogFile) refuse(line int, path, rule string) {
	if len(f.problems) == maxCatalogProblems {
		f.omitted++
		return
	}
	if path != "" {
		path += ": "
	}
	f.problems = append(f.problems, fmt.Sprintf("%s:%d: %s%s", f.name, line, path, rule))
}

func (f *catalogFile) err() error {
	if f.omitted > 0 {
		f.problems = append(f.problems, fmt.Sprintf("%s: and %d more", f.name, f.omitted))
		f.omitted = 0
	}
	if len(f.problems) == 0 {
		return nil
	}
	return errors.New(strings.Join(f.problems, "\n"))
}

// fields calls each for every key of a mapping, once. Where the node is none, the rule says what was expected; its line is
// that of the key it stands under, since an absent value has none of its own.
func (f *catalogFile) fields(n *yaml.Node, line int, path, rule string, each func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		f.refuse(line, path, orAlias(n, rule))
		return
	}
	seen := make(map[string]int, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !isYAMLText(key) {
			f.refuse(key.Line, under(path, shown(key.Value)), orAlias(key, "the key "+ruleText))
			continue
		}
		if first, again := seen[key.Value]; again {
			f.refuse(key.Line, under(path, shown(key.Value)), fmt.Sprintf("stands in line %d already", first))
			continue
		}
		seen[key.Value] = key.Line
		each(key, value)
	}
}

// catalogType reads the fields of one type.
func (f *catalogFile) catalogType(name, fields *yaml.Node) CatalogType {
	var t CatalogType
	path := under("types", name.Value)
	f.fields(fields, name.Line, path, ruleType, func(key, value *yaml.Node) {
		at, ok, rule := under(path, shown(key.Value)), false, ""
		switch key.Value {
		case "description":
			t.Description, ok, rule = value.Value, isYAMLText(value), ruleText
		case "repeatable":
			t.Repeatable, ok = yamlBool(value)
			rule = ruleRepeatable
		case "scope_keys":
			ok, rule = value.Kind == yaml.SequenceNode, ruleScopeKeys
			if ok {
				t.ScopeKeys = f.scopeKeys(value, at)
			}
		case "default_validity":
			t.DefaultValidity, ok = yamlValidity(value)
			rule = ruleValidity
		default:
			rule = "unknown field; known are description, repeatable, scope_keys and default_validity"
		}
		if !ok {
			f.refuse(key.Line, at, orAlias(value, rule))
		}
	})
	return t
}

// scopeKeys is never nil: a list that is empty allows no key.
func (f *catalogFile) scopeKeys(list *yaml.Node, path string) []string {
	keys := make([]string, 0, len(list.Content))
	for i, n := range list.Content {
		at := path + "[" + strconv.Itoa(i) + "]"
		switch {
		case !isYAMLText(n):
			f.refuse(n.Line, at, orAlias(n, ruleText))
		case !scopeKeyPattern.MatchString(n.Value):
			f.refuse(n.Line, at, ruleScopeKey)
		case slices.Contains(keys, n.Value):
			f.refuse(n.Line, at, n.Value+" stands in the list already")
		default:
			keys = append(keys, n.Value)
		}
	}
	return keys
}

// shown is a key as it is or, where it would not read as one word of a path, in quotes and cut short.
func shown(key string) string {
	if typeNamePattern.MatchString(key) {
		return key
	}
	return fmt.Sprintf("%.60q", key)
}

func under(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// orAlias replaces a rule where the trouble is that the value stands elsewhere. Aliases are refused, since a catalogue is read by
// people, and a small text could unfold to any size.
func orAlias(n *yaml.Node, rule string) string {
	if n.Kind == yaml.AliasNode {
		return "must be written out: aliases are not allowed"
	}
	return rule
}

func isYAMLText(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" }

// yamlBool takes the two words of YAML 1.2 in lower case; YAML 1.1 had eleven for each.
func yamlBool(n *yaml.Node) (value, ok bool) {
	plain := n.Kind == yaml.ScalarNode && n.ShortTag() == "!!bool"
	return n.Value == "true", plain && (n.Value == "true" || n.Value == "false")
}

func yamlValidity(n *yaml.Node) (time.Duration, bool) {
	if !isYAMLText(n) {
		return 0, false
	}
	if dayPattern.MatchString(n.Value) {
		days, err := strconv.Atoi(strings.TrimSuffix(n.Value, "d"))
		return time.Duration(days) * 24 * time.Hour, err == nil && days > 0 && days <= maxValidityDays
	}
	d, err := time.ParseDuration(n.Value)
	return d, err == nil && d > 0 && d%time.Microsecond == 0
}
