package client_test

import (
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

func TestKey(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"billing", "grant", "INV-A", "team_access"}, "billing:grant:INV-A:team_access"},
		{[]string{"billing", "refund", "INV-A"}, "billing:refund:INV-A"},
		{[]string{"b", "g", "a:b", "c"}, "b:g:a~3Ab:c"},
		{[]string{"b", "g", "a", "b:c"}, "b:g:a:b~3Ac"},
		{[]string{"b", "g", "a~3Ab", "c"}, "b:g:a~7E3Ab:c"},
		{[]string{"b", "g", "INV#1%/2"}, "b:g:INV~231~25/2"},
		{[]string{"b", "g", "Å"}, "b:g:~C3~85"},
		{[]string{"b", "g", "A\u030a"}, "b:g:A~CC~8A"},
		{[]string{"b", "g", strings.Repeat("x", 196)}, "b:g:" + strings.Repeat("x", 196)},
		{[]string{"b", "g", strings.Repeat("x", 197)}, ""},
		{[]string{"b", "g", strings.Repeat(":", 66)}, ""},
		{[]string{"b", "g"}, ""},
		{[]string{"b", "g", ""}, ""},
		{[]string{"b", "g", "a", ""}, ""},
		{[]string{"", "g", "a"}, ""},
		{[]string{"b", "", "a"}, ""},
	} {
		got, err := client.Key(tc.args[0], tc.args[1], tc.args[2:]...)
		if got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("Key(%q) = %q, %v, want %q", tc.args, got, err, tc.want)
		}
	}
}

func TestGrantKey(t *testing.T) {
	grant := &entitlementv1.Grant{TenantId: "acme", InvoiceId: "INV-A", EntitlementType: "team_access"}
	for version, want := range map[int64]string{
		0: "billing:grant:INV-A:team_access",
		7: "billing:grant:INV-A:team_access:7",
	} {
		grant.OperationVersion = version
		if got, err := client.GrantKey("billing", grant); got != want || err != nil {
			t.Errorf("version %d: %q, %v, want %q", version, got, err, want)
		}
	}
	// An entitlement type that looks like a type with a version.
	grant.EntitlementType, grant.OperationVersion = "team_access:7", 0
	if got, err := client.GrantKey("billing", grant); got != "billing:grant:INV-A:team_access~3A7" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := client.GrantKey("billing", nil); err == nil {
		t.Errorf("a grant that is missing got the key %q", got)
	}
}

// FuzzKey reads the arguments back from the key, which shows that no two lists of arguments share one.
func FuzzKey(f *testing.F) {
	f.Add("billing", "grant", "INV-A", "team_access")
	f.Add("b", "g", "a:b", "c~3A")
	f.Add("b", "g", "\xff", "Å")
	valid := regexp.MustCompile(`^[A-Za-z0-9._:/~@+=-]{1,200}$`)
	f.Fuzz(func(t *testing.T, producer, operation, first, second string) {
		for _, parts := range [][]string{{first}, {first, second}} {
			key, err := client.Key(producer, operation, parts...)
			if err != nil {
				continue
			}
			if !valid.MatchString(key) {
				t.Fatalf("%q is not a key", key)
			}
			var got []string
			for part := range strings.SplitSeq(key, ":") {
				got = append(got, unescape(t, part))
			}
			if want := append([]string{producer, operation}, parts...); !slices.Equal(got, want) {
				t.Errorf("key %q reads back as %q, want %q", key, got, want)
			}
		}
	})
}

func unescape(t *testing.T, part string) string {
	t.Helper()
	pieces := strings.Split(part, "~")
	for i, piece := range pieces[1:] {
		char, err := hex.DecodeString(piece[:2])
		if err != nil {
			t.Fatal(err)
		}
		pieces[i+1] = string(char) + piece[2:]
	}
	return strings.Join(pieces, "")
}
