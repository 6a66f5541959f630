package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// countingReader knows how far a file was read. One goroutine reads, others ask.
type countingReader struct {
	in    io.Reader
	bytes atomic.Int64
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.in.Read(p)
	r.bytes.Add(int64(n))
	return n, err
}

// progress is one line that is overwritten; on anything but a terminal, nothing.
type progress struct {
	out   io.Writer // nil: nothing
	input *countingReader
	size  int64
	begin time.Time

	mu   sync.Mutex
	last time.Time
}

const progressInterval = 200 * time.Millisecond

func newProgress(out io.Writer, input *countingReader, size int64) *progress {
	if !isTerminal(out) {
		out = nil
	}
	return &progress{out: out, input: input, size: size, begin: time.Now()}
}

func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

func (p *progress) show(answered int) {
	if p.out == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if now.Sub(p.last) < progressInterval {
		return
	}
	p.last = now
	text := fmt.Sprintf("%d answered, %.0f per second", answered, float64(answered)/now.Sub(p.begin).Seconds())
	if p.size > 0 {
		text += fmt.Sprintf(", %d %% of the file", 100*p.input.bytes.Load()/p.size)
	}
	fmt.Fprintf(p.out, "\r\x1b[K%s", text)
}

func (p *progress) clear() {
	if p.out != nil {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}
