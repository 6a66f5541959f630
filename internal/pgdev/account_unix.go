//go:build unix

package pgdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// account is the operating system's user that the server's processes run as. Nil is the user of this process.
type account struct {
	name     string
	uid, gid uint32
}

// serverAccount returns nil for a normal user. PostgreSQL refuses to run as root, so root lends it another account;
// one with an entry in the user database, because initdb looks its own name up.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "_postgres", "nobody", "daemon"} {
		if entry, err := user.Lookup(name); err == nil {
			return newAccount(entry)
		}
	}
	return nil, errors.New("PostgreSQL does not run as root, and none of the users postgres, _postgres, nobody and daemon exists")
}

// ownerAccount is serverAccount, but where dir exists and belongs to another user than root, its owner: so root
// can go on with the data of a normal user and leaves them usable.
func ownerAccount(dir string) (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return serverAccount()
	}
	if err != nil {
		return nil, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || stat.Uid == 0 {
		return serverAccount()
	}
	return &account{name: "uid " + strconv.FormatUint(uint64(stat.Uid), 10), uid: stat.Uid, gid: stat.Gid}, nil
}

func newAccount(entry *user.User) (*account, error) {
	// macOS writes the ids of nobody as -2.
	uid, err := strconv.ParseInt(entry.Uid, 10, 64)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseInt(entry.Gid, 10, 64)
	if err != nil {
		return nil, err
	}
	return &account{name: entry.Username, uid: uint32(uid), gid: uint32(gid)}, nil
}

// attributes put a process into a session of its own, so that Ctrl-C in a terminal reaches this process alone and the
// server is stopped in order.
func (a *account) attributes() *syscall.SysProcAttr {
	attributes := &syscall.SysProcAttr{Setsid: true}
	if a != nil {
		attributes.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid}
	}
	return attributes
}

// own gives path to the account.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, int(a.uid), int(a.gid))
}

// checkReach says whether the account can enter dir: a parent folder with mode 0700, such as root's home, bars it.
func (a *account) checkReach(ctx context.Context, dir string) error {
	if a == nil {
		return nil
	}
	if _, err := runAs(ctx, a, "/", "/bin/sh", "-c", `cd "$0"`, dir); err != nil {
		return fmt.Errorf("PostgreSQL runs as user %s, because it refuses root, and that user cannot enter %s: "+
			"choose a folder that is open to it and whose parents are, for example %s", a.name, dir, rootData)
	}
	return nil
}

// environment is that of this process without what would change the server: PGDATA, PGPORT, locale.
func environment() []string {
	kept := slices.DeleteFunc(os.Environ(), func(entry string) bool {
		return strings.HasPrefix(entry, "PG") || strings.HasPrefix(entry, "LC_") || strings.HasPrefix(entry, "LANG")
	})
	return append(kept, "LC_ALL=C")
}

// runAs runs a short command and returns its standard output; the error carries what it wrote to standard error.
func runAs(ctx context.Context, a *account, workDir, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = workDir, environment()
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = a.attributes()
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(stderr.String()); text != "" {
			return "", fmt.Errorf("%w: %s", err, text)
		}
		return "", err
	}
	return stdout.String(), nil
}
