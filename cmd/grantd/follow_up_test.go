package main

import (
	"bytes"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// runPrinted has a shell read the one command of a kind that a text has, and runs it. A person has filled in what only they know.
func runPrinted(t *testing.T, text, kind, finding string) (string, error) {
	t.Helper()
	var found []string
	for _, command := range printedCommand.FindAllString(text, -1) {
		if strings.HasPrefix(strings.TrimSpace(command), "grantd "+kind+" ") {
			found = append(found, command)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d commands of %q, want 1:\n%s", len(found), kind, text)
	}
	filled := strings.NewReplacer("ACTOR", "ana", "REASON", "'CASE-1: it is \"repaired\"'", "FINDING", finding).Replace(found[0])
	words, err := exec.Command("sh", "-c", "grantd() { printf '%s\\n' \"$@\"; }\n"+filled).Output()
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	err = run(t.Context(), strings.Split(strings.TrimSuffix(string(words), "\n"), "\n"), nil, &stdout, &stderr)
	return stdout.String(), err
}

// A receiver was given up, and of what waited for it support was told only when it had been due. From there every step is one that is printed.
func TestExplain_OfAPausedDestination(t *testing.T) {
	t.Parallel()
	const (
		newly      = entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED
		waitingKey = "billing:grant:INV-2:team_access"
		laterKey   = "billing:grant:INV-3:team_access"
	)
	e := setupExplained(t)
	e.status.Store(http.StatusGone)
	e.grant(t, winnerTrace, theKey, "evt_1", newly)
	e.settle(t, theKey, 1, entitlementv1.DeliveryState_DELIVERY_STATE_DEAD)
	e.grant(t, winnerTrace, waitingKey, "evt_2", newly, onInvoice("INV-2"))
	explain := func(key string, want ...string) string {
		t.Helper()
		out, err := e.explain(t, "--key", key)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(happened(t, out), func(what string) bool { return what == "attempt: NEWLY_APPLIED" || what == "entry 1: GRANTED" })
		if !slices.Equal(got, want) {
			t.Errorf("the story of %s has %q, want %q", key, got, want)
		}
		return out
	}
	dead := explain(theKey, "delivery to crm", "delivery attempt 1: DEAD 410", "destination crm: paused")
	wantAll(t, dead, "destination crm is paused since 2", "pause 1, it answered 410 Gone", "waits for an operator: repair the receiver")
	waiting := explain(waitingKey, "destination crm: paused", "delivery to crm")
	wantAll(t, waiting, "now PENDING, due 2", "waits: destination crm is paused since 2", "Z because it answered 410 Gone; resume with grantd deliveries resume crm")

	e.status.Store(http.StatusNoContent)
	out, err := runPrinted(t, waiting, "deliveries resume", "")
	if err != nil {
		t.Fatal(err)
	}
	wantAll(t, out, "outcome NEWLY_APPLIED", "destination crm", "actor ana")
	if out, err = runPrinted(t, dead, "deliveries redeliver", ""); err != nil {
		t.Fatal(err)
	}
	wantAll(t, out, "outcome NEWLY_APPLIED")
	for _, key := range []string{theKey, waitingKey} {
		e.settle(t, key, 1, entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED)
	}
	e.grant(t, winnerTrace, laterKey, "evt_3", newly, onInvoice("INV-3"))
	e.settle(t, laterKey, 1, entitlementv1.DeliveryState_DELIVERY_STATE_DELIVERED)
	out = explain(waitingKey, "destination crm: paused", "delivery to crm", "destination crm: resumed", "delivery attempt 1: DELIVERED 204")
	wantAll(t, out, `pause 1, actor ana, reason "CASE-1: it is \"repaired\""`)
	if strings.Contains(out, "resume with") {
		t.Errorf("the pause is over:\n%s", out)
	}
	explain(laterKey, "delivery to crm", "delivery attempt 1: DELIVERED 204")
}

// An invoice's id may be anything that is visible. Printed for a shell, it must not become part of the command.
func TestExplain_CommandsAreQuoted(t *testing.T) {
	t.Parallel()
	const invoice = `-I'$(exit)"\;*` + "`"
	e := setupExplained(t)
	e.grant(t, winnerTrace, theKey, "evt_1", entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED, onInvoice(invoice))
	e.grant(t, replayTrace, "billing:other:INV-1", "evt_2", entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD, onInvoice(invoice), moreSeats)
	out, err := e.explain(t, "--key", "billing:other:INV-1")
	if err != nil {
		t.Fatal(err)
	}
	if out, err = runPrinted(t, out, "explain", ""); err != nil {
		t.Fatal(err)
	}
	wantAll(t, out, "Operation "+theKey+" of tenant acme")
}

// What a command needs to reach the server is what it was printed with.
func TestFollowUps_Command(t *testing.T) {
	for want, f := range map[string]*followUps{
		"grantd deliveries resume crm --actor=ACTOR --reason=REASON": acmeNext,
		"grantd deliveries resume crm --addr=grantd:443 --ca='/etc/our ca.pem' --cert=/c --cert-key=/k --reason=REASON": {
			operator: "ana@desk", target: &target{Addr: "grantd:443", CA: "/etc/our ca.pem", Cert: "/c", CertKey: "/k"},
		},
		"grantd deliveries resume crm --addr=grantd:80 --insecure-plaintext --reason=REASON": {
			operator: "ana@desk", target: &target{Addr: "grantd:80", InsecurePlaintext: true},
		},
		"grantd deliveries resume crm --addr=127.0.0.1:50051 --insecure-plaintext=false --reason=REASON": {
			operator: "ana@desk", target: &target{Addr: defaultAddr}, environment: target{Addr: "grantd:80", InsecurePlaintext: true},
		},
	} {
		if got := strings.Join(f.resume("crm"), " "); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	long := append(acmeNext.resume(strings.Repeat("d", 63)), flag("x", strings.Repeat("y ", 100)))
	lines := commandLines(long, storyColumns)
	if got := strings.ReplaceAll(strings.Join(lines, "\n"), " \\\n ", ""); got != strings.Join(long, " ") || len(lines) != 4 {
		t.Errorf("%d lines: %s", len(lines), got)
	}
}
