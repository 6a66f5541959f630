package bench

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
)

// Machine is what a measurement was made on.
type Machine struct {
	Cores     int    `json:"cores"`
	Processor string `json:"processor,omitempty"`
	// MemoryBytes is 0 where it is not known.
	MemoryBytes uint64 `json:"memory_bytes,omitempty"`
	System      string `json:"system"`
	Go          string `json:"go"`
	Postgres    int    `json:"postgres"`
}

var (
	processorLine = regexp.MustCompile(`(?m)^model name\s*:\s*(.+)$`)
	memoryLine    = regexp.MustCompile(`(?m)^MemTotal:\s*(\d+) kB`)
)

// readMachine asks Linux for more than Go knows; elsewhere that stays empty.
func readMachine(postgresMajor int) Machine {
	m := Machine{Cores: runtime.NumCPU(), System: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version(), Postgres: postgresMajor}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if match := processorLine.FindSubmatch(text); match != nil {
			m.Processor = strings.TrimSpace(string(match[1]))
		}
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		if match := memoryLine.FindSubmatch(text); match != nil {
			kilobytes, err := strconv.ParseUint(string(match[1]), 10, 64)
			if err == nil {
				m.MemoryBytes = kilobytes << 10
			}
		}
	}
	return m
}

func (m Machine) String() string {
	text := fmt.Sprintf("%d cores", m.Cores)
	if m.Processor != "" {
		text += " (" + m.Processor + ")"
	}
	if m.MemoryBytes > 0 {
		text += fmt.Sprintf(", %.0f GB of memory", float64(m.MemoryBytes)/(1<<30))
	}
	return fmt.Sprintf("%s, %s, %s, PostgreSQL %d", text, m.System, m.Go, m.Postgres)
}
