package pgdev_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/grantd/grantd/internal/pgdev"
)

type packed struct {
	name, content string
	mode          int64
}

// pack makes a package's tarball and its digest.
func pack(t *testing.T, files []packed) ([]byte, string) {
	t.Helper()
	var tarball bytes.Buffer
	zipped := gzip.NewWriter(&tarball)
	writer := tar.NewWriter(zipped)
	for _, file := range files {
		header := &tar.Header{Name: file.name, Mode: file.mode, Size: int64(len(file.content)), Typeflag: tar.TypeReg}
		if err := writer.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Write([]byte(file.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(tarball.Bytes())
	return tarball.Bytes(), base64.StdEncoding.EncodeToString(sum[:])
}

func TestUnpackPackage_FilesModesAndLinks(t *testing.T) {
	tarball, digest := pack(t, []packed{
		{"package/package.json", "{}", 0o644},
		{"package/native/bin/postgres", "program", 0o644},
		{"package/native/lib/libpq.so.5.18", "library", 0o755},
		{"package/native/share/x/postgres.bki", "data", 0o600},
		{"package/native/pg-symlinks.json", `[{"source":"native/lib/libpq.so.5.18","target":"native/lib/libpq.so.5"},
			{"source":"native/lib/libpq.so.5.18","target":"native/bin/libpq"}]`, 0o644},
	})
	dir := filepath.Join(t.TempDir(), "unpacked")
	if err := pgdev.UnpackPackage(bytes.NewReader(tarball), digest, dir); err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		name, content string
		mode          fs.FileMode
	}{
		{"native/bin/postgres", "program", 0o755},
		{"native/lib/libpq.so.5.18", "library", 0o755},
		{"native/lib/libpq.so.5", "library", 0o755},
		{"native/bin/libpq", "library", 0o755},
		{"native/share/x/postgres.bki", "data", 0o644},
	} {
		path := filepath.Join(dir, want.name)
		content, err := os.ReadFile(path)
		if err != nil || string(content) != want.content {
			t.Errorf("%s holds %q, %v; want %q", want.name, content, err, want.content)
			continue
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want.mode {
			t.Errorf("%s has mode %v, %v; want %v", want.name, info.Mode(), err, want.mode)
		}
	}
	if link, err := os.Readlink(filepath.Join(dir, "native/lib/libpq.so.5")); err != nil || link != "libpq.so.5.18" {
		t.Errorf("the link leads to %q, %v; want a relative one, which bears the move into place", link, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "package.json")); !os.IsNotExist(err) {
		t.Errorf("package.json was unpacked too (%v)", err)
	}
}

func TestUnpackPackage_Refuses(t *testing.T) {
	for name, files := range map[string][]packed{
		"file outside":        {{"package/native/../../outside", "", 0o644}},
		"link to outside":     {{"package/native/pg-symlinks.json", `[{"source":"../outside","target":"native/link"}]`, 0o644}},
		"link from outside":   {{"package/native/pg-symlinks.json", `[{"source":"native/a","target":"../outside"}]`, 0o644}},
		"links of no meaning": {{"package/native/pg-symlinks.json", `{`, 0o644}},
	} {
		t.Run(name, func(t *testing.T) {
			tarball, digest := pack(t, files)
			parent := t.TempDir()
			if err := pgdev.UnpackPackage(bytes.NewReader(tarball), digest, filepath.Join(parent, "unpacked")); err == nil {
				t.Error("the package was unpacked, want an error")
			}
			if _, err := os.Lstat(filepath.Join(parent, "outside")); !os.IsNotExist(err) {
				t.Errorf("something was written outside (%v)", err)
			}
		})
	}
	t.Run("other digest", func(t *testing.T) {
		tarball, _ := pack(t, []packed{{"package/native/bin/postgres", "program", 0o755}})
		_, other := pack(t, nil)
		dir := filepath.Join(t.TempDir(), "unpacked")
		if err := pgdev.UnpackPackage(bytes.NewReader(tarball), other, dir); err == nil {
			t.Error("the package was unpacked, want an error")
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("it was unpacked before it was checked (%v)", err)
		}
	})
}
