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
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// noPID is above what Linux and macOS give to any process.
const noPID = 1<<31 - 1

const (
	fastStopWait      = 60 * time.Second
	immediateStopWait = 10 * time.Second
	pollInterval      = 20 * time.Millisecond
)

// pidFile is what a running server writes to postmaster.pid in its data directory.
type pidFile struct {
	pid   int
	ready bool
}

func readPIDFile(dataDir string) (pidFile, error) {
	content, err := os.ReadFile(filepath.Join(dataDir, "postmaster.pid"))
	if err != nil {
		return pidFile{}, err
	}
	lines := strings.Split(string(content), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(lines[0]))
	if err != nil {
		return pidFile{}, fmt.Errorf("%s: postmaster.pid does not begin with a process id: %w", dataDir, err)
	}
	status := ""
	if len(lines) > 7 {
		status = strings.TrimSpace(lines[7])
	}
	return pidFile{pid: pid, ready: status == "ready" || status == "standby"}, nil
}

// stopLeftover stops a server of an earlier process that still runs in the data directory.
func (c *cluster) stopLeftover(ctx context.Context) error {
	file, err := readPIDFile(c.dataDir())
	if err != nil {
		return nil // a server that runs has a file that can be read
	}
	return stopServer(ctx, file.pid, c.dataDir())
}

func stopServer(ctx context.Context, pid int, dataDir string) error {
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGINT, fastStopWait}, {syscall.SIGQUIT, immediateStopWait}} {
		deadline := time.Now().Add(step.wait)
		if !isServer(ctx, pid, dataDir) {
			return nil
		}
		if err := syscall.Kill(pid, step.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("stopping the server that still runs in %s (process %d): %w", dataDir, pid, err)
		}
		for time.Now().Before(deadline) {
			if !isServer(ctx, pid, dataDir) {
				return nil
			}
			if err := pause(ctx, pollInterval); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("the server that still runs in %s (process %d) does not stop", dataDir, pid)
}

// isServer says whether pid is the server of dataDir: a process id alone proves nothing, after a crash or in a new
// container it often names another process.
func isServer(ctx context.Context, pid int, dataDir string) bool {
	if pid <= 0 || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		command, err = exec.CommandContext(ctx, "ps", "-ww", "-o", "command=", "-p", strconv.Itoa(pid)).Output()
		if err != nil {
			return false
		}
	}
	command = bytes.ReplaceAll(command, []byte{0}, []byte{' '})
	return bytes.Contains(command, []byte("postgres -D "+dataDir+" ")) ||
		bytes.HasSuffix(bytes.TrimSpace(command), []byte("postgres -D "+dataDir))
}

// disarmPIDFile keeps the pid file of a crashed server but writes a process id that cannot exist into it. PostgreSQL
// refuses to start when the id is in use again by any process; without the file it would not notice sessions of the
// crashed server that still hold the shared memory named there.
func (c *cluster) disarmPIDFile() error {
	path := filepath.Join(c.dataDir(), "postmaster.pid")
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := strings.Split(string(content), "\n")
	if len(lines) < 7 {
		return os.Remove(path)
	}
	lines[0] = strconv.Itoa(noPID)
	return c.write("postmaster.pid", strings.Join(lines[:7], "\n")+"\n")
}

func pause(ctx context.Context, interval time.Duration) error {
	timer := time.NewTimer(interval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
