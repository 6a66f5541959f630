package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/grantd/grantd/store"
)

// A body is made with its entry or, where that was not possible, by the first claim; then it is that for ever, whatever a newer build on
// another replica would make of the event.
func TestRender_OnceForAllBuilds(t *testing.T) {
	old := func(*store.Delivery) ([]byte, string, error) {
		return []byte(strings.Repeat("old", 40_000)), "text/old", nil
	}
	for name, render := range map[string]store.Renderer{
		"made with the entry": old,
		"panics":              func(*store.Delivery) ([]byte, string, error) { panic("a bug") },
		"fails":               func(*store.Delivery) ([]byte, string, error) { return []byte("half"), "text/half", errors.New("a bug") },
		"makes nothing":       func(*store.Delivery) ([]byte, string, error) { return nil, "text/nothing", nil },
		"makes an empty one":  func(*store.Delivery) ([]byte, string, error) { return []byte{}, "text/nothing", nil },
		"does not":            nil,
	} {
		t.Run(name, func(t *testing.T) {
			made := store.Destination{Name: "crm", Deduplicates: true, Render: render}
			b := setup(t, to(made))
			newer := store.Destination{Name: "crm", Deduplicates: true, Render: body}
			other := open(t, b.url, to(newer))
			want(t, b.Store, grant("t", "k", "i", "x"), newly)
			d, err := b.Claim(t.Context(), "crm", "w", leaseTime, 1, old)
			if err != nil || len(d) != 1 || !bytes.HasPrefix(d[0].Body, []byte("oldold")) || d[0].ContentType != "text/old" || d[0].BodyBytes != 120_000 {
				t.Fatal(d, err)
			}
			leaseOut(t, b)
			again := claimOne(t, other, "crm")
			settle(t, other, store.Dead, again)
			if a, err := other.Redeliver(t.Context(), order(again)); err != nil || a.Outcome != newly {
				t.Fatal(a, err)
			}
			last := claimOne(t, other, "crm")
			for _, d := range []*store.Delivery{again, last} {
				if !bytes.HasPrefix(d.Body, []byte("oldold")) || d.ContentType != "text/old" || d.BodyBytes != 120_000 || d.Key != again.Key {
					t.Errorf("attempt %d has %d bytes of %s", d.Attempts, len(d.Body), d.ContentType)
				}
			}
			settle(t, other, store.Delivered, last)
			if now := wantState(t, b.Store, last, delivered); now.BodyBytes != 120_000 || now.ContentType != "text/old" {
				t.Errorf("it is %+v", now)
			}
		})
	}
}

// A refund takes back more entitlements than have their bodies made with their entries: each gets its event, in its turn, and is told from
// the others by its key.
func TestRender_ManyEntriesOfOneCommand(t *testing.T) {
	name := func(d *store.Delivery) ([]byte, string, error) {
		return fmt.Appendf(nil, "%s %s %d %v", d.Key, d.Event.Entitlement.Grant.EntitlementType, d.Event.Entry.Number, d.Event.Entitlement.State), "text/plain", nil
	}
	made := store.Destination{Name: "crm", Deduplicates: true, Render: name}
	for _, many := range []int{100, 101} {
		b := setup(t, to(made))
		var commands []store.Command
		for n := range many {
			commands = append(commands, *grant("t", fmt.Sprint("k", n), "i", fmt.Sprint("x", n)))
		}
		if _, err := b.ApplyAll(t.Context(), commands, nil); err != nil {
			t.Fatal(err)
		}
		want(t, b.Store, record("t", "refund", "i", refunded, 2), newly)
		if n, with := value[int](t, b.sql, `SELECT count(*) FROM deliveries WHERE entry_number = 2 AND body IS NOT NULL`), many == 100; (n == many) != with || (n == 0) == with {
			t.Errorf("of %d, %d have their bodies", many, n)
		}
		bodies := map[string]bool{}
		for {
			all, err := b.Claim(t.Context(), "crm", "w", leaseTime, 64, name)
			if err != nil {
				t.Fatal(err)
			}
			if len(all) == 0 {
				break
			}
			for _, d := range all {
				if !bytes.HasPrefix(d.Body, []byte(d.Key)) || !bytes.Contains(d.Body, fmt.Appendf(nil, " %d ", d.Event.Entry.Number)) {
					t.Errorf("the body of %s is %q", d.Key, d.Body)
				}
				bodies[string(d.Body)] = true
			}
			settle(t, b.Store, store.Delivered, all...)
		}
		if len(bodies) != 2*many {
			t.Errorf("%d different bodies of %d entries", len(bodies), 2*many)
		}
	}
}
