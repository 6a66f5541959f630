package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// String is one line for people.
func (m *Measure) String() string {
	text := fmt.Sprintf("%s: %s/s, CPU %.0f µs of grantd, %.0f of PostgreSQL, %.0f of the load", m.Name, thousands(m.PerSecond),
		m.ServerMicros, m.PostgresMicros, m.LoadMicros)
	if m.GrantsPerSecond > 0 {
		text += fmt.Sprintf("; %s grants/s, %d waited at their end, for %.1f s", thousands(m.GrantsPerSecond), m.Waiting, m.CatchUpSeconds)
	}
	return text
}

// medianMeasure takes each figure's own median.
func medianMeasure(all []*Measure) *Measure {
	of := func(value func(*Measure) float64) float64 {
		values := make([]float64, len(all))
		for i, m := range all {
			values[i] = value(m)
		}
		slices.Sort(values)
		return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
	}
	return &Measure{
		Name:            all[0].Name,
		PerSecond:       of(func(m *Measure) float64 { return m.PerSecond }),
		ServerMicros:    of(func(m *Measure) float64 { return m.ServerMicros }),
		PostgresMicros:  of(func(m *Measure) float64 { return m.PostgresMicros }),
		LoadMicros:      of(func(m *Measure) float64 { return m.LoadMicros }),
		GrantsPerSecond: of(func(m *Measure) float64 { return m.GrantsPerSecond }),
		Waiting:         int64(of(func(m *Measure) float64 { return float64(m.Waiting) })),
		CatchUpSeconds:  of(func(m *Measure) float64 { return m.CatchUpSeconds }),
	}
}

// Write prints the table in Markdown, with the machine above it. The ratios are to grants of the same server, with the same destination: of
// the rates, and of what the machine's cores would carry by the CPU time of everything that took part, which other work on the machine
// disturbs less.
func (r *DeliveriesReport) Write(w io.Writer) error {
	ratios := func(value func(*Measure) float64, m *Measure) string {
		kind, _, _ := strings.Cut(m.Name, ",")
		var texts []string
		for _, callers := range comparedCallers {
			if grants := r.Results[waitsFor(kind)+unary(callers).Name()]; grants != nil {
				texts = append(texts, fmt.Sprintf("%.2f", value(m)/value(medianMeasure(grants))))
			}
		}
		return strings.Join(texts, ", ")
	}
	rate := func(m *Measure) float64 { return m.PerSecond }
	carried := func(m *Measure) float64 { return float64(r.Machine.Cores) * 1e6 / max(m.micros(), 1) }
	var text strings.Builder
	fmt.Fprintf(&text, "%s; medians of %d rounds of %.0f s, backlogs of %d and more\n\n", r.Machine, r.Rounds, r.Seconds, r.Backlog)
	text.WriteString("| work | measured | to grants of 32, 128, 512 callers | CPU of grantd, PostgreSQL, load | the cores carry | to grants, by CPU | beside |\n")
	text.WriteString("| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, name := range r.Names {
		m := medianMeasure(r.Results[name])
		beside := ""
		if m.GrantsPerSecond > 0 {
			beside = fmt.Sprintf("%s grants/s; %s waited at their end, for %.1f s", thousands(m.GrantsPerSecond), thousands(float64(m.Waiting)), m.CatchUpSeconds)
		}
		fmt.Fprintf(&text, "| %s | %s/s | %s | %.0f, %.0f, %.0f µs | %s/s | %s | %s |\n", name, thousands(m.PerSecond), ratios(rate, m),
			m.ServerMicros, m.PostgresMicros, m.LoadMicros, thousands(carried(m)), ratios(carried, m), beside)
	}
	_, err := io.WriteString(w, text.String())
	return err
}
