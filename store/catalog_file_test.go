package store_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

func TestParseCatalog(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       map[string]store.CatalogType
	}{
		{"every field", `
types:
  team_access:
    description: Seats in a team
    repeatable: true
    scope_keys: [seats, region]
    default_validity: 8760h
`, map[string]store.CatalogType{"team_access": {
			Description: "Seats in a team", Repeatable: true, ScopeKeys: []string{"seats", "region"}, DefaultValidity: 8760 * time.Hour,
		}}},
		{"no fields: any scope key", "types: {a: {}}", map[string]store.CatalogType{"a": {}}},
		{"no scope key", "types: {a: {scope_keys: []}}", map[string]store.CatalogType{"a": {ScopeKeys: []string{}}}},
		{"a list of lines", "types:\n  a:\n    scope_keys:\n      - x\n      - y.z_1\n",
			map[string]store.CatalogType{"a": {ScopeKeys: []string{"x", "y.z_1"}}}},
		{"days", "types: {a: {default_validity: 365d}}", map[string]store.CatalogType{"a": {DefaultValidity: 365 * 24 * time.Hour}}},
		{"the most days", "types: {a: {default_validity: 106751d}}",
			map[string]store.CatalogType{"a": {DefaultValidity: 106751 * 24 * time.Hour}}},
		{"the shortest", "types: {a: {default_validity: 1us}}", map[string]store.CatalogType{"a": {DefaultValidity: time.Microsecond}}},
		{"mixed units", "types: {a: {default_validity: 1h30m}}", map[string]store.CatalogType{"a": {DefaultValidity: 90 * time.Minute}}},
		{"names that need quotes", `types: {"12": {}, "<<": {}, "a:b": {}, "true": {}}`,
			map[string]store.CatalogType{"12": {}, "<<": {}, "a:b": {}, "true": {}}},
		{"names that differ in case", "types: {a: {}, A: {}}", map[string]store.CatalogType{"a": {}, "A": {}}},
		{"the longest names", "types:\n  " + strings.Repeat("x", 128) + ": {scope_keys: [" + strings.Repeat("y", 63) + "]}\n",
			map[string]store.CatalogType{strings.Repeat("x", 128): {ScopeKeys: []string{strings.Repeat("y", 63)}}}},
		{"byte order mark and CRLF", "\ufefftypes:\r\n  a: {}\r\n", map[string]store.CatalogType{"a": {}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := store.ParseCatalog("catalog.yaml", []byte(tc.text))
			if err != nil {
				t.Fatal(err)
			}
			// cmp tells a nil list from an empty one, and so do grants.
			if d := cmp.Diff(tc.want, got.Types); d != "" {
				t.Errorf("want -, got +:\n%s", d)
			}
		})
	}
}

