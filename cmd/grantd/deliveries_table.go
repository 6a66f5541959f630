package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	// terminalColumns is the width that every line fits into on a terminal. Elsewhere nothing is cut or broken.
	terminalColumns = 100
	// destinationColumns bounds a name in a table; `show` has it whole.
	destinationColumns = 14
)

// table lines columns up, and cuts the last one off where the terminal ends.
type table struct {
	// width bounds each column but the last.
	width []int
	rows  [][]string
}

func (t *table) add(cells ...string) {
	for i := range cells {
		cells[i] = visible(cells[i])
	}
	t.rows = append(t.rows, cells)
}

func (t *table) write(io stdio) error {
	width := make([]int, len(t.width))
	for _, row := range t.rows {
		for i := range width {
			width[i] = max(width[i], len([]rune(row[i])))
			if io.terminal {
				width[i] = min(width[i], t.width[i])
			}
		}
	}
	for _, row := range t.rows {
		var line strings.Builder
		left := io.columns()
		for i, columns := range width {
			fmt.Fprintf(&line, "%-*s  ", columns, cut(row[i], columns))
			left -= columns + 2
		}
		line.WriteString(cut(row[len(width)], left))
		if _, err := fmt.Fprintln(io.stdout, strings.TrimRight(line.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}

// columns is how many a line may have.
func (io stdio) columns() int {
	if io.terminal {
		return terminalColumns
	}
	return math.MaxInt
}

// cut shortens text to a number of characters.
func cut(s string, columns int) string {
	if r := []rune(s); len(r) > columns {
		return string(r[:columns-1]) + "…"
	}
	return s
}

// plain is an enum's value without the prefix that all of its values have.
func plain(value fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(value.String(), prefix)
}

const statePrefix = "DELIVERY_STATE_"

func plainState(s entitlementv1.DeliveryState) string { return plain(s, statePrefix) }

// moment is a time in UTC, or empty.
func moment(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().UTC().Format("2006-01-02 15:04:05Z")
}

// writeDeliveries prints a list, and then what the server makes of the destinations.
func writeDeliveries(io stdio, next *followUps, list *entitlementv1.ListDeliveriesResponse) error {
	t := &table{width: []int{uuidCharacters, destinationColumns, len("DISCARDED"), len("REINSTATED 12345"), len("TRIES")}}
	t.add("DELIVERY", "DESTINATION", "STATE", "ENTRY", "TRIES", "NOTE")
	for _, d := range list.GetDeliveries() {
		t.add(d.GetDeliveryId(), d.GetDestination(), plainState(d.GetState()), entryOf(d), fmt.Sprint(d.GetAttempts()), noteOn(d))
	}
	if err := t.write(io); err != nil {
		return err
	}
	if len(list.GetDeliveries()) == 0 {
		fmt.Fprintf(io.stdout, "none of tenant %s\n", visible(next.tenant))
	}
	if list.GetNextPageToken() != "" {
		fmt.Fprintln(io.stdout, "There are more: raise --limit, or choose with --state and --destination.")
	}
	if len(list.GetDestinations()) == 0 {
		return nil
	}
	fmt.Fprintln(io.stdout)
	t = &table{width: []int{terminalColumns - 2 - len("HALF_OPEN")}}
	t.add("DESTINATION", "BREAKER")
	for _, s := range list.GetDestinations() {
		t.add(s.GetDestination(), breakerOf(s))
	}
	if err := t.write(io); err != nil {
		return err
	}
	for _, s := range list.GetDestinations() {
		if p := s.GetPause(); p != nil {
			command := next.resume(s.GetDestination(), flag("pause", fmt.Sprint(p.GetPauseNumber())))
			if _, err := fmt.Fprintf(io.stdout, "\nPaused since %s because %s. Resume with\n%s\n", moment(p.GetPausedAt()), gone,
				strings.Join(commandLines(command, io.columns()), "\n")); err != nil {
				return err
			}
		}
	}
	return nil
}

// breakerOf is what the server that answers makes of a destination. It may say nothing at all of one that is not in its file.
func breakerOf(s *entitlementv1.DestinationStatus) string {
	if s.GetBreaker() == entitlementv1.BreakerState_BREAKER_STATE_UNSPECIFIED {
		return "none: this server sends it nothing"
	}
	return plain(s.GetBreaker(), "BREAKER_STATE_")
}

func entryOf(d *entitlementv1.Delivery) string {
	return fmt.Sprintf("%s %d", plain(d.GetEntryKind(), "ENTRY_KIND_"), d.GetEntryNumber())
}

// noteOn is what matters most about a delivery in its state.
func noteOn(d *entitlementv1.Delivery) string {
	switch held := d.GetHeldByEntryNumber(); {
	case d.GetSettledAt() != nil:
		return moment(d.GetSettledAt())
	case held != 0:
		return fmt.Sprintf("held by entry %d", held)
	case d.GetLastError() != "":
		return d.GetLastError()
	case d.GetLeaseUntil() != nil:
		return "lease until " + moment(d.GetLeaseUntil())
	}
	return ""
}

// fields prints names and values, each value broken into lines that fit. Empty values are left out.
func fields(io stdio, pairs ...string) error {
	const nameColumns = 16
	for i := 0; i < len(pairs); i += 2 {
		name := pairs[i]
		for value := []rune(visible(pairs[i+1])); len(value) > 0; name = "" {
			line := value[:min(len(value), io.columns()-nameColumns)]
			value = value[len(line):]
			if _, err := fmt.Fprintf(io.stdout, "%-*s%s\n", nameColumns, name, string(line)); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeStory prints a delivery, its attempts and the operators' actions, and what it waits for.
func writeStory(io stdio, next *followUps, s *entitlementv1.DeliveryStory, destinations []*entitlementv1.DestinationStatus) error {
	d := s.GetDelivery()
	var destination *entitlementv1.DestinationStatus
	for _, s := range destinations {
		if s.GetDestination() == d.GetDestination() {
			destination = s
		}
	}
	if err := writeDelivery(io, d, destination); err != nil {
		return err
	}
	if len(s.GetAttempts()) > 0 {
		fmt.Fprintln(io.stdout)
		t := &table{width: []int{len("ATTEMPT"), len("2006-01-02 15:04:05Z"), len("9999 ms"), len("DELIVERED"), len("STATUS")}}
		t.add("ATTEMPT", "STARTED", "TOOK", "OUTCOME", "STATUS", "WORKER; ERROR OR NOTE")
		for _, a := range s.GetAttempts() {
			outcome, took, code := plain(a.GetOutcome(), "DELIVERY_ATTEMPT_OUTCOME_"), "", ""
			if a.GetEndedAt() == nil {
				outcome = "-"
			} else {
				took = length(a.GetEndedAt().AsTime().Sub(a.GetStartedAt().AsTime()))
			}
			if a.GetStatusCode() != 0 {
				code = fmt.Sprint(a.GetStatusCode())
			}
			t.add(fmt.Sprint(a.GetAttemptNumber()), moment(a.GetStartedAt()), took, outcome, code, joined(a.GetWorker(), a.GetError(), a.GetNote()))
		}
		if err := t.write(io); err != nil {
			return err
		}
	}
	for _, a := range s.GetActions() {
		fmt.Fprintln(io.stdout)
		if err := fields(io,
			"operator", fmt.Sprintf("%s: %s to %s after %s", plain(a.GetKind(), "OPERATOR_ACTION_KIND_"),
				plainState(a.GetFromState()), plainState(a.GetToState()), times(a.GetAttempts())),
			"actor", a.GetActor(), "caller", a.GetCaller(), "at", moment(a.GetAt()), "reason", a.GetReason(),
		); err != nil {
			return err
		}
	}
	for _, w := range waysOn(next, d, destination.GetPause()) {
		lines := append(wrap(w.why, io.columns()), commandLines(w.command, io.columns())...)
		if _, err := fmt.Fprintf(io.stdout, "\n%s\n", strings.Join(lines, "\n")); err != nil {
			return err
		}
	}
	return nil
}

func joined(parts ...string) string {
	var full []string
	for _, p := range parts {
		if p != "" {
			full = append(full, p)
		}
	}
	return strings.Join(full, "; ")
}

func writeDelivery(io stdio, d *entitlementv1.Delivery, destination *entitlementv1.DestinationStatus) error {
	held, body, told, breaker := "", "", "", ""
	if d.GetSettledAt() == nil {
		breaker = breakerOf(destination)
	}
	if n := d.GetHeldByEntryNumber(); n != 0 {
		held = fmt.Sprintf("entry %d, which is not settled", n)
	}
	if d.GetBodyBytes() != 0 {
		body = fmt.Sprintf("%d bytes, %s", d.GetBodyBytes(), d.GetContentType())
	}
	if n := d.GetNotify(); n != nil {
		told = fmt.Sprintf("%s, %s, template %s", n.GetRecipient(), n.GetLocale(), d.GetTemplate())
	}
	b := d.GetBusinessKey()
	return fields(io,
		"delivery", d.GetDeliveryId(), "key", d.GetDeliveryKey(), "destination", d.GetDestination(), "breaker", breaker, "state", plainState(d.GetState()),
		"attempts", fmt.Sprintf("%d, %d counted against the limit", d.GetAttempts(), d.GetPoison()),
		"due", moment(d.GetNextAttemptAt()), "lease until", moment(d.GetLeaseUntil()), "held by", held, "last error", d.GetLastError(),
		"created", moment(d.GetCreatedAt()), "settled", moment(d.GetSettledAt()),
		"entitlement", d.GetEntitlementId(), "entry", entryOf(d), "invoice", b.GetInvoiceId(), "type", b.GetEntitlementType(),
		"version", fmt.Sprint(b.GetOperationVersion()), "operation", d.GetIdempotencyKey(), "told", told, "body", body,
	)
}

// writeOrder prints what became of an order.
func writeOrder(io stdio, a answered) error {
	d := a.GetDelivery()
	return fields(io, "outcome", plain(a.GetOutcome(), "OUTCOME_"), "delivery", d.GetDeliveryId(), "destination", d.GetDestination(),
		"state", plainState(d.GetState()))
}

// writeMessage prints a message in its JSON form.
func writeMessage(w io.Writer, m proto.Message) error {
	raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return err
	}
	return writeIndented(w, raw)
}

// writeIndented prints JSON in one form: protojson varies its spaces on purpose, which people who read and compare should not see.
func writeIndented(w io.Writer, raw []byte) error {
	var compact, out bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return err
	}
	if err := json.Indent(&out, []byte(visible(compact.String())), "", "  "); err != nil {
		return err
	}
	out.WriteByte('\n')
	_, err := out.WriteTo(w)
	return err
}
