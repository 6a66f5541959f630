package apply

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/grantd/grantd/cmd/grantd/internal/latency"
)

// Report says what the lines were told.
type Report struct {
	options Options
	begin   time.Time

	mu        sync.Mutex
	latency   latency.Histogram // of calls
	counts    map[Answer]count
	total     count
	expecting int // lines that the file has an expectation for
	differing []difference
	failures  []failure
	elapsed   time.Duration
}

// count keeps second arrivals apart.
type count struct{ first, again int }

// difference is an answer other than the one it must be.
type difference struct {
	number     int
	again      bool
	want       Answer
	got        Answer
	gotMessage string
}

// failure is a line without an answer, of which none was expected.
type failure struct {
	number  int
	again   bool
	got     Answer
	message string
}

func newReport(options Options) *Report {
	return &Report{options: options, begin: time.Now(), counts: make(map[Answer]count)}
}

func (r *Report) called(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latency.Record(d)
}

func (r *Report) add(l *line, got reply) {
	again := l.first != nil
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[got.Answer]
	if again {
		c.again++
		r.total.again++
	} else {
		c.first++
		r.total.first++
	}
	r.counts[got.Answer] = c

	want := r.want(l)
	if want != nil && !again {
		r.expecting++
	}
	switch {
	case want != nil && *want != got.Answer:
		r.differing = append(r.differing, difference{l.number, again, *want, got.Answer, got.message})
	case want == nil && got.failed:
		r.failures = append(r.failures, failure{l.number, again, got.Answer, got.message})
	}
}

// want returns nil where nothing is judged. The answer to a second arrival follows from the first; only after a refusal, and
// out of order, other calls may have changed the state that decided it.
func (r *Report) want(l *line) *Answer {
	switch {
	case !r.options.Check:
		return nil
	case l.first == nil:
		return l.expect
	case l.first.applied():
		want := alreadyByKey()
		return &want
	case r.options.Concurrency == 1 && r.options.Batch <= 1:
		return l.first
	}
	return nil
}

func (r *Report) answered() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total.first + r.total.again
}

func (r *Report) finish() { r.elapsed = time.Since(r.begin) }

// Failed is how many requests got no answer; those with an expectation that is checked count as differing instead.
func (r *Report) Failed() int { return len(r.failures) }

// Differing is how many answers are not those that they must be. A second arrival of an applied request must be told
// ALREADY_APPLIED by its key.
func (r *Report) Differing() int { return len(r.differing) }

// Expecting is how many lines had an expectation that was checked.
func (r *Report) Expecting() int { return r.expecting }

// Write prints the outcomes, the rate and the latencies.
func (r *Report) Write(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	header, row := "outcome\tdetail\tlines\n", "%s\t%s\t%d\n"
	if r.options.Duplicate > 0 {
		header, row = "outcome\tdetail\tlines\tsent again\n", "%s\t%s\t%d\t%d\n"
	}
	print := func(a Answer, c count) {
		values := []any{a.Outcome, cmp.Or(a.Detail, "-"), c.first, c.again}
		if r.options.Duplicate == 0 {
			values = values[:3]
		}
		fmt.Fprintf(table, row, values...)
	}
	fmt.Fprint(table, header)
	answers := slices.SortedFunc(maps.Keys(r.counts), func(a, b Answer) int {
		x, y := r.counts[a], r.counts[b]
		return cmp.Or(cmp.Compare(y.first, x.first), cmp.Compare(y.again, x.again), cmp.Compare(a.String(), b.String()))
	})
	for _, a := range answers {
		print(a, r.counts[a])
	}
	print(Answer{Outcome: "total"}, r.total)
	if err := table.Flush(); err != nil {
		return err
	}

	sent := r.total.first + r.total.again
	_, err := fmt.Fprintf(w, "\n%d requests in %v: %.0f per second\n", sent, r.elapsed.Round(time.Millisecond),
		float64(sent)/max(r.elapsed.Seconds(), 1e-9))
	if err != nil || r.latency.Count() == 0 {
		return err
	}
	_, err = fmt.Fprintf(w, "%d calls: p50 %v, p90 %v, p99 %v, p99.9 %v, max %v\n", r.latency.Count(),
		round(r.latency.Percentile(50)), round(r.latency.Percentile(90)), round(r.latency.Percentile(99)),
		round(r.latency.Percentile(99.9)), round(r.latency.Max()))
	return err
}

// WriteDifferences lists each line whose answer is not the one that it must be, in the order of the file.
func (r *Report) WriteDifferences(w io.Writer) error {
	slices.SortStableFunc(r.differing, func(a, b difference) int { return cmp.Compare(a.number, b.number) })
	for _, d := range r.differing {
		got := d.got.String()
		if d.gotMessage != "" {
			got += ": " + d.gotMessage
		}
		if _, err := fmt.Fprintf(w, "%s: want %s, got %s\n", place(d.number, d.again), d.want, got); err != nil {
			return err
		}
	}
	return nil
}

// WriteFailures lists what Failed counts, in the order of the file. A limit of 0 lists all of them.
func (r *Report) WriteFailures(w io.Writer, limit int) error {
	slices.SortStableFunc(r.failures, func(a, b failure) int { return cmp.Compare(a.number, b.number) })
	for i, f := range r.failures {
		if i == limit && limit > 0 {
			_, err := fmt.Fprintf(w, "and %d more\n", len(r.failures)-limit)
			return err
		}
		if _, err := fmt.Fprintf(w, "%s: %s: %s\n", place(f.number, f.again), f.got, f.message); err != nil {
			return err
		}
	}
	return nil
}

func place(number int, again bool) string {
	if again {
		return fmt.Sprintf("line %d, sent again", number)
	}
	return fmt.Sprintf("line %d", number)
}

// round leaves three digits or so.
func round(d time.Duration) time.Duration {
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond)
	case d < time.Second:
		return d.Round(10 * time.Microsecond)
	default:
		return d.Round(time.Millisecond)
	}
}
