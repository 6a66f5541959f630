package acceptance_test

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"testing"
)

// Retention runs between any two calls, on its own schedule. Whatever it takes, and whenever, no answer comes to mean something else:
// what was applied stays applied, what was a conflict stays one, and nothing has a second effect. Only the guard that says so may
// change, from the key to the effect.
//
// The walk keeps to what the contract promises: the purged alias of a reversal, reinstatement or recording is a new key, and so is that
// of a grant for another effect. It does not send those again.
func TestRetention_BetweenAnyTwoCalls(t *testing.T) {
	t.Parallel()
	b := setup(t)
	brief := b.keepsAliasesForAnHour(t)
	walks, steps := 6, 60
	if soak {
		walks = 500
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	guard := regexp.MustCompile(` by (IDEMPOTENCY|BUSINESS)_KEY`)
	var sent []ledgerCall
	for walk := range walks {
		random := rand.New(rand.NewPCG(seed, uint64(walk)))
		tenant := fmt.Sprint("t", walk)
		sent = sent[:0]
		// What a service would say that purges nothing, and what this one has to say, to the letter.
		keeps, purges := newLedgerModel(), newLedgerModel()
		for step := range steps {
			c := nextOfWalk(random, keeps, step)
			sent = append(sent, c)
			want := purges.apply(c)
			if kept := keeps.apply(c); guard.ReplaceAllString(kept, "") != guard.ReplaceAllString(want, "") {
				t.Fatalf("walk %d: %v means %q, and %q once aliases are purged", walk, c, kept, want)
			}
			got, err := b.send(t.Context(), tenant, c)
			if err != nil || got != want {
				t.Fatalf("walk %d, call %d: %v:\ngot  %s, %v\nwant %s\nafter %v", walk, step, c, got, err, want, sent)
			}
			switch random.IntN(12) {
			case 0:
				b.purgeAliases(t, brief)
				purges.purgeAliases()
			case 1:
				b.purgeAttempts(t)
			case 2:
				b.purgeAttempts(t)
				b.purgeAliases(t, brief)
				purges.purgeAliases()
			}
		}
	}
	b.wantOrdered(t)
}

// nextOfWalk draws a call that the contract covers.
func nextOfWalk(random *rand.Rand, keeps ledgerModel, step int) ledgerCall {
	for {
		c := randomCall(random, 20)
		if random.IntN(2) == 0 {
			c.key = fmt.Sprint("new", step)
		}
		op, known := keeps.operations[c.key]
		if !known || op.owner == c.key {
			return c
		}
		switch c.method {
		case callGrant, callLookGrant:
			if op.kind == opGrant && op.call.effect == c.effect {
				return c
			}
		case callLookEffect, callRead, callCheck:
			return c
		}
	}
}
