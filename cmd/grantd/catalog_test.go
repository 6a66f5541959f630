package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// A service that started with half a catalogue would refuse grants that were paid for.
func TestServe_BadCatalog(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "catalog.yaml")
	if err := os.WriteFile(bad, []byte("types:\n  team_access:\n    description: Seats\n    repeatable: maybe\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	url := pgtest.New(t)
	for name, test := range map[string]struct {
		args, env []string
		want      string
	}{
		"flag":     {[]string{"--catalog", bad}, nil, bad + ":4: types.team_access.repeatable: must be true or false"},
		"variable": {nil, []string{"GRANTD_CATALOG=" + bad}, bad + ":4: types.team_access.repeatable: must be true or false"},
		"no file":  {[]string{"--catalog", filepath.Join(dir, "none.yaml")}, nil, "none.yaml: no such file"},
		"a folder": {[]string{"--catalog", dir}, nil, "is a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"serve", "--database-url", url, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"}, test.args...)
			err := run(t.Context(), args, test.env, io.Discard, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestLoadCatalog(t *testing.T) {
	if c, err := loadCatalog(""); c != nil || err != nil {
		t.Errorf("without a file: %v, %v, want the catalogue that accepts every type", c, err)
	}
	c, err := loadCatalog(filepath.Join("..", "..", "docs", "catalog.example.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !c.Types["api_credits"].Repeatable {
		t.Errorf("api_credits is not repeatable: %+v", c.Types)
	}
}
