package store

import (
	"encoding/hex"
	"testing"
	"time"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

func TestStepFor(t *testing.T) {
	for _, c := range []struct {
		name                   string
		state                  pb.DeliveryState
		heldBy                 int64
		deduplicates, notified bool
		want                   step
	}{
		{"due", pendingState, 0, false, false, send},
		{"due, at one that deduplicates", pendingState, 0, true, false, send},
		{"behind another", pendingState, 1, true, false, hold},
		{"lease over", sendingState, 0, true, false, send},
		{"lease over, and cannot deduplicate", sendingState, 0, false, false, doubt},
		{"lease over, and cannot deduplicate, behind another", sendingState, 1, false, false, doubt},
		{"told already", pendingState, 0, false, true, spare},
		{"told already by the call that is in doubt", sendingState, 0, false, true, spare},
	} {
		if got := stepFor(c.state, c.heldBy, c.deduplicates, c.notified); got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
}

func TestJudgeOrder(t *testing.T) {
	const (
		redeliver = pb.OperatorActionKind_OPERATOR_ACTION_KIND_REDELIVER
		discard   = pb.OperatorActionKind_OPERATOR_ACTION_KIND_DISCARD
		arrived   = pb.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_DELIVERED
		sendAgain = pb.OperatorActionKind_OPERATOR_ACTION_KIND_RESOLVE_SEND_AGAIN

		newly    = pb.Outcome_OUTCOME_NEWLY_APPLIED
		already  = pb.Outcome_OUTCOME_ALREADY_APPLIED
		rejected = pb.Outcome_OUTCOME_REJECTED

		delivered = pb.RejectionReason_REJECTION_REASON_DELIVERY_DELIVERED
		discarded = pb.RejectionReason_REJECTION_REASON_DELIVERY_DISCARDED
		state     = pb.RejectionReason_REJECTION_REASON_DELIVERY_STATE
		movedOn   = pb.RejectionReason_REJECTION_REASON_DELIVERY_MOVED_ON
	)
	type verdict struct {
		to      pb.DeliveryState
		outcome pb.Outcome
		why     pb.RejectionReason
	}
	stays := func(s pb.DeliveryState) verdict { return verdict{s, already, 0} }
	refused := func(s pb.DeliveryState, why pb.RejectionReason) verdict { return verdict{s, rejected, why} }
	for kind, byState := range map[pb.OperatorActionKind]map[pb.DeliveryState]verdict{
		redeliver: {
			pendingState: stays(pendingState), sendingState: stays(sendingState), unknownState: refused(unknownState, state),
			deliveredState: refused(deliveredState, delivered), deadState: {pendingState, newly, 0}, discardedState: refused(discardedState, discarded),
		},
		discard: {
			pendingState: {discardedState, newly, 0}, sendingState: refused(sendingState, state), unknownState: {discardedState, newly, 0},
			deliveredState: refused(deliveredState, delivered), deadState: {discardedState, newly, 0}, discardedState: stays(discardedState),
		},
		arrived: {
			pendingState: refused(pendingState, state), sendingState: refused(sendingState, state), unknownState: {deliveredState, newly, 0},
			deliveredState: stays(deliveredState), deadState: refused(deadState, state), discardedState: refused(discardedState, discarded),
		},
		sendAgain: {
			pendingState: stays(pendingState), sendingState: stays(sendingState), unknownState: {pendingState, newly, 0},
			deliveredState: refused(deliveredState, delivered), deadState: refused(deadState, state), discardedState: refused(discardedState, discarded),
		},
	} {
		for s, want := range byState {
			for _, observed := range []int64{0, 2} {
				to, outcome, why := judgeOrder(kind, orderFacts{state: s, attempts: 2, observed: observed})
				if got := (verdict{to, outcome, why}); got != want {
					t.Errorf("%v of %v, observed %d: got %v, want %v", kind, s, observed, got, want)
				}
			}
		}
	}
	for _, c := range []struct {
		name string
		kind pb.OperatorActionKind
		f    orderFacts
		want verdict
	}{
		{"discard of a call whose worker is gone", discard, orderFacts{state: sendingState, leaseOver: true}, verdict{discardedState, newly, 0}},
		{"a call whose worker is gone arrived", arrived, orderFacts{state: sendingState, leaseOver: true}, verdict{deliveredState, newly, 0}},
		{"a call whose worker is gone is sent again", sendAgain, orderFacts{state: sendingState, leaseOver: true}, verdict{pendingState, newly, 0}},
		{"a late repeat, dead once more", redeliver, orderFacts{state: deadState, attempts: 3, observed: 2, done: true}, stays(deadState)},
		{"a late repeat, in doubt once more", sendAgain, orderFacts{state: unknownState, attempts: 3, observed: 2, done: true}, stays(unknownState)},
		{"a late repeat, delivered since", redeliver, orderFacts{state: deliveredState, attempts: 3, observed: 2, done: true}, stays(deliveredState)},
		{"seen before another operator's redelivery failed", redeliver, orderFacts{state: deadState, attempts: 3, observed: 2}, refused(deadState, movedOn)},
		{"seen before it was sent again", arrived, orderFacts{state: unknownState, attempts: 3, observed: 2}, refused(unknownState, movedOn)},
	} {
		to, outcome, why := judgeOrder(c.kind, c.f)
		if got := (verdict{to, outcome, why}); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// Destinations deduplicate by the key, and some have had it for years: it must never be computed in another way.
func TestDeliveryKey_IsForEver(t *testing.T) {
	key := deliveryKey("acme", BusinessKey{"INV-1", "team_access", 7}, 2, "crm")
	if got, want := hex.EncodeToString(key[:]), "334ced79a1a68214ec8bd7c01f7209223876640d36658f9ae020124d7bc3eb33"; got != want {
		t.Errorf("the key is %s, want %s", got, want)
	}
	id, ok := DeliveryIDOf(hex.EncodeToString(key[:]))
	if !ok || id != deliveryID(key) || id.Version() != 8 {
		t.Errorf("the id of the key is %v, want %v", id, deliveryID(key))
	}
	for _, no := range []string{"", "00", hex.EncodeToString(key[:])[1:] + "x", "AB" + hex.EncodeToString(key[:])[2:]} {
		if _, ok := DeliveryIDOf(no); ok {
			t.Errorf("%q is taken for a key", no)
		}
	}
}

// No two effects share a key, however their names are cut.
func TestDeliveryKey_PartsDoNotRunTogether(t *testing.T) {
	seen := map[[32]byte]string{}
	for _, sep := range []string{"|", ":", "/", "\x00", ""} {
		for _, parts := range [][4]string{
			{"a" + sep + "b", "c", "d", "e"}, {"a", "b" + sep + "c", "d", "e"}, {"a", "b", "c" + sep + "d", "e"}, {"a", "b", "c", "d" + sep + "e"},
			{"a", "b", "c" + sep, "d" + sep + "e"},
		} {
			what := parts[0] + "," + parts[1] + "," + parts[2] + "," + parts[3]
			key := deliveryKey(parts[0], BusinessKey{parts[1], parts[2], 0}, 1, parts[3])
			if other, ok := seen[key]; ok && other != what {
				t.Errorf("%q and %q share a key", what, other)
			}
			seen[key] = what
		}
	}
	b := BusinessKey{"i", "x", 1}
	if deliveryKey("t", b, 256, "d") == deliveryKey("t", BusinessKey{"i", "x", 256}, 1, "d") {
		t.Error("entry and operation version run together")
	}
}

func TestDestination_Wants(t *testing.T) {
	all := Destination{Name: "all"}
	reversals := Destination{Name: "r", Kinds: []pb.EntryKind{pb.EntryKind_ENTRY_KIND_REVERSED}}
	types := Destination{Name: "x", EntitlementTypes: []string{"x", "y"}}
	mail := Destination{Name: "m", Template: "welcome"}
	someone := &Notify{Recipient: "a@example.com", Locale: "en"}
	for _, c := range []struct {
		d      Destination
		kind   pb.EntryKind
		typ    string
		notify *Notify
		want   bool
	}{
		{all, pb.EntryKind_ENTRY_KIND_GRANTED, "z", nil, true},
		{reversals, pb.EntryKind_ENTRY_KIND_REVERSED, "z", nil, true},
		{reversals, pb.EntryKind_ENTRY_KIND_GRANTED, "z", nil, false},
		{types, pb.EntryKind_ENTRY_KIND_GRANTED, "y", nil, true},
		{types, pb.EntryKind_ENTRY_KIND_GRANTED, "z", nil, false},
		{mail, pb.EntryKind_ENTRY_KIND_GRANTED, "z", nil, false},
		{mail, pb.EntryKind_ENTRY_KIND_GRANTED, "z", someone, true},
	} {
		if got := c.d.wants(c.kind, c.typ, c.notify); got != c.want {
			t.Errorf("%s wants %v of %s: %t", c.d.Name, c.kind, c.typ, got)
		}
	}
}

func TestClipped(t *testing.T) {
	long := make([]byte, 0, 3000)
	for len(long) < 3000 {
		long = append(long, "é"...)
	}
	for in, want := range map[string]string{
		"fine": "fine", "a\x00b": "a\uFFFDb", "a\xffb": "a\uFFFDb", "x" + string(long): "x" + string(long[:1022]),
	} {
		if got := clipped(in); got != want {
			t.Errorf("%.20q becomes %.20q of %d bytes", in, got, len(got))
		}
	}
}

func TestBoundedRetry(t *testing.T) {
	for in, want := range map[time.Duration]time.Duration{
		-time.Second: 0, time.Minute: time.Minute, 1 << 62: longestRetry,
	} {
		if got := boundedRetry(in); got != want {
			t.Errorf("%v becomes %v", in, got)
		}
	}
}

// Two lists of parts have the same key exactly when they are the same.
func FuzzDeliveryKey(f *testing.F) {
	f.Add("a|b", "c", "d", int64(0), int64(1), "e", "a", "b|c", "d", int64(0), int64(1), "e")
	f.Add("t", "i", "x", int64(1), int64(256), "d", "t", "i", "x", int64(256), int64(1), "d")
	f.Add("t", "i", "x", int64(0), int64(1), "d", "t", "i", "x", int64(0), int64(1), "d")
	f.Fuzz(func(t *testing.T, tenant, invoice, typ string, version, number int64, destination string,
		tenant2, invoice2, typ2 string, version2, number2 int64, destination2 string) {
		same := tenant == tenant2 && invoice == invoice2 && typ == typ2 && version == version2 && number == number2 && destination == destination2
		if got := deliveryKey(tenant, BusinessKey{invoice, typ, version}, number, destination) ==
			deliveryKey(tenant2, BusinessKey{invoice2, typ2, version2}, number2, destination2); got != same {
			t.Errorf("the keys are equal: %t, the parts: %t", got, same)
		}
	})
}
