package bench

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// row is a line of the table: one measurement against another.
type row struct {
	work, against string // names of results
	value         func(*Result) float64
	toReach       string
	// reached is nil where the ratio is for information alone.
	reached func(work, against *Result, ratio float64) bool
}

func (c *Comparison) rows() []row {
	rate := func(r *Result) float64 { return r.PerSecond }
	atLeast := func(want float64) func(_, _ *Result, ratio float64) bool {
		return func(_, _ *Result, ratio float64) bool { return ratio >= want }
	}
	base := pgbenchName(baseClients)
	rows := []row{
		{unary(32).Name(), base, rate, "1.5, p99 no worse", func(work, against *Result, ratio float64) bool {
			return ratio >= 1.5 && work.P99Millis <= against.P99Millis
		}},
		{unary(128).Name(), base, rate, "2.5", atLeast(2.5)},
		{unary(512).Name(), base, rate, "3.5, p99 under 150 ms, nothing refused", func(work, _ *Result, ratio float64) bool {
			return ratio >= 3.5 && work.P99Millis < 150 && len(work.Unexpected()) == 0
		}},
		{Point{Callers: 2, Batch: MaxBatch}.Name(), base, rate, "10", atLeast(10)},
		{Point{Callers: 32, Replay: true}.Name(), unary(32).Name(), rate, "above 1", func(_, _ *Result, ratio float64) bool {
			return ratio > 1
		}},
		{unary(1).Name(), pgbenchName(1), func(r *Result) float64 { return r.P50Millis }, "p50 at most 2", func(_, _ *Result, ratio float64) bool {
			return ratio <= 2
		}},
		{unary(telemetryCallers).Name(), darkName, rate, "0.95", atLeast(0.95)},
		{tracedName, unary(telemetryCallers).Name(), rate, "", nil},
		{Point{Callers: 2, Batch: MaxBatch}.Name(), pgbenchBulkName, rate, "", nil},
	}
	if c.Preload > 0 {
		rows = append(rows, row{preloadedName(c.Preload), unary(preloadCaller).Name(), rate, "0.85", atLeast(0.85)})
	}
	return rows
}

// Write prints the table in Markdown, with the machine above it and everything unexpected below.
func (c *Comparison) Write(w io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, "%s; medians of %d rounds of %.0f s\n\n", c.Machine, c.Rounds, c.Seconds)
	text.WriteString("| work | measured | against | ratio (lowest to highest) | to reach | reached |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, r := range c.rows() {
		works, againsts := c.Results[r.work], c.Results[r.against]
		if len(works) == 0 || len(works) != len(againsts) {
			continue
		}
		work, against := median(works), median(againsts)
		ratio := r.value(work) / r.value(against)
		var ratios []float64
		for i := range works {
			ratios = append(ratios, r.value(works[i])/r.value(againsts[i]))
		}
		var reached string
		switch {
		case r.reached == nil:
		case r.reached(work, against, ratio):
			reached = "yes"
		default:
			reached = "no"
		}
		fmt.Fprintf(&text, "| %s | %s | %s: %s | %.2f (%.2f to %.2f) | %s | %s |\n", r.work, work.figures(), r.against,
			against.figures(), ratio, slices.Min(ratios), slices.Max(ratios), r.toReach, reached)
	}
	for _, name := range slices.SortedFunc(maps.Keys(c.Results), func(a, b string) int {
		return cmp.Or(cmp.Compare(c.Results[a][0].Callers, c.Results[b][0].Callers), cmp.Compare(a, b))
	}) {
		if strings.HasPrefix(name, "pgbench") {
			fmt.Fprintf(&text, "\n%s: %s", name, median(c.Results[name]).figures())
		}
	}
	text.WriteString("\n")
	for _, name := range slices.Sorted(maps.Keys(c.Results)) {
		if unexpected := median(c.Results[name]).Unexpected(); len(unexpected) > 0 {
			fmt.Fprintf(&text, "\n%s: neither NEWLY_APPLIED nor ALREADY_APPLIED: %v\n", name, unexpected)
		}
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// median takes each figure's own median; outcomes and errors are summed.
func median(results []*Result) *Result {
	of := func(value func(*Result) float64) float64 {
		var values []float64
		for _, r := range results {
			values = append(values, value(r))
		}
		slices.Sort(values)
		middle := len(values) / 2
		if len(values)%2 == 1 {
			return values[middle]
		}
		return (values[middle-1] + values[middle]) / 2
	}
	m := &Result{
		Name:       results[0].Name,
		Callers:    results[0].Callers,
		PerSecond:  of(func(r *Result) float64 { return r.PerSecond }),
		P50Millis:  of(func(r *Result) float64 { return r.P50Millis }),
		P99Millis:  of(func(r *Result) float64 { return r.P99Millis }),
		P999Millis: of(func(r *Result) float64 { return r.P999Millis }),
		Outcomes:   make(map[string]uint64),
		Errors:     make(map[string]uint64),
	}
	for _, r := range results {
		for name, n := range r.Outcomes {
			m.Outcomes[name] += n
		}
		for name, n := range r.Errors {
			m.Errors[name] += n
		}
	}
	return m
}

func (r *Result) figures() string {
	return fmt.Sprintf("%s/s, p50 %s, p99 %s ms", thousands(r.PerSecond), digits(r.P50Millis), digits(r.P99Millis))
}

// String is one line for people.
func (r *Result) String() string {
	return fmt.Sprintf("%s: %s/s, p50 %s, p99 %s, p99.9 %s ms", r.Name, thousands(r.PerSecond), digits(r.P50Millis),
		digits(r.P99Millis), digits(r.P999Millis))
}

// digits writes three of them.
func digits(v float64) string {
	switch {
	case v < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// thousands groups the digits of a whole number.
func thousands(v float64) string {
	text := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
