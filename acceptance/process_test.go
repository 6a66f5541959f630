package acceptance_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// builtBinary is cmd/grantd, built once for all tests of the package.
var builtBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "grantd-acceptance-")
	if err != nil {
		return "", err
	}
	binaryDir = dir
	name := filepath.Join(dir, "grantd")
	out, err := exec.Command("go", "build", "-o", name, "github.com/grantd/grantd/cmd/grantd").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return name, nil
})

// binaryDir goes away with the tests.
var binaryDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if binaryDir != "" {
		os.RemoveAll(binaryDir)
	}
	os.Exit(code)
}

// process is a `grantd serve`.
type process struct {
	*exec.Cmd
	addr string
	// web is the address for health and metrics over HTTP.
	web string
	// exited is closed when it is gone; err is then what Wait said.
	exited chan struct{}
	err    error

	mu     sync.Mutex
	logged []string
}

// line waits for a line of the log that holds all of these.
func (p *process) line(t testing.TB, parts ...string) string {
	t.Helper()
	found := -1
	eventually(t, fmt.Sprintf("a line of the log has %q", parts), func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		found = slices.IndexFunc(p.logged, func(line string) bool {
			return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
		})
		return found >= 0
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.logged[found]
}

// serveProcess starts `grantd serve` on a database and returns when it takes calls. addr may name the port of one before it.
func serveProcess(t testing.TB, url, addr string, flags ...string) *process {
	t.Helper()
	binary, err := builtBinary()
	if err != nil {
		t.Fatalf("building grantd: %v", err)
	}
	args := append([]string{"serve", "--database-url", url, "--grpc-addr", addr, "--http-addr", "127.0.0.1:0"}, flags...)
	p := &process{Cmd: exec.Command(binary, args...), exited: make(chan struct{})}
	stderr, err := p.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	serving := make(chan struct{})
	go func() {
		defer close(p.exited)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			line := lines.Text()
			p.mu.Lock()
			p.logged = append(p.logged, line)
			p.mu.Unlock()
			if strings.Contains(line, "msg=serving") {
				for _, field := range strings.Fields(line) {
					switch name, value, _ := strings.Cut(field, "="); name {
					case "grpc":
						p.addr = value
					case "http":
						p.web = value
					}
				}
				close(serving)
			}
			if strings.Contains(line, "level=ERROR") || strings.HasPrefix(line, "grantd: ") || strings.Contains(line, "panic") {
				fmt.Fprintln(t.Output(), line)
			}
		}
		p.err = p.Wait()
	}()
	t.Cleanup(func() {
		p.kill()
		<-p.exited
	})
	select {
	case <-serving:
	case <-p.exited:
		t.Fatalf("grantd ended before it served: %v", p.err)
	case <-time.After(30 * time.Second):
		t.Fatal("grantd does not serve after 30 s")
	}
	return p
}

// kill is kill -9.
func (p *process) kill() {
	if err := p.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		panic(err)
	}
}

func (p *process) terminate(t testing.TB) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// waitQueued waits until that many commands wait in the process for their turn.
func (p *process) waitQueued(t testing.TB, commands int) {
	t.Helper()
	eventually(t, "the commands are queued", func() bool {
		resp, err := http.Get("http://" + p.web + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "grantd_queue_depth") {
				depth := strings.Fields(line)
				return depth[len(depth)-1] == strconv.Itoa(commands)
			}
		}
		t.Fatal("no depth of the queue among the metrics")
		return false
	})
}
