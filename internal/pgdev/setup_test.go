package pgdev_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev"
)

// childVariable makes the test binary a process that holds a server until it is killed or its standard input ends:
// "start DIR" or "join DIR".
const childVariable = "GRANTD_PGDEV_TEST_CHILD"

func TestMain(m *testing.M) {
	if task := os.Getenv(childVariable); task != "" {
		if err := hold(context.Background(), task); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func hold(ctx context.Context, task string) error {
	verb, dir, _ := strings.Cut(task, " ")
	if verb == "join" {
		shared, err := pgdev.Join(ctx, dir, sharedOptions())
		if err != nil {
			return err
		}
		fmt.Println(shared.URL("postgres"))
		io.Copy(io.Discard, os.Stdin)
		return shared.Leave()
	}
	server, err := pgdev.Start(ctx, options(dir))
	if err != nil {
		return err
	}
	fmt.Println(server.URL("postgres"))
	io.Copy(io.Discard, os.Stdin)
	return server.Stop()
}

func options(dataDir string) pgdev.Options {
	return pgdev.Options{
		DataDir:  dataDir,
		BinDir:   os.Getenv("GRANTD_PG_BIN"),
		Settings: map[string]string{"fsync": "off", "shared_buffers": "16MB"},
	}
}

func sharedOptions() pgdev.Options {
	o := options("")
	o.IdleSeconds = 2
	return o
}

// child is another process that holds a server.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	url   string
}

func startChild(t *testing.T, task string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+task)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd, stdin: stdin}
	t.Cleanup(c.kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the other process said nothing: %v", err)
	}
	c.url = strings.TrimSpace(line)
	return c
}

// kill is kill -9, and does nothing the second time.
func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// folder returns an empty folder that the server's account can enter, which those of t.TempDir are not for root's.
func folder(t *testing.T) string {
	t.Helper()
	temp, err := pgdev.TempDir(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(temp, "grantd-pgdev-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func start(t *testing.T, dataDir string) *pgdev.Server {
	t.Helper()
	server, err := pgdev.Start(t.Context(), options(dataDir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

func exec1(t *testing.T, url, statement string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), statement); err != nil {
		t.Fatal(err)
	}
}

func rows(t *testing.T, url string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM kept`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits for another process to bring about what is asked for.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 seconds: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return os.IsNotExist(err)
}

func refuses(url string) func() bool {
	return func() bool {
		conn, err := pgx.Connect(context.Background(), url)
		if err == nil {
			conn.Close(context.Background())
		}
		return err != nil
	}
}

func serverPID(t *testing.T, dataDir string) int {
	t.Helper()
	content, err := os.ReadFile(pidFile(dataDir))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func pidFile(dataDir string) string { return filepath.Join(dataDir, "pgdata", "postmaster.pid") }
