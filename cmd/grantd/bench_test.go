package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/grantd/grantd/cmd/grantd/internal/bench"
)

func smallBench(t *testing.T) benchCmd {
	t.Helper()
	return benchCmd{
		Target: serveGrantsAll(t), Mode: []string{"unary", "batch"}, Keys: []string{"new"}, Callers: []int{1, 4},
		BatchCallers: []int{2}, Batch: 10, Count: 50, Conns: 2,
	}
}

func TestBench_Table(t *testing.T) {
	command := smallBench(t)
	var stdout, stderr bytes.Buffer
	if err := command.run(t.Context(), stdio{stdout: &stdout, stderr: &stderr}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"unary grants, 1 caller ", "unary grants, 4 callers ", "batches of 10 grants, 2 callers ", " 50        0      0\n"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("standard output lacks %q:\n%s", want, stdout.String())
		}
	}
}

func TestBench_JSON(t *testing.T) {
	command := smallBench(t)
	command.JSON, command.Keys = true, []string{"new", "replay"}
	var stdout, stderr bytes.Buffer
	if err := command.run(t.Context(), stdio{stdout: &stdout, stderr: &stderr}); err != nil {
		t.Fatal(err)
	}
	var results []bench.Result
	if err := json.Unmarshal(stdout.Bytes(), &results); err != nil {
		t.Fatal(err)
	}
	if len(results) != 6 || results[5].Requests != 60 && results[5].Requests != 50 || !results[5].Replay {
		t.Errorf("results %+v", results)
	}
	if stderr.Len() != 0 {
		t.Errorf("standard error has %q", stderr.String())
	}
}

func TestBench_Refusals(t *testing.T) {
	for want, change := range map[string]func(*benchCmd){
		"--conns must be at least 1":                                  func(c *benchCmd) { c.Conns = 0 },
		"--batch must be between 1 and 1000":                          func(c *benchCmd) { c.Batch = 1001 },
		"--seconds must be positive":                                  func(c *benchCmd) { c.Count = 0 },
		"--rounds must be at least 1":                                 func(c *benchCmd) { c.Compare, c.Seconds = true, 1 },
		"--compare and --deliveries are two measurements":             func(c *benchCmd) { c.Compare, c.Deliveries, c.Seconds = true, true, 1 },
		"--backlog must be at least 1":                                func(c *benchCmd) { c.Deliveries, c.Seconds, c.Rounds = true, 1, 1 },
		"--seconds, --count and --preload must not be negative":       func(c *benchCmd) { c.Preload = -1 },
		"--callers, --batch-callers and --clients must be at least 1": func(c *benchCmd) { c.Callers = []int{0} },
	} {
		command := smallBench(t)
		change(&command)
		var stdout, stderr bytes.Buffer
		if err := command.run(t.Context(), stdio{stdout: &stdout, stderr: &stderr}); err == nil || err.Error() != want {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