func TestParseCatalog_Refuses(t *testing.T) {
	const (
		typeName = "the name of a type must be 1 to 128 visible ASCII characters, no spaces"
		text     = "must be text, in quotes if it looks like something else"
		validity = "must be a duration like 8760h or 365d, whole microseconds above 0 and at most 106751d"
		boolean  = "must be true or false"
		list     = "must be a list; [] allows no key, and without the field every key is allowed"
		scopeKey = "must be a lower-case letter, then at most 62 of a-z 0-9 _ and the dot"
		mapping  = "must be a mapping of fields, {} for none"
		types    = "must be a mapping with one entitlement type at least"
		alias    = "must be written out: aliases are not allowed"
		empty    = "the file is empty; it must have the field types"
		known    = "unknown field; known are description, repeatable, scope_keys and default_validity"
	)
	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"no bytes", "", []string{"1: " + empty}},
		{"a comment", "# types:\n", []string{"1: " + empty}},
		{"no value", "---\n", []string{"1: " + empty}},
		{"a list", "- types\n", []string{"1: must be a mapping with the field types"}},
		{"text", "\ntypes\n", []string{"2: must be a mapping with the field types"}},
		{"no types", "{}", []string{"1: types: required"}},
		{"types without a value", "types:\n", []string{"1: types: " + types}},
		{"types without a type", "types: {}\n", []string{"1: types: " + types}},
		{"types as a list", "types: [a]\n", []string{"1: types: " + types}},
		{"another field beside types", "version: 1\ntypes: {a: {}}\n", []string{"1: version: unknown field; the only one here is types"}},
		{"types twice", "types: {a: {}}\ntypes: {b: {}}\n", []string{"2: types: stands in line 1 already"}},
		{"two documents", "types: {a: {}}\n---\ntypes: {b: {}}\n", []string{"2: must be a single YAML document"}},

		{"a type twice", "types:\n  a: {}\n  b: {}\n  a: {}\n", []string{"4: types.a: stands in line 2 already"}},
		{"a type without a value", "types:\n  a:\n  b: {}\n", []string{"2: types.a: " + mapping}},
		{"a field one level too high", "types:\n  a:\n  description: A\n",
			[]string{"2: types.a: " + mapping, "3: types.description: " + mapping}},
		{"a space in a name", "types:\n  team access: {}\n", []string{`2: types."team access": ` + typeName}},
		{"a letter beyond ASCII", "types:\n  Å: {}\n", []string{`2: types."Å": ` + typeName}},
		{"an empty name", "types:\n  \"\": {}\n", []string{`2: types."": ` + typeName}},
		{"a name too long", "types:\n  " + strings.Repeat("x", 129) + ": {}\n",
			[]string{`2: types."` + strings.Repeat("x", 60) + `": ` + typeName}},
		{"a number for a name", "types:\n  12: {}\n", []string{"2: types.12: the key " + text}},
		{"a merge key", "types:\n  a: {}\n  <<: {}\n", []string{"3: types.<<: the key " + text}},
		{"an alias", "types:\n  a: &a {}\n  b: *a\n", []string{"3: types.b: " + alias}},
		{"an alias for a key", "types:\n  a: {description: &d x}\n  *d : {}\n", []string{"3: types.d: " + alias}},

		{"an unknown field", "types:\n  a:\n    Repeatable: true\n", []string{"3: types.a.Repeatable: " + known}},
		{"a field twice", "types:\n  a:\n    repeatable: true\n    repeatable: false\n",
			[]string{"4: types.a.repeatable: stands in line 3 already"}},
		{"a number for a description", "types:\n  a:\n    description: 1\n", []string{"3: types.a.description: " + text}},
		{"yes", "types:\n  team_access:\n    description: x\n    repeatable: yes\n", []string{"4: types.team_access.repeatable: " + boolean}},
		{"True", "types:\n  a:\n    repeatable: True\n", []string{"3: types.a.repeatable: " + boolean}},
		{"true in quotes", "types:\n  a:\n    repeatable: 'true'\n", []string{"3: types.a.repeatable: " + boolean}},
		{"repeatable without a value", "types:\n  a:\n    repeatable:\n", []string{"3: types.a.repeatable: " + boolean}},
		{"repeatable by alias", "types:\n  a: {repeatable: &t true}\n  b: {repeatable: *t}\n", []string{"3: types.b.repeatable: " + alias}},

		{"scope keys without a value", "types:\n  a:\n    scope_keys:\n", []string{"3: types.a.scope_keys: " + list}},
		{"one scope key without a list", "types:\n  a:\n    scope_keys: seats\n", []string{"3: types.a.scope_keys: " + list}},
		{"bad scope keys", "types:\n  a:\n    scope_keys:\n      - Seats\n      - 1\n      - 1a\n      - ok\n      - ok\n      - a-b\n      - \"\"\n",
			[]string{"4: types.a.scope_keys[0]: " + scopeKey, "5: types.a.scope_keys[1]: " + text, "6: types.a.scope_keys[2]: " + scopeKey,
				"8: types.a.scope_keys[4]: ok stands in the list already", "9: types.a.scope_keys[5]: " + scopeKey,
				"10: types.a.scope_keys[6]: " + scopeKey}},
		{"a scope key too long", "types:\n  a: {scope_keys: [" + strings.Repeat("y", 64) + "]}\n",
			[]string{"2: types.a.scope_keys[0]: " + scopeKey}},

		{"no validity", "types:\n  a:\n    default_validity: 0s\n", []string{"3: types.a.default_validity: " + validity}},
		{"0 days", "types:\n  a:\n    default_validity: 0d\n", []string{"3: types.a.default_validity: " + validity}},
		{"negative", "types:\n  a:\n    default_validity: -1h\n", []string{"3: types.a.default_validity: " + validity}},
		{"negative days", "types:\n  a:\n    default_validity: -1d\n", []string{"3: types.a.default_validity: " + validity}},
		{"too many days", "types:\n  a:\n    default_validity: 106752d\n", []string{"3: types.a.default_validity: " + validity}},
		{"too many hours", "types:\n  a:\n    default_validity: 9999999h\n", []string{"3: types.a.default_validity: " + validity}},
		{"too fine", "types:\n  a:\n    default_validity: 1h1ns\n", []string{"3: types.a.default_validity: " + validity}},
		{"no unit", "types:\n  a:\n    default_validity: 365\n", []string{"3: types.a.default_validity: " + validity}},
		{"a year", "types:\n  a:\n    default_validity: 1y\n", []string{"3: types.a.default_validity: " + validity}},

		{"not YAML", "types:\n  a:\n    description: x: y\n", []string{"3: mapping values are not allowed in this context"}},
		{"a tab", "types:\n\ta: {}\n", []string{"2: found character that cannot start any token"}},
		{"an alias of nothing", "types:\n  a: {}\n  b: *nope\n  c: {}\n", []string{"3: unknown anchor 'nope' referenced"}},
		{"a control character", "types:\n  a: {}\n  b: \x01\n  c: {}\n", []string{"3: control characters are not allowed"}},
		{"not UTF-8", "types:\n  a: {}\n  b: {}\n  c: \xff\xff\n  d: {}\n", []string{"4: invalid leading UTF-8 octet"}},

		{"all at once", "types:\n  a b: {}\n  c:\n    repeatable: 1\n    scope_keys: [A]\n    colour: red\nextra: 1\n",
			[]string{`2: types."a b": ` + typeName, "4: types.c.repeatable: " + boolean, "5: types.c.scope_keys[0]: " + scopeKey,
				"6: types.c.colour: " + known, "7: extra: unknown field; the only one here is types"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := store.ParseCatalog("catalog.yaml", []byte(tc.text))
			if err == nil {
				t.Fatalf("parsed as %v", c.Types)
			}
			var want strings.Builder
			for i, line := range tc.want {
				if i > 0 {
					want.WriteByte('\n')
				}
				want.WriteString("catalog.yaml:" + line)
			}
			if d := cmp.Diff(want.String(), err.Error()); d != "" || c != nil {
				t.Errorf("catalogue %v; want -, got +:\n%s", c, d)
			}
		})
	}
}

