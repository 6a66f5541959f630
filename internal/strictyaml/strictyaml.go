// Package strictyaml is the authority for how the files that people write are read: a single document, every field known, every
// key once, no aliases, and an error that names file, line and field for each of the problems.
package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxProblems bounds the problems that one error lists.
const maxProblems = 20

// RuleText is refused with where Text says no.
const RuleText = "must be text, in quotes if it looks like something else"

// Read parses a file's text and hands its root to read. The error has a line for each problem that the text or read has, 20 at
// most, of the form `catalog.yaml:4: types.team_access.repeatable: must be true or false`, with name for the file. required is the
// field that an empty file lacks.
func Read(name string, text []byte, required string, read func(f *File, root *yaml.Node)) error {
	root, err := decode(text)
	if errors.Is(err, errEmpty) {
		return fmt.Errorf("%s:1: %w; it must have the field %s", name, err, required)
	}
	if err != nil {
		return syntaxError(name, text, err)
	}
	f := &File{name: name}
	read(f, root)
	return f.err()
}

var (
	errEmpty         = errors.New("the file is empty")
	errManyDocuments = errors.New("must be a single YAML document")
)

// decode returns the root node of the text's only document.
func decode(text []byte) (*yaml.Node, error) {
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

// wordPattern is what reads as one word of a path.
var wordPattern = regexp.MustCompile(`^[!-~]{1,128}$`)

var yamlLinePattern = regexp.MustCompile(`^line ([0-9]+): `)

// syntaxError names the line of an error of the parser. Some come without one: theirs is the first line up to which the text
// brings the same error.
func syntaxError(name string, text []byte, err error) error {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLinePattern.FindStringSubmatch(message); m != nil {
		return fmt.Errorf("%s:%s: %s", name, m[1], message[len(m[0]):])
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	before := sort.Search(len(lines)-1, func(n int) bool {
		_, with := decode(bytes.Join(lines[:n+1], nil))
		return with != nil && with.Error() == err.Error()
	})
	return fmt.Errorf("%s:%d: %s", name, before+1, message)
}

// File collects what is wrong with a file.
type File struct {
	name     string
	problems []string
	// omitted counts the problems beyond the bound.
	omitted int
}

// Refuse notes a problem of the field that path names.
func (f *File) Refuse(line int, path, rule string) {
	if len(f.problems) == maxProblems {
		f.omitted++
		return
	}
	if path != "" {
		path += ": "
	}
	f.problems = append(f.problems, fmt.Sprintf("%s:%d: %s%s", f.name, line, path, rule))
}

// Problems reports whether any was noted.
func (f *File) Problems() bool { return len(f.problems) > 0 }

func (f *File) err() error {
	if f.omitted > 0 {
		f.problems = append(f.problems, fmt.Sprintf("%s: and %d more", f.name, f.omitted))
		f.omitted = 0
	}
	if len(f.problems) == 0 {
		return nil
	}
	return errors.New(strings.Join(f.problems, "\n"))
}

// Fields calls each for every key of a mapping, once. Where the node is none, the rule says what was expected; its line is
// that of the key it stands under, since an absent value has none of its own.
func (f *File) Fields(n *yaml.Node, line int, path, rule string, each func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		f.Refuse(line, path, OrAlias(n, rule))
		return
	}
	seen := make(map[string]int, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !Text(key) {
			f.Refuse(key.Line, Under(path, Shown(key.Value)), OrAlias(key, "the key "+RuleText))
			continue
		}
		if first, again := seen[key.Value]; again {
			f.Refuse(key.Line, Under(path, Shown(key.Value)), fmt.Sprintf("stands in line %d already", first))
			continue
		}
		seen[key.Value] = key.Line
		each(key, value)
	}
}

// Shown returns a key as it is or, where it would not read as one word of a path, in quotes and cut short.
func Shown(key string) string {
	if wordPattern.MatchString(key) {
		return key
	}
	return fmt.Sprintf("%.60q", key)
}

// Under is the path of a field below another.
func Under(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// OrAlias replaces a rule where the trouble is that the value stands elsewhere. Aliases are refused, since these files are read by
// people, and a small text could unfold to any size.
func OrAlias(n *yaml.Node, rule string) string {
	if n.Kind == yaml.AliasNode {
		return "must be written out: aliases are not allowed"
	}
	return rule
}

// Text reports whether the node is text, and not a number, a truth value or anything else.
func Text(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" }

// Bool takes the two words of YAML 1.2 in lower case; YAML 1.1 had eleven for each.
func Bool(n *yaml.Node) (value, ok bool) {
	plain := n.Kind == yaml.ScalarNode && n.ShortTag() == "!!bool"
	return n.Value == "true", plain && (n.Value == "true" || n.Value == "false")
}
