package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
)

const (
	// storyColumns is the width that every line of a story fits into.
	storyColumns = 80
	// gapColumns is the room for the time since the line before.
	gapColumns = len("+9999 ms")
	// detailColumns is how far details are indented.
	detailColumns = 4
)

// writeStories prints one story after the other.
func writeStories(w io.Writer, c *explainCmd, f *followUps, stories []story, more bool) error {
	if !known(stories) {
		return nil
	}
	var out strings.Builder
	switch {
	case c.Event != "":
		paragraph(&out, 0, fmt.Sprintf("Event %s of tenant %s, stories told: %d", text(c.Event), c.Tenant, len(stories)))
	case c.lists():
		paragraph(&out, 0, fmt.Sprintf("Invoice %s of tenant %s, stories told: %d", text(c.Invoice), c.Tenant, len(stories)))
	}
	for i := range stories {
		if i > 0 || c.lists() {
			out.WriteByte('\n')
		}
		c.writeStory(&out, f, &stories[i])
	}
	if more {
		out.WriteByte('\n')
		paragraph(&out, 0, "There are more: raise --limit.")
	}
	_, err := io.WriteString(w, out.String())
	return err
}

func (c *explainCmd) writeStory(out *strings.Builder, next *followUps, s *story) {
	f := s.found
	op := f.GetOperation()
	switch {
	case op != nil:
		paragraph(out, 0, fmt.Sprintf("Operation %s of tenant %s", op.GetIdempotencyKey(), op.GetTenantId()))
		if s.key != "" && s.key != op.GetIdempotencyKey() {
			paragraph(out, detailColumns, s.key+" is an alias of it")
		}
		about := plain(op.GetKind(), "OPERATION_KIND_")
		if e := f.GetEntitlement(); e != nil {
			g := e.GetGrant()
			about += fmt.Sprintf(" of %s, operation version %d", g.GetEntitlementType(), g.GetOperationVersion())
		}
		about += ", invoice " + op.GetInvoiceId()
		if r := f.GetRecorded(); r != nil && op.GetEntitlementId() == "" {
			about += fmt.Sprintf(" %s at version %d, which reversed %d", plain(r.GetState(), "INVOICE_STATE_"), r.GetVersion(), r.GetReversedCount())
		}
		paragraph(out, detailColumns, about)
		if op.GetEntitlementId() != "" {
			paragraph(out, detailColumns, fmt.Sprintf("entitlement %s, now %s at entry %d", op.GetEntitlementId(),
				plain(f.GetCurrentState(), "ENTITLEMENT_STATE_"), f.GetCurrentVersion()))
		}
	case s.key != "":
		paragraph(out, 0, fmt.Sprintf("Key %s of tenant %s: nothing was applied under it, only refusals and conflicts are on record", s.key, c.Tenant))
	default:
		paragraph(out, 0, fmt.Sprintf("Invoice %s, type %s, operation version %d of tenant %s: nothing was granted, only refusals are on record",
			text(c.Invoice), text(c.Type), c.OperationVersion, c.Tenant))
	}
	out.WriteByte('\n')
	if f.GetTruncated() {
		paragraph(out, 0, "Only the latest of it: earlier attempts, entries or deliveries are left out.")
	}
	var before time.Time
	for i, h := range s.happenings(next) {
		gap := ""
		if d := h.at.Sub(before); i > 0 && d == 0 {
			gap = "+0"
		} else if i > 0 {
			gap = "+" + length(d)
		}
		before = h.at
		head := fmt.Sprintf("%s %*s  ", h.at.UTC().Format(storedLayout), gapColumns, gap)
		for _, line := range wrap(h.what, storyColumns-len([]rune(head))) {
			out.WriteString(head + line + "\n")
			head = strings.Repeat(" ", len([]rune(head)))
		}
		list(out, detailColumns, h.details)
		for _, w := range h.waysOn {
			paragraph(out, detailColumns, w.why)
			for _, line := range commandLines(w.command, storyColumns-2*detailColumns) {
				out.WriteString(strings.Repeat(" ", 2*detailColumns) + line + "\n")
			}
		}
	}
	if len(f.GetEntries()) > 0 && len(f.GetDeliveries()) == 0 {
		paragraph(out, 0, "No delivery of it is kept: there was none, or it was settled and removed after its retention.")
	}
	out.WriteByte('\n')
	paragraph(out, 0, "On a replay: "+s.replay())
	if invoice := s.blamed(); invoice != "" {
		for _, line := range commandLines(next.explain(flag("invoice", invoice)), storyColumns-detailColumns) {
			out.WriteString(strings.Repeat(" ", detailColumns) + line + "\n")
		}
	}
}

// paragraph breaks text into indented lines that fit.
func paragraph(out *strings.Builder, indent int, text string) {
	for _, line := range wrap(text, storyColumns-indent) {
		out.WriteString(strings.Repeat(" ", indent) + line + "\n")
	}
}

// list is a paragraph that breaks between details, and inside one only where it is longer than a line.
func list(out *strings.Builder, indent int, details []string) {
	line := ""
	for i, d := range details {
		if i < len(details)-1 {
			d += ","
		}
		if line != "" && len([]rune(line))+1+len([]rune(d)) > storyColumns-indent {
			paragraph(out, indent, line)
			line = ""
		}
		line = strings.TrimPrefix(line+" "+d, " ")
	}
	paragraph(out, indent, line)
}

// wrap breaks text at its spaces into lines of a number of columns, and inside a word that is longer. What a terminal would obey
// is written out.
func wrap(text string, columns int) []string {
	var lines []string
	var line []rune
	for _, field := range strings.Fields(visible(text)) {
		word := []rune(field)
		if len(line) > 0 && len(line)+1+len(word) > columns {
			lines, line = append(lines, string(line)), nil
		}
		if len(line) > 0 {
			line = append(line, ' ')
		}
		line = append(line, word...)
		for len(line) > columns {
			lines, line = append(lines, string(line[:columns])), line[columns:]
		}
	}
	if len(line) > 0 {
		lines = append(lines, string(line))
	}
	return lines
}

// writeStoriesJSON prints the server's answers, each with what a replay would be told in words.
func writeStoriesJSON(w io.Writer, stories []story, more bool) error {
	type told struct {
		IdempotencyKey string          `json:"idempotencyKey"`
		Replay         string          `json:"replay"`
		Found          json.RawMessage `json:"found"`
	}
	all := struct {
		Stories []told `json:"stories"`
		More    bool   `json:"more"`
	}{Stories: []told{}, More: more}
	for i := range stories {
		raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(stories[i].found)
		if err != nil {
			return err
		}
		all.Stories = append(all.Stories, told{stories[i].key, stories[i].replay(), raw})
	}
	raw, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return writeIndented(w, raw)
}