func TestParseCatalog_ManyProblems(t *testing.T) {
	text := "types:\n"
	for i := range 30 {
		text += fmt.Sprintf("  t%d: {colour: red}\n", i)
	}
	_, err := store.ParseCatalog("catalog.yaml", []byte(text))
	if err == nil {
		t.Fatal("parsed")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 21 || !strings.HasPrefix(lines[19], "catalog.yaml:21: types.t19.colour: ") || lines[20] != "catalog.yaml: and 10 more" {
		t.Errorf("got %d lines:\n%v", len(lines), err)
	}
}

// What the file says is what grants are held to.
func TestParseCatalog_ScopeKeys(t *testing.T) {
	catalog, err := store.ParseCatalog("catalog.yaml", []byte(`
types:
  any: {}
  none: {scope_keys: []}
  seats: {scope_keys: [seats]}
  regions: {scope_keys: [region]}
  again: {repeatable: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	s := setup(t, func(c *store.Config) { c.Catalog = catalog })

	// Each has the scope seats=10.
	want(t, s.Store, grant("acme", "k-any", "INV-A", "any"), newly)
	want(t, s.Store, grant("acme", "k-seats", "INV-A", "seats"), newly)
	wantRejected(t, s.Store, grant("acme", "k-none", "INV-A", "none"), pb.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY)
	wantRejected(t, s.Store, grant("acme", "k-regions", "INV-A", "regions"), pb.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY)
	wantRejected(t, s.Store, grant("acme", "k-other", "INV-A", "other"), pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE)

	bare := grant("acme", "k-none", "INV-A", "none")
	bare.Grant.Scope = nil
	want(t, s.Store, bare, newly)

	second := grant("acme", "k-any-1", "INV-A", "any")
	second.Grant.OperationVersion = 1
	wantRejected(t, s.Store, second, pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE)
	second = grant("acme", "k-again-1", "INV-A", "again")
	second.Grant.OperationVersion = 1
	want(t, s.Store, second, newly)
}

func TestParseCatalog_Example(t *testing.T) {
	const name = "../docs/catalog.example.yaml"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := store.ParseCatalog(name, text)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]store.CatalogType{
		"team_access": {Description: "Seats in a team", ScopeKeys: []string{"seats", "region"}, DefaultValidity: 365 * 24 * time.Hour},
		"api_credits": {Description: "Prepaid calls, counted by the grant's quantity", Repeatable: true, ScopeKeys: []string{}},

		"beta_features": {},
	}
	if d := cmp.Diff(want, c.Types); d != "" {
		t.Errorf("want -, got +:\n%s", d)
	}
}

// FuzzParseCatalog: any text is a catalogue that keeps the rules, or an error of which every line names the file.
func FuzzParseCatalog(f *testing.F) {
	for _, text := range []string{
		"", "types: {a: {}}", "types:\n  a:\n    description: x\n    repeatable: true\n    scope_keys: [x]\n    default_validity: 365d\n",
		"types: {a: {default_validity: 1h}}\n---\n", "types: {a: &a {}, b: *a}", "types: {? [a] : {}}", "types: {<<: {}}", "\xff\xfet\x00", "a: \x01",
		"types: {a: {scope_keys: [1, A, \"\"]}}", "%YAML 9.9\n---\n", "types: {\"a\\nb\": {}}", "{\"a\\nb\": 1}", "types: {!!str a: !!map {}}",
	} {
		f.Add([]byte(text))
	}
	typeName := regexp.MustCompile(`^[!-~]{1,128}$`)
	scopeKey := regexp.MustCompile(`^[a-z][a-z0-9_.]{0,62}$`)
	located := regexp.MustCompile(`^c\.yaml:[0-9]+: .`)
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := store.ParseCatalog("c.yaml", text)
		if err != nil {
			lines := strings.Split(err.Error(), "\n")
			for i, line := range lines {
				if !located.MatchString(line) && (i != 20 || !strings.HasPrefix(line, "c.yaml: and ")) {
					t.Errorf("line %d of the error names no file and line: %q", i+1, line)
				}
			}
			return
		}
		if len(c.Types) == 0 {
			t.Error("a catalogue without types")
		}
		for name, typ := range c.Types {
			if !typeName.MatchString(name) {
				t.Errorf("type %q", name)
			}
			for _, k := range typ.ScopeKeys {
				if !scopeKey.MatchString(k) {
					t.Errorf("type %q has the scope key %q", name, k)
				}
			}
			if typ.DefaultValidity < 0 || typ.DefaultValidity%time.Microsecond != 0 {
				t.Errorf("type %q is valid for %v", name, typ.DefaultValidity)
			}
		}
	})
}
