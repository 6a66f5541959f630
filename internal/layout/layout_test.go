// Package layout holds the direction of imports: which package of this module
// may import which, and which libraries a package must not know.
//
// It is a plain test rather than a linter with a configuration of its own: it
// runs wherever `go test ./...` runs, costs a parse of the import clauses, and
// can say what no import linter can, that store uses gen for its enums only. It
// parses files instead of asking `go list`, because go test's cache follows the
// files a test opens, not those that a child process does.
package layout_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	module = "github.com/grantd/grantd"
	root   = "../.."
)

// layer is a folder of the module, with those below it, and what its code may
// import. Tests may import anything: they are not part of what ships.
type layer struct {
	dir string
	// may lists folders of this module; a package may always import its own layer.
	may []string
	// never lists import path prefixes outside the module.
	never []string
}

var layers = []layer{
	{dir: "gen"},
	{dir: "migrations"},
	{dir: "telemetry"},
	{dir: "internal/strictyaml"},
	{dir: "store", may: []string{"gen", "migrations", "internal/strictyaml"}, never: []string{
		"net/http",
		"google.golang.org/grpc",
		"google.golang.org/genproto",
		"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc",
		"go.opentelemetry.io/contrib/instrumentation/net/http",
	}},
	{dir: "server", may: []string{"store", "gen", "telemetry"}},
	{dir: "outbox", may: []string{"store", "gen", "telemetry", "internal/strictyaml"}},
	{dir: "client", may: []string{"gen"}},
	{dir: "internal", may: []string{"migrations"}},
	{dir: "cmd", may: []string{"server", "outbox", "store", "gen", "telemetry", "client", "migrations", "internal"}},
}

// within reports whether the slash-separated name is dir or lies below it.
func within(name, dir string) bool {
	return name == dir || strings.HasPrefix(name, dir+"/")
}

// violation says why the package in folder dir must not import the given path,
// or returns "".
func violation(dir, imported string) string {
	i := slices.IndexFunc(layers, func(l layer) bool { return within(dir, l.dir) })
	if i < 0 {
		return "has no layer: add its folder to the table in internal/layout"
	}
	l := layers[i]
	if target, inModule := strings.CutPrefix(imported, module+"/"); inModule {
		allowed := append([]string{l.dir}, l.may...)
		if !slices.ContainsFunc(allowed, func(a string) bool { return within(target, a) }) {
			return fmt.Sprintf("imports %s; %s may import only %v of this module", target, l.dir, allowed)
		}
		return ""
	}
	for _, prefix := range l.never {
		if within(imported, prefix) {
			return fmt.Sprintf("imports %s, which %s must not know", imported, l.dir)
		}
	}
	return ""
}

func TestViolation(t *testing.T) {
	for _, tc := range []struct {
		dir, imported string
		allowed       bool
	}{
		{"cmd/grantd", module + "/server", true},
		{"server", module + "/store", true},
		{"store", module + "/gen/entitlement/v1", true},
		{"store", "github.com/jackc/pgx/v5", true},
		{"internal/pgdev", module + "/internal/other", true},
		{"store", module + "/server", false},
		{"store", module + "/telemetry", false},
		{"store", "google.golang.org/grpc/codes", false},
		{"store", "net/http", false},
		{"client", module + "/store", false},
		{"outbox", module + "/server", false},
		{"gen/entitlement/v1", module + "/store", false},
		{"storefront", "fmt", false},
	} {
		if got := violation(tc.dir, tc.imported); (got == "") != tc.allowed {
			t.Errorf("violation(%q, %q) = %q, want allowed %t", tc.dir, tc.imported, got, tc.allowed)
		}
	}
}

func TestImportsPointOneWay(t *testing.T) {
	seen := 0
	for _, name := range goFiles(t, ".") {
		file := parse(t, name, parser.ImportsOnly)
		for _, spec := range file.Imports {
			seen++
			if why := violation(path.Dir(name), importPath(t, spec)); why != "" {
				t.Errorf("%s %s", name, why)
			}
		}
	}
	if seen == 0 {
		t.Error("no import found: the walk looks in the wrong place")
	}
}

// store's own structs are the rows. A proto message inside it would be a second
// representation of a row, and a change of the contract would reach the SQL.
func TestStoreUsesEnumsOnly(t *testing.T) {
	enums := enumNames(t)
	for _, name := range goFiles(t, "store") {
		for _, use := range otherThanEnums(t, parse(t, name, 0), enums) {
			t.Errorf("%s uses %s of gen, which is no enum", name, use)
		}
	}
}

func TestOtherThanEnums(t *testing.T) {
	const src = `package store
import pb "` + module + `/gen/entitlement/v1"
var a pb.Outcome = pb.Outcome_OUTCOME_NEWLY_APPLIED
var b = pb.Outcome_name[1]
var c *pb.Grant
`
	file, err := parser.ParseFile(token.NewFileSet(), "store/x.go", src, 0)
	if err != nil {
		t.Fatal(err)
	}
	got := otherThanEnums(t, file, enumNames(t))
	if want := []string{"pb.Grant"}; !slices.Equal(got, want) {
		t.Errorf("otherThanEnums = %v, want %v", got, want)
	}
}

// otherThanEnums lists what file uses of gen's packages that is not in enums.
func otherThanEnums(t *testing.T, file *ast.File, enums map[string]bool) []string {
	t.Helper()
	genNames := map[string]bool{}
	for _, spec := range file.Imports {
		imported, inModule := strings.CutPrefix(importPath(t, spec), module+"/")
		if !inModule || !within(imported, "gen") {
			continue
		}
		if spec.Name != nil {
			genNames[spec.Name.Name] = true
		} else {
			for _, name := range goFiles(t, imported) {
				genNames[parse(t, name, parser.PackageClauseOnly).Name.Name] = true
			}
		}
	}
	var others []string
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := selector.X.(*ast.Ident); ok && genNames[x.Name] && !enums[selector.Sel.Name] {
			others = append(others, x.Name+"."+selector.Sel.Name)
		}
		return true
	})
	return others
}

// enumNames returns the names that protoc-gen-go declares for enums: the types,
// their values, and the maps between numbers and names.
func enumNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, name := range goFiles(t, "gen") {
		for _, decl := range parse(t, name, 0).Decls {
			general, ok := decl.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range general.Specs {
				typeSpec, ok := spec.(*ast.TypeSpec)
				if !ok {
					continue
				}
				if underlying, ok := typeSpec.Type.(*ast.Ident); ok && underlying.Name == "int32" {
					names[typeSpec.Name.Name] = true
					names[typeSpec.Name.Name+"_name"] = true
					names[typeSpec.Name.Name+"_value"] = true
				}
			}
			if general.Tok != token.CONST {
				continue
			}
			for _, spec := range general.Specs {
				value := spec.(*ast.ValueSpec)
				if enum, ok := value.Type.(*ast.Ident); ok && names[enum.Name] {
					names[value.Names[0].Name] = true
				}
			}
		}
	}
	if len(names) == 0 {
		t.Fatal("no enum found in gen/")
	}
	return names
}

// goFiles lists the files below dir that are compiled into a build, as
// slash-separated names from the top of the module.
func goFiles(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(filepath.Join(root, dir), func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			base := entry.Name()
			if rel != "." && (strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") || base == "testdata" || isModule(name)) {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			names = append(names, filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

func parse(t *testing.T, name string, mode parser.Mode) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, mode)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func importPath(t *testing.T, spec *ast.ImportSpec) string {
	t.Helper()
	imported, err := strconv.Unquote(spec.Path.Value)
	if err != nil {
		t.Fatal(err)
	}
	return imported
}
