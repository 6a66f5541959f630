package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// story is all that the server knows of one operation, or of a key or an effect that only met refusals.
type story struct {
	// key is the one that was asked for, or that the event came under; empty when the effect was named.
	key   string
	found *entitlementv1.GetOperationResponse
}

// happening is one line of a story with what else is to be said of it.
type happening struct {
	at      time.Time
	what    string
	details []string
	waysOn  []wayOn
}

// happenings are in the order of time. What one commit did has one time, and stands in the order of cause and effect.
func (s *story) happenings(next *followUps) []happening {
	var all []happening
	add := func(at *timestamppb.Timestamp, what string, details ...string) *happening {
		all = append(all, happening{at: at.AsTime(), what: what, details: slices.DeleteFunc(details, func(d string) bool { return d == "" })})
		return &all[len(all)-1]
	}
	f := s.found
	if op := f.GetOperation(); op != nil && !slices.ContainsFunc(f.GetAttempts(), func(a *entitlementv1.Attempt) bool {
		return a.GetAttemptId() == op.GetAttemptId()
	}) {
		add(op.GetAppliedAt(), "operation: applied", plain(op.GetKind(), "OPERATION_KIND_"), "its attempt is not shown", named("key", op.GetIdempotencyKey()),
			named("event", op.GetEventId()), named("source", op.GetSource()), named("caller", op.GetCaller()),
			named("trace", op.GetTraceId()), named("span", op.GetSpanId()))
	}
	for _, a := range f.GetAttempts() {
		add(a.GetAt(), "attempt: "+plain(a.GetOutcome(), "OUTCOME_"), s.attemptDetails(a)...)
	}
	for _, n := range f.GetEntries() {
		details := []string{
			named("key", n.GetIdempotencyKey()), named("invoice version", fmt.Sprint(n.GetInvoiceVersion())),
			named("actor", n.GetActor()), named("reason", n.GetReason()),
		}
		if n.GetEntitlementId() != f.GetOperation().GetEntitlementId() {
			details = append(details, named("entitlement", n.GetEntitlementId()))
		} else if n.GetKind() == entitlementv1.EntryKind_ENTRY_KIND_GRANTED {
			details = append(details, grantDetails(f.GetEntitlement())...)
		}
		add(n.GetAt(), fmt.Sprintf("entry %d: %s", n.GetEntryNumber(), plain(n.GetKind(), "ENTRY_KIND_")), details...)
	}
	for _, a := range f.GetAliases() {
		add(a.GetBoundAt(), "alias: bound", named("key", a.GetIdempotencyKey()))
	}
	for _, n := range f.GetNotifications() {
		details := []string{
			s.entry(n.GetEntitlementId(), n.GetEntryNumber()), named("to", n.GetNotify().GetRecipient()), "in " + n.GetNotify().GetLocale(),
			named("template", n.GetTemplate()), named("destination", n.GetDestination()),
		}
		if n.GetSentAt() == nil {
			add(n.GetRequestedAt(), "notification: wanted", append(details, "not known to be sent")...)
			continue
		}
		add(n.GetRequestedAt(), "notification: wanted", details...)
		add(n.GetSentAt(), "notification: sent", details...)
	}
	for _, d := range f.GetDeliveries() {
		s.addDelivery(d, next, add)
	}
	for _, p := range f.GetPauses() {
		about, pause := "destination "+p.GetDestination()+": ", fmt.Sprintf("pause %d", p.GetPauseNumber())
		add(p.GetPausedAt(), about+"paused", pause, gone)
		if p.GetResumedAt() != nil {
			add(p.GetResumedAt(), about+"resumed", pause, named("actor", p.GetActor()), named("caller", p.GetCaller()), named("reason", p.GetReason()))
		}
	}
	slices.SortStableFunc(all, func(a, b happening) int { return a.at.Compare(b.at) })
	return all
}

func (s *story) attemptDetails(a *entitlementv1.Attempt) []string {
	details := []string{plain(a.GetKind(), "OPERATION_KIND_")}
	if a.GetMatchedBy() != entitlementv1.MatchedBy_MATCHED_BY_UNSPECIFIED {
		details[0] += " recognised by " + plain(a.GetMatchedBy(), "MATCHED_BY_")
	}
	if a.GetReason() != entitlementv1.RejectionReason_REJECTION_REASON_UNSPECIFIED {
		details = append(details, plain(a.GetReason(), "REJECTION_REASON_"))
	}
	if len(a.GetDifferingFields()) > 0 {
		details = append(details, "differs in "+strings.Join(a.GetDifferingFields(), " "))
	}
	if s.found.GetOperation() == nil {
		details = append(details, named("invoice", a.GetInvoiceId()), named("type", a.GetEntitlementType()))
	}
	return append(details, named("key", a.GetIdempotencyKey()), named("event", a.GetEventId()), named("source", a.GetSource()),
		named("caller", a.GetCaller()), tries(a.GetPreviousTries()), named("trace", a.GetTraceId()), named("span", a.GetSpanId()),
		named("winner's trace", a.GetWinnerTraceId()))
}

// tries says that the client's library had sent the call before.
func tries(previous int32) string {
	if previous == 0 {
		return ""
	}
	return fmt.Sprintf("try %d of one call", int64(previous)+1)
}

