package store_test

import (
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

var catalog = &store.Catalog{Types: map[string]store.CatalogType{
	"team_access": {ScopeKeys: []string{"region", "seats"}, DefaultValidity: 30 * 24 * time.Hour},
	"credits":     {Repeatable: true},
	"badge":       {ScopeKeys: []string{}},
}}

func withCatalog(c *store.Config) { c.Catalog = catalog }

func TestCatalog_RefusesNewGrants(t *testing.T) {
	b := setup(t, withCatalog)
	change := func(key, typ string, f func(*store.Grant)) *store.Command {
		c := grant("t", key, key, typ)
		f(&c.Grant)
		return c
	}
	same := func(*store.Grant) {}
	for _, c := range []struct {
		name    string
		command *store.Command
		reason  pb.RejectionReason // 0 for a grant
		message string
	}{
		{"known type and key", change("1", "team_access", same), 0, ""},
		{"no scope", change("2", "badge", func(g *store.Grant) { g.Scope = nil }), 0, ""},
		{"any key where none is listed", change("3", "credits", func(g *store.Grant) { g.Scope = map[string]string{"any": "1"} }), 0, ""},
		{"repeated", change("4", "credits", func(g *store.Grant) { g.OperationVersion = 7 }), 0, ""},
		{"unknown type", change("5", "Team_access", same), pb.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE,
			`the catalogue has no entitlement type "Team_access"`},
		{"unknown key", change("6", "team_access", func(g *store.Grant) { g.Scope = map[string]string{"seats": "1", "zone": "eu"} }),
			pb.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY, `the catalogue does not allow the scope key "zone" for "team_access"`},
		{"a key where none is allowed", change("7", "badge", same), pb.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY,
			`the catalogue does not allow the scope key "seats" for "badge"`},
		{"not repeatable", change("8", "team_access", func(g *store.Grant) { g.OperationVersion = 1 }),
			pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE, `"team_access" is not repeatable, so its operation_version must be 0`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.reason == 0 {
				want(t, b.Store, c.command, newly)
				return
			}
			a := wantRejected(t, b.Store, c.command, c.reason)
			if a.Rejection.Message != c.message || a.Rejection.Retry != pb.RetryAdvice_RETRY_ADVICE_AFTER_STATE_CHANGE {
				t.Errorf("got %+v, want %q and AFTER_STATE_CHANGE", a.Rejection, c.message)
			}
			if value[bool](t, b.sql, `SELECT EXISTS (SELECT FROM invoices WHERE invoice_id = $1)`, c.command.Grant.InvoiceID) {
				t.Error("a refused grant has left its invoice")
			}
		})
	}
}

func TestCatalog_WithoutOneEveryTypeIsAcceptedAndNoneRepeatable(t *testing.T) {
	b := setup(t)
	want(t, b.Store, grant("t", "a", "i", "anything"), newly)
	c := grant("t", "b", "i", "anything")
	c.Grant.OperationVersion = 1
	wantRejected(t, b.Store, c, pb.RejectionReason_REJECTION_REASON_NOT_REPEATABLE)
}

// An edited catalogue never changes a replay's answer.
func TestCatalog_EditedLeavesReplaysAlone(t *testing.T) {
	b := setup(t, withCatalog)
	first := want(t, b.Store, grant("t", "a", "i", "team_access"), newly)
	edited := open(t, b.url, func(c *store.Config) { c.Catalog = &store.Catalog{Types: map[string]store.CatalogType{}} })
	replay := want(t, edited, grant("t", "a", "i", "team_access"), already)
	if replay.Entitlement.EndsAt == nil || !replay.Entitlement.EndsAt.Equal(*first.Entitlement.EndsAt) {
		t.Errorf("the end moved from %v to %v", first.Entitlement.EndsAt, replay.Entitlement.EndsAt)
	}
	if a := want(t, edited, grant("t", "b", "i", "team_access"), already); a.MatchedBy != byBusinessKey {
		t.Errorf("matched by %v", a.MatchedBy)
	}
	other := grant("t", "a", "i", "team_access")
	other.Grant.Scope = nil
	want(t, edited, other, conflict)
}

func TestCatalog_DefaultValidity(t *testing.T) {
	b := setup(t, withCatalog)
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	const month = 30 * 24 * time.Hour
	for _, c := range []struct {
		name, typ        string
		starts, expires  *time.Time
		want             *time.Time
		afterTheGrantFor time.Duration
	}{
		{name: "counted from the grant", typ: "team_access", afterTheGrantFor: month},
		{name: "counted from the start", typ: "team_access", starts: &noon, want: pointer(noon.Add(month))},
		{name: "not where the grant says when", typ: "team_access", expires: &noon, want: &noon},
		{name: "none for the type", typ: "credits"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := grant("t", c.name, c.name, c.typ)
			g.Grant.StartsAt, g.Grant.ExpiresAt = c.starts, c.expires
			a := want(t, b.Store, g, newly)
			end := c.want
			if c.afterTheGrantFor != 0 {
				end = pointer(a.Entitlement.GrantedAt.Add(c.afterTheGrantFor))
			}
			for what, got := range map[string]*time.Time{
				"the answer": a.Entitlement.EndsAt, "a replay": want(t, b.Store, g, already).Entitlement.EndsAt,
				"the row": value[*time.Time](t, b.sql, `SELECT ends_at FROM entitlements WHERE invoice_id = $1`, c.name),
			} {
				if (got == nil) != (end == nil) || got != nil && !got.Equal(*end) {
					t.Errorf("%s says %v, want %v", what, got, end)
				}
			}
		})
	}
}
