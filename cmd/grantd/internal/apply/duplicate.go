package apply

import (
	"container/heap"
	"math/rand/v2"
	"sync"
)

// repeatWithinLines bounds how far behind its first arrival the second one is sent, and so how many wait in memory.
const repeatWithinLines = 1000

// chooser decides, the same way for the same seed, which lines are sent again.
type chooser struct {
	share  float64
	random *rand.Rand
}

func newChooser(share float64, seed uint64) *chooser {
	return &chooser{share: share, random: rand.New(rand.NewPCG(seed, 0))}
}

func (c *chooser) choose(l *line) {
	// Both numbers are drawn for each line, so that another share shifts nothing else.
	drawn, after := c.random.Float64(), 2+c.random.IntN(repeatWithinLines-1)
	if drawn < c.share && l.isWrite() {
		l.repeatAfter = after
	}
}

// second is the line's second arrival.
func (l *line) second(first Answer) *line {
	return &line{number: l.number, method: l.method, request: l.request, first: &first}
}

// waiting holds second arrivals until the file has come far enough. It is safe for concurrent use.
type waiting struct {
	mu    sync.Mutex
	lines dueHeap
}

type dueLine struct {
	due  int // line number
	line *line
}

func (w *waiting) add(l *line, due int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	heap.Push(&w.lines, dueLine{due: due, line: l})
}

// pop returns nil when none is due before the given line is sent.
func (w *waiting) pop(number int) *line {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lines) == 0 || w.lines[0].due > number {
		return nil
	}
	return heap.Pop(&w.lines).(dueLine).line
}

type dueHeap []dueLine

func (h dueHeap) Len() int { return len(h) }
func (h dueHeap) Less(i, j int) bool {
	return h[i].due < h[j].due || h[i].due == h[j].due && h[i].line.number < h[j].line.number
}
func (h dueHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)   { *h = append(*h, x.(dueLine)) }
func (h *dueHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