func grantDetails(e *entitlementv1.Entitlement) []string {
	var details []string
	g := e.GetGrant()
	for _, name := range slices.Sorted(maps.Keys(g.GetScope())) {
		details = append(details, "scope."+name+"="+text(g.GetScope()[name]))
	}
	if g.Quantity != nil {
		details = append(details, fmt.Sprintf("quantity %d", g.GetQuantity()))
	}
	if g.GetStartsAt() != nil {
		details = append(details, "starts "+stored(g.GetStartsAt()))
	}
	if e.GetEndsAt() != nil {
		details = append(details, "ends "+stored(e.GetEndsAt()))
	}
	return details
}

// entry names an entry, with its entitlement where the story is not about a single one.
func (s *story) entry(entitlement string, number int64) string {
	if entitlement == s.found.GetOperation().GetEntitlementId() {
		return fmt.Sprintf("entry %d", number)
	}
	return fmt.Sprintf("entry %d of entitlement %s", number, entitlement)
}

// replay is what would happen if the request came once more.
func (s *story) replay() string {
	f := s.found
	op := f.GetOperation()
	if op == nil {
		return strings.TrimSpace("Nothing is committed as of this read; a call may still be in flight. Sent again with the same key, " +
			"the request is judged anew, which is safe." + s.prospect())
	}
	told := "The same request under this key is told ALREADY_APPLIED by IDEMPOTENCY_KEY, with the stored result, and changes nothing. " +
		"Another payload under it is told CONFLICTING_PAYLOAD."
	switch {
	case s.key == "":
		told = "The same grant under whatever key is told ALREADY_APPLIED, with the stored result, and changes nothing. " +
			"Another grant of this effect is told CONFLICTING_PAYLOAD."
	case op.GetKind() == entitlementv1.OperationKind_OPERATION_KIND_GRANT:
		told += " The same grant under another key is told ALREADY_APPLIED by BUSINESS_KEY."
	}
	switch state := f.GetCurrentState(); {
	case state == entitlementv1.EntitlementState_ENTITLEMENT_STATE_REVERSED:
		told += " The entitlement is REVERSED now, and no replay gives it back."
	case state == entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE && op.GetKind() == entitlementv1.OperationKind_OPERATION_KIND_REVERSE:
		told += " The entitlement is ACTIVE now, and no replay takes it back again."
	}
	return told
}

// prospect says what the last refusal waits for.
func (s *story) prospect() string {
	attempts := s.found.GetAttempts()
	if len(attempts) == 0 {
		return ""
	}
	last := attempts[len(attempts)-1]
	switch last.GetReason() {
	case entitlementv1.RejectionReason_REJECTION_REASON_UNSPECIFIED:
	case entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID:
		return " It is refused until the evidence, and the record where that is newer, say PAID."
	case entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_REVERSED:
		return " It is refused until a version of the invoice above the reversed one says PAID; the invoice's story tells what reversed it."
	case entitlementv1.RejectionReason_REJECTION_REASON_STALE_VERSION:
		return " It is refused for ever: a higher version of the invoice is on record."
	case entitlementv1.RejectionReason_REJECTION_REASON_NOT_GRANTED:
		return " It is refused until the entitlement is granted."
	case entitlementv1.RejectionReason_REJECTION_REASON_UNKNOWN_TYPE, entitlementv1.RejectionReason_REJECTION_REASON_UNKNOWN_SCOPE_KEY,
		entitlementv1.RejectionReason_REJECTION_REASON_NOT_REPEATABLE:
		return " It is refused until the service's catalogue allows it."
	default:
		return " The last refusal was " + plain(last.GetReason(), "REJECTION_REASON_") + "."
	}
	if s.blamed() != "" {
		return " It conflicts for as long as another key holds its effect; the invoice's story tells of that one."
	}
	return ""
}

// blamed is the invoice whose story tells why the last request was turned away, empty where none does.
func (s *story) blamed() string {
	attempts := s.found.GetAttempts()
	if s.found.GetOperation() != nil || len(attempts) == 0 {
		return ""
	}
	last := attempts[len(attempts)-1]
	if last.GetReason() == entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_REVERSED ||
		last.GetOutcome() == entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD && s.key != "" {
		return last.GetInvoiceId()
	}
	return ""
}

// stored is a time in UTC, as it is stored.
func stored(t *timestamppb.Timestamp) string {
	return t.AsTime().UTC().Format(storedLayout)
}

const storedLayout = "2006-01-02 15:04:05.000000Z"

// length is one of time for people, in the unit that leaves one to four digits.
func length(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Minute:
		return fmt.Sprintf("%d s", int64(d.Seconds()))
	case d < 10*time.Hour:
		return fmt.Sprintf("%d min", int64(d.Minutes()))
	case d < 10*24*time.Hour:
		return fmt.Sprintf("%d h", int64(d.Hours()))
	}
	return fmt.Sprintf("%d d", int64(d.Hours()/24))
}

// named is empty for an empty value.
func named(name, value string) string {
	if value == "" {
		return ""
	}
	return name + " " + text(value)
}

// text is what others wrote, quoted unless it is one word, so that it can neither steer a terminal nor pass for another detail.
func text(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r == '"' || r == ',' || r == '\\' || !unicode.IsPrint(r) || r == ' ' }) {
		return s
	}
	return strconv.Quote(s)
}
