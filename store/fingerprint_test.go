package store

import (
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

func ptr[T any](v T) *T { return &v }

// sameGrant compares field by field, as a reader of the contract would: absent and empty scopes are the same, unset is no
// number, times are instants.
func sameGrant(a, b *Grant) bool {
	sameNumber := func(a, b *int64) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }
	sameTime := func(a, b *time.Time) bool { return (a == nil) == (b == nil) && (a == nil || a.Equal(*b)) }
	return a.TenantID == b.TenantID && a.InvoiceID == b.InvoiceID && a.EntitlementType == b.EntitlementType &&
		a.OperationVersion == b.OperationVersion && maps.Equal(a.Scope, b.Scope) && sameNumber(a.Quantity, b.Quantity) &&
		sameTime(a.StartsAt, b.StartsAt) && sameTime(a.ExpiresAt, b.ExpiresAt)
}

// checkFingerprints holds two grants against each other: their fingerprints are equal, and no difference is named, exactly
// when they are the same.
func checkFingerprints(t *testing.T, a, b *Grant) {
	t.Helper()
	same := sameGrant(a, b)
	if got := a.Fingerprint() == b.Fingerprint(); got != same {
		t.Errorf("fingerprints equal: %v, grants equal: %v\n%+v\n%+v", got, same, a, b)
	}
	d := between(a, b)
	if (len(d) == 0) != same {
		t.Errorf("%d differences, grants equal: %v\n%+v\n%+v", len(d), same, a, b)
	}
	if !slices.IsSortedFunc(d, func(x, y Difference) int { return strings.Compare(x.Field, y.Field) }) {
		t.Errorf("the differences are not in order: %v", d)
	}
	back := between(b, a)
	if len(back) != len(d) {
		t.Errorf("%d differences one way, %d the other", len(d), len(back))
	}
}

func TestFingerprint_EqualExactlyWhenGrantsAre(t *testing.T) {
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	base := func(change func(*Grant)) *Grant {
		g := &Grant{TenantID: "acme", InvoiceID: "INV-A", EntitlementType: "team_access"}
		change(g)
		return g
	}
	names := func(tenant, invoice, typ string) *Grant {
		return &Grant{TenantID: tenant, InvoiceID: invoice, EntitlementType: typ}
	}
	scope := func(pairs ...string) *Grant {
		return base(func(g *Grant) {
			g.Scope = map[string]string{}
			for i := 0; i < len(pairs); i += 2 {
				g.Scope[pairs[i]] = pairs[i+1]
			}
		})
	}
	quantity := func(n int64) *Grant { return base(func(g *Grant) { g.Quantity = &n }) }

	for name, pair := range map[string][2]*Grant{
		"absent and empty scope":              {base(func(*Grant) {}), scope()},
		"scope in another order":              {scope("a", "1", "b", "2"), scope("b", "2", "a", "1")},
		"separator |":                         {names("a|b", "c", "d"), names("a", "b|c", "d")},
		"separator :":                         {names("a:b", "c", "d"), names("a", "b:c", "d")},
		"separator /":                         {names("a", "b/c", "d"), names("a", "b", "c/d")},
		"separator NUL":                       {names("a\x00b", "c", "d"), names("a", "b\x00c", "d")},
		"one name empty":                      {names("ab", "", "d"), names("a", "b", "d")},
		"case":                                {names("a", "INV-a", "d"), names("a", "inv-A", "d")},
		"composed and decomposed":             {names("a", "\u00e9", "d"), names("a", "e\u0301", "d")},
		"look-alike letters":                  {names("a", "\u00c5", "d"), names("a", "\u212b", "d")},
		"scope key and value":                 {scope("ab", "c"), scope("a", "bc")},
		"scope entries joined":                {scope("a", "1", "b", "2"), scope("a", "1b2")},
		"scope value that looks like a field": {scope("a", "1\x05\x01b\x012"), scope("a", "1", "b", "2")},
		"scope value empty":                   {scope("a", ""), scope()},
		"quantity unset and 0":                {base(func(*Grant) {}), quantity(0)},
		"quantity unset and 1":                {base(func(*Grant) {}), quantity(1)},
		"quantity past 2^53":                  {quantity(9007199254740993), quantity(9007199254740992)},
		"quantity and operation version":      {quantity(1), base(func(g *Grant) { g.OperationVersion = 1 })},
		"start and expiry":                    {base(func(g *Grant) { g.StartsAt = &noon }), base(func(g *Grant) { g.ExpiresAt = &noon })},
		"times a microsecond apart": {
			base(func(g *Grant) { g.StartsAt = &noon }), base(func(g *Grant) { g.StartsAt = ptr(noon.Add(time.Microsecond)) })},
		"the same instant elsewhere": {
			base(func(g *Grant) { g.StartsAt = &noon }),
			base(func(g *Grant) { g.StartsAt = ptr(noon.In(time.FixedZone("CET", 3600))) })},
		"unset and 1970": {base(func(*Grant) {}), base(func(g *Grant) { g.ExpiresAt = ptr(time.Unix(0, 0)) })},
	} {
		t.Run(name, func(t *testing.T) {
			checkFingerprints(t, pair[0], pair[1])
		})
	}
}

