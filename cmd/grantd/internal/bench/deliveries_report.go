package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// String is one line for people.
func (m *Measure) String() string {
	text := fmt.Sprintf("%s: %s/s, CPU %.0f µs of grantd, %.0f µs of PostgreSQL", m.Name, thousands(m.PerSecond), m.ServerMicros, m.PostgresMicros)
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
		GrantsPerSecond: of(func(m *Measure) float64 { return m.GrantsPerSecond }),
		Waiting:         int64(of(func(m *Measure) float64 { return float64(m.Waiting) })),
		CatchUpSeconds:  of(func(m *Measure) float64 { return m.CatchUpSeconds }),
	}
}

// Write prints the table in Markdown, with the machine above it. The ratios are to grants alone, and to the grants beside where there
// were some.
func (r *DeliveriesReport) Write(w io.Writer) error {
	base := []string{unary(32).Name(), unary(128).Name(), unary(512).Name()}
	var text strings.Builder
	fmt.Fprintf(&text, "%s; medians of %d rounds of %.0f s, backlogs of %d\n\n", r.Machine, r.Rounds, r.Seconds, r.Backlog)
	text.WriteString("| work | per second | CPU of grantd | of PostgreSQL | to grants of 32, 128, 512 callers | grants beside | waited at their end |\n")
	text.WriteString("| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, name := range r.Names {
		m := medianMeasure(r.Results[name])
		ratios := make([]string, len(base))
		for i, against := range base {
			ratios[i] = fmt.Sprintf("%.2f", m.PerSecond/medianMeasure(r.Results[against]).PerSecond)
		}
		beside, waited := "", ""
		if m.GrantsPerSecond > 0 {
			beside = fmt.Sprintf("%s/s", thousands(m.GrantsPerSecond))
			waited = fmt.Sprintf("%s, for %.1f s", thousands(float64(m.Waiting)), m.CatchUpSeconds)
		}
		fmt.Fprintf(&text, "| %s | %s | %.0f µs | %.0f µs | %s | %s | %s |\n", name, thousands(m.PerSecond), m.ServerMicros, m.PostgresMicros,
			strings.Join(ratios, ", "), beside, waited)
	}
	_, err := io.WriteString(w, text.String())
	return err
}
