package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/store"
)

// ledgerFile tells a story of three invoices in which every write method meets every kind of answer.
var ledgerFile = filepath.Join("..", "..", "acceptance", "testdata", "ledger.jsonl")

// startServe runs `grantd serve` on a new database, and returns its address once it serves, and the database's.
func startServe(t *testing.T, args ...string) (addr, databaseURL string) {
	t.Helper()
	databaseURL = pgtest.New(t)
	ctx, stop := context.WithCancel(context.Background())
	log, stderr := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		args := append([]string{"serve", "--database-url", databaseURL, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"}, args...)
		err := run(ctx, args, nil, io.Discard, stderr)
		stderr.Close()
		ended <- err
	}()
	found := make(chan string, 1)
	go func() {
		serving := regexp.MustCompile(`msg=serving grpc=(\S+)`)
		lines := bufio.NewScanner(log)
		for lines.Scan() {
			if m := serving.FindStringSubmatch(lines.Text()); m != nil {
				found <- m[1]
			}
		}
		close(found)
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("serve ended with %v", err)
		}
	})
	addr, ok := <-found
	if !ok {
		t.Fatal("serve never served")
	}
	return addr, databaseURL
}

// The same file, sent once and with every writing line twice, is told line for line what it expects, and leaves the same ledger.
func TestApply_Ledger(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"once": {nil, []string{
			"OUTCOME_NEWLY_APPLIED        -                 13\n", "OUTCOME_REJECTED             STALE_VERSION     2\n", "answers as expected: all 47\n",
		}},
		"twice": {[]string{"--duplicate", "1"}, []string{"answers as expected: all "}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr, databaseURL := startServe(t, "--catalog", filepath.Join("..", "..", "docs", "catalog.example.yaml"))
			var stdout, stderr bytes.Buffer
			args := append([]string{"apply", ledgerFile, "--check", "--addr", addr}, test.args...)
			if err := run(t.Context(), args, nil, &stdout, &stderr); err != nil {
				t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
			}
			for _, want := range test.want {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("standard output lacks %q:\n%s", want, stdout.String())
				}
			}

			st, err := store.Open(t.Context(), store.Config{DatabaseURL: databaseURL})
			if err != nil {
				t.Fatal(err)
			}
			defer st.Close()
			all, _, err := st.Entitlements(t.Context(), store.EntitlementFilter{TenantID: "acme"}, store.Page{})
			if err != nil {
				t.Fatal(err)
			}
			versions := map[string]int64{}
			for _, e := range all {
				versions[e.Grant.InvoiceID+"/"+e.Grant.EntitlementType] += e.Version
			}
			// Turned four times after the grant; reversed once; granted twice; granted once.
			want := map[string]int64{"INV-1/team_access": 5, "INV-1/beta_features": 2, "INV-1/api_credits": 2, "INV-3/team_access": 1}
			if len(all) != 5 || len(versions) != len(want) {
				t.Errorf("%d entitlements of %v", len(all), versions)
			}
			for effect, version := range want {
				if versions[effect] != version {
					t.Errorf("%s is at version %d, want %d", effect, versions[effect], version)
				}
			}
		})
	}
}