func TestFingerprint_QuantityPast2To53IsNamedExactly(t *testing.T) {
	stored, submitted := &Grant{Quantity: ptr(int64(9007199254740993))}, &Grant{Quantity: ptr(int64(9007199254740992))}
	d := between(stored, submitted)
	if len(d) != 1 || d[0].Field != "quantity" || *d[0].Stored != "9007199254740993" || *d[0].Submitted != "9007199254740992" {
		t.Errorf("got %+v", d)
	}
}

func TestBetween_NamesEveryDifferenceInOrder(t *testing.T) {
	noon := time.Date(2026, 1, 1, 12, 0, 0, 1000, time.UTC)
	stored := &Grant{
		TenantID: "t", InvoiceID: "i", EntitlementType: "x", OperationVersion: 1,
		Scope: map[string]string{"seats": "10", "gone": "1", "same": "s"}, Quantity: ptr(int64(2)), StartsAt: &noon,
	}
	submitted := &Grant{
		TenantID: "t2", InvoiceID: "i2", EntitlementType: "x2", OperationVersion: 2,
		Scope: map[string]string{"seats": "20", "fresh": "1", "same": "s"}, ExpiresAt: &noon,
	}
	shown := func(s *string) string {
		if s == nil {
			return "-"
		}
		return *s
	}
	var got []string
	for _, d := range between(stored, submitted) {
		got = append(got, d.Field+" "+shown(d.Stored)+" "+shown(d.Submitted))
	}
	want := []string{
		"entitlement_type x x2", "expires_at - 2026-01-01T12:00:00.000001Z", "invoice_id i i2", "operation_version 1 2", "quantity 2 -",
		"scope.fresh - 1", "scope.gone 1 -", "scope.seats 10 20", "starts_at 2026-01-01T12:00:00.000001Z -", "tenant_id t t2",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// A recipe, once released, never changes: rows that were stored under it could no longer be compared. The sums were computed from the
// recipe's description, not by this code.
func TestFingerprint_Recipe1IsPinned(t *testing.T) {
	for _, c := range []struct {
		grant Grant
		sum   string
	}{
		{Grant{TenantID: "acme", InvoiceID: "INV-A", EntitlementType: "team_access"}, "126d27dec075b5161d32773bc7f37aa500fc090fdb74da29d034955ef170551e"},
		{Grant{
			TenantID: "acme", InvoiceID: "INV-A", EntitlementType: "team_access", OperationVersion: 3,
			Scope: map[string]string{"seats": "10", "region": "eu"}, Quantity: ptr(int64(9007199254740993)),
			StartsAt: ptr(time.UnixMicro(1767225600000001)), ExpiresAt: ptr(time.UnixMicro(1798761600000000)),
		}, "82ba0b2ba19fc63cb44dcfdab1ceebdcfa542be81dec781b445474a810751a78"},
		{Grant{
			TenantID: "a|b", InvoiceID: "c", EntitlementType: "d", Scope: map[string]string{"note": strings.Repeat("\u00e9", 100)},
			ExpiresAt: ptr(time.UnixMicro(-1)),
		}, "864c42a8bdc619461121a25b9892c9ff09b25cbac44f371372bba358da584e3c"},
	} {
		sum := c.grant.Fingerprint()
		if got := hex.EncodeToString(sum[:]); got != c.sum {
			t.Errorf("%+v: got %s, want %s", c.grant, got, c.sum)
		}
		under, known := c.grant.fingerprintUnder(1)
		if !known || under != sum {
			t.Errorf("%+v: recipe 1 is not the one that new grants are stored under", c.grant)
		}
	}
	if _, known := new(Grant).fingerprintUnder(2); known {
		t.Error("a recipe of a newer build is taken for known")
	}
}

// Two grants, of which the second takes each field from the first where its bit of shared is set: so that equal ones, and ones that
// differ in a single field, are common.
func FuzzFingerprint(f *testing.F) {
	f.Add("a|b", "c", "d", int64(0), "k", "v", "l", "w", int64(1), int64(0), int64(1), byte(0xff),
		"a", "b|c", "d", int64(0), "l", "w", "k", "v", int64(2), int64(0), int64(1), byte(0xff), uint16(0))
	f.Add("a", "b", "c", int64(0), "ab", "c", "a", "bc", int64(9007199254740993), int64(5), int64(6), byte(3),
		"a", "b", "c", int64(0), "a", "bc", "ab", "c", int64(9007199254740992), int64(6), int64(5), byte(3), uint16(0xffff))
	f.Add("", "", "", int64(-1), "", "", "", "", int64(0), int64(-1), int64(0), byte(0),
		"", "", "", int64(1), "", "\x05", "", "", int64(0), int64(-1), int64(0), byte(8), uint16(0xfff))
	f.Fuzz(func(t *testing.T,
		tenant1, invoice1, type1 string, version1 int64, ka1, va1, kb1, vb1 string, quantity1, start1, end1 int64, present1 byte,
		tenant2, invoice2, type2 string, version2 int64, ka2, va2, kb2, vb2 string, quantity2, start2, end2 int64, present2 byte,
		shared uint16,
	) {
		bit := 0
		takes := func() bool { bit++; return shared>>(bit-1)&1 == 1 }
		if takes() {
			tenant2 = tenant1
		}
		if takes() {
			invoice2 = invoice1
		}
		if takes() {
			type2 = type1
		}
		if takes() {
			version2 = version1
		}
		if takes() { // in the other order
			ka2, va2, kb2, vb2 = kb1, vb1, ka1, va1
		}
		if takes() {
			quantity2 = quantity1
		}
		if takes() {
			start2, end2 = start1, end1
		}
		if takes() {
			present2 = present1
		}
		first := fuzzedGrant(tenant1, invoice1, type1, version1, ka1, va1, kb1, vb1, quantity1, start1, end1, present1)
		second := fuzzedGrant(tenant2, invoice2, type2, version2, ka2, va2, kb2, vb2, quantity2, start2, end2, present2)
		checkFingerprints(t, first, second)
		checkFingerprints(t, first, first)
	})
}

func fuzzedGrant(tenant, invoice, typ string, version int64, ka, va, kb, vb string, quantity, start, end int64, present byte) *Grant {
	g := &Grant{TenantID: tenant, InvoiceID: invoice, EntitlementType: typ, OperationVersion: version}
	if present&1 != 0 {
		g.Scope = map[string]string{ka: va}
		if present&2 != 0 && ka != kb {
			g.Scope[kb] = vb
		}
	} else if present&2 != 0 {
		g.Scope = map[string]string{}
	}
	if present&4 != 0 {
		g.Quantity = &quantity
	}
	// The years 0001 to 9999, which are all that a request can carry.
	const first, last = -62135596800_000_000, 253402300799_999_999
	instant := func(n int64) *time.Time {
		n %= last - first
		if n < 0 {
			n += last - first
		}
		return ptr(time.UnixMicro(first + n))
	}
	if present&8 != 0 {
		g.StartsAt = instant(start)
	}
	if present&16 != 0 {
		g.ExpiresAt = instant(end)
	}
	return g
}
