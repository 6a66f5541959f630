//go:build unix

package pgdev

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed watchdog.sh
var watchdog string

// Below the ports that Linux and macOS hand out by themselves: a client that tries again while the server is down
// could otherwise be given the server's own port, and connect to itself.
const (
	firstPort = 20000
	lastPort  = 32000
)

const launchAttempts = 20

// cluster is one folder with a data directory and the log of its server.
type cluster struct {
	binDir   string
	major    int
	account  *account
	dir      string
	settings map[string]string
	port     int
}

func (c *cluster) dataDir() string { return filepath.Join(c.dir, "pgdata") }
func (c *cluster) logPath() string { return filepath.Join(c.dir, "server.log") }

func (c *cluster) url(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// keptMajor is the major version that made the data directory, 0 where there is none.
func (c *cluster) keptMajor() (int, error) {
	version, err := os.ReadFile(filepath.Join(c.dataDir(), "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(version)))
}

// initialize makes the data directory unless there is one of the same major version.
func (c *cluster) initialize(ctx context.Context) error {
	kept, err := c.keptMajor()
	switch {
	case err != nil:
		return err
	case kept == c.major:
		return nil
	case kept != 0:
		return fmt.Errorf("%s was made by PostgreSQL %d, but the server found in %s is version %d: "+
			"set GRANTD_PG_BIN to the folder of PostgreSQL %d, or use another data directory",
			c.dir, kept, c.binDir, c.major, kept)
	}

	// A process that dies half-way leaves the draft alone.
	draft := c.dataDir() + ".new"
	if err := os.RemoveAll(draft); err != nil {
		return err
	}
	if err := os.Mkdir(draft, 0o700); err != nil {
		return err
	}
	if err := c.account.own(draft); err != nil {
		return err
	}
	args := []string{"-D", draft, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"}
	if c.settings["fsync"] == "off" {
		args = append(args, "--no-sync")
	}
	if _, err := runAs(ctx, c.account, draft, filepath.Join(c.binDir, "initdb"), args...); err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	return os.Rename(draft, c.dataDir())
}

// configure writes the server's files anew at each start; ALTER SYSTEM keeps its own, which wins.
func (c *cluster) configure() error {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "",
		"max_connections":         "200",
		"timezone":                "UTC",
		"log_timezone":            "UTC",
		"log_line_prefix":         "%m [%p] %q%a %d ",
	}
	maps.Copy(settings, c.settings)
	settings["port"] = strconv.Itoa(c.port)
	var conf strings.Builder
	conf.WriteString("# Written anew at each start. Lasting changes: ALTER SYSTEM.\n")
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&conf, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	if err := c.write("postgresql.conf", conf.String()); err != nil {
		return err
	}
	return c.write("pg_hba.conf", "# Written anew at each start.\n"+
		"host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n")
}

// write replaces a file of the data directory. Root must not follow a link that the server's account has put there.
func (c *cluster) write(name, content string) error {
	path := filepath.Join(c.dataDir(), name)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString(content)
	if c.account != nil {
		err = errors.Join(err, file.Chown(int(c.account.uid), int(c.account.gid)))
	}
	return errors.Join(err, file.Close())
}

// process is a running server and the watchdog around it.
type process struct {
	done chan struct{} // closed when both have ended
	err  error         // of the server, once done is closed
}

// lifetime says who keeps a server running.
type lifetime struct {
	users     *os.File // the reading end of the pipe that the users hold open
	idleCount int      // how often, a second apart, it must be found unused
	pipe      string   // its path, where it has one
	remove    string   // the folder to remove at the end, if any
}

// launch starts the server and returns when it accepts connections. It keeps the port of an earlier launch.
func (c *cluster) launch(ctx context.Context, life lifetime) (*process, error) {
	keepPort := c.port != 0
	var failure error
	for range launchAttempts {
		if !keepPort {
			port, err := freePort(ctx)
			if err != nil {
				return nil, err
			}
			c.port = port
		}
		if err := c.configure(); err != nil {
			return nil, err
		}
		if err := c.stopLeftover(ctx); err != nil {
			return nil, err
		}
		if err := c.disarmPIDFile(); err != nil {
			return nil, err
		}
		running, logged, err := c.launchOnce(ctx, life)
		if err == nil {
			return running, nil
		}
		failure = err
		switch {
		case ctx.Err() != nil:
			return nil, failure
		case strings.Contains(logged, "could not bind"):
			// Another process took the port first; where it has to be this one, it may be given back.
		case strings.Contains(logged, "pre-existing shared memory block"):
			// Sessions of a crashed server are still on their way out.
		default:
			return nil, failure
		}
		if err := pause(ctx, 10*pollInterval); err != nil {
			return nil, err
		}
	}
	return nil, failure
}

// launchOnce returns, beside the error, what the server logged.
func (c *cluster) launchOnce(ctx context.Context, life lifetime) (*process, string, error) {
	log, err := os.OpenFile(c.logPath(), os.O_RDWR|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, "", err
	}
	defer log.Close()
	begin, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, "", err
	}

	cmd := exec.Command("/bin/sh", "-c", watchdog, "grantd-watchdog", filepath.Join(c.binDir, "postgres"), c.dataDir(),
		strconv.Itoa(life.idleCount), life.pipe, life.remove)
	cmd.Dir, cmd.Env = c.dataDir(), environment()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{life.users}
	cmd.SysProcAttr = c.account.attributes()
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	running := &process{done: make(chan struct{})}
	go func() {
		running.err = cmd.Wait()
		close(running.done)
	}()

	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		if file, err := readPIDFile(c.dataDir()); err == nil && file.pid != noPID && file.ready {
			return running, "", nil
		}
		select {
		case <-running.done:
			logged := make([]byte, 8<<10)
			n, _ := log.ReadAt(logged, begin)
			text := strings.TrimSpace(string(logged[:n]))
			return nil, text, fmt.Errorf("PostgreSQL did not start (%w):\n%s", running.err, text)
		case <-ctx.Done():
			return nil, "", errors.Join(ctx.Err(), c.stop(running))
		case <-ticker.C:
		}
	}
}

// stop ends the server in order and leaves its data.
func (c *cluster) stop(running *process) error {
	ctx, cancel := context.WithTimeout(context.Background(), fastStopWait+immediateStopWait)
	defer cancel()
	// At the very start there is no file yet that says whom to signal.
	for {
		select {
		case <-running.done:
			return nil
		default:
		}
		file, err := readPIDFile(c.dataDir())
		if err == nil && file.pid != noPID {
			if err := stopServer(ctx, file.pid, c.dataDir()); err != nil {
				return err
			}
			break
		}
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
	return running.wait(ctx)
}

func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("PostgreSQL does not stop: %w", ctx.Err())
	}
}

func freePort(ctx context.Context) (int, error) {
	var failure error
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		var config net.ListenConfig
		listener, err := config.Listen(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, listener.Close()
		}
		failure = err
	}
	return 0, fmt.Errorf("no free port on 127.0.0.1: %w", failure)
}
