package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

// A billing system's requests, with all their repeats, changed payloads and unpaid invoices, are told line for line what they must
// be; and so are they when a fifth of them is sent once more.
func TestApply_DataFile(t *testing.T) {
	file := filepath.Join("..", "..", "acceptance", "testdata", "invoice-paid.jsonl.gz")
	for name, args := range map[string][]string{"in order": nil, "with duplicates": {"--duplicate", "0.2"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr, _ := startServe(t)
			var stdout, stderr bytes.Buffer
			if err := run(t.Context(), append([]string{"apply", "--check", file, "--addr", addr}, args...), nil, &stdout, &stderr); err != nil {
				t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
			}
			for _, want := range []string{"OUTCOME_NEWLY_APPLIED        -                 2191", "answers as expected: all 3067"} {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("standard output lacks %q:\n%s", want, stdout.String())
				}
			}
		})
	}
}
