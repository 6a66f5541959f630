package pgdev_test

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/grantd/grantd/internal/pgdev"
)

func join(t *testing.T, dir string) *pgdev.Shared {
	t.Helper()
	shared, err := pgdev.Join(t.Context(), dir, sharedOptions())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shared.Leave() })
	return shared
}

// runs are the folders of the servers that run or left something.
func runs(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "runs", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestJoin_ProcessesShareOneServerThatOutlivesTheFirst(t *testing.T) {
	dir := filepath.Join(folder(t), "shared")
	first, second := startChild(t, "join "+dir), startChild(t, "join "+dir)
	if first.url != second.url {
		t.Fatalf("two servers: %s and %s", first.url, second.url)
	}
	exec1(t, first.url, `CREATE TABLE kept AS SELECT 1`)
	first.kill()
	third := join(t, dir)
	if n := rows(t, third.URL("postgres")); n != 1 {
		t.Errorf("%d rows for one who came after the first was killed, want 1", n)
	}
	second.kill()
	if err := third.Leave(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server's end after its last user", func() bool { return len(runs(t, dir)) == 0 })
	if !refuses(second.url)() {
		t.Error("the server answers after its folder is gone")
	}
}

func TestJoin_AtTheSameMoment(t *testing.T) {
	dir := filepath.Join(folder(t), "shared")
	urls := make(chan string)
	for range 4 {
		go func() {
			shared, err := pgdev.Join(t.Context(), dir, sharedOptions())
			if err != nil {
				urls <- err.Error()
				return
			}
			urls <- shared.URL("postgres")
			shared.Leave()
		}()
	}
	first := <-urls
	for range 3 {
		if other := <-urls; other != first {
			t.Errorf("%s and %s, want one server", first, other)
		}
	}
	if !strings.HasPrefix(first, "postgres://") {
		t.Error(first)
	}
	eventually(t, "the server's end after its last user", func() bool { return len(runs(t, dir)) == 0 })
}

// A test of an earlier run, or the machine's memory, killed the server. The next run must not fail on what it left.
func TestJoin_ReplacesKilledServer(t *testing.T) {
	dir := filepath.Join(folder(t), "shared")
	dead := join(t, dir)
	old := runs(t, dir)
	if len(old) != 1 {
		t.Fatalf("folders %q, want one", old)
	}
	if err := syscall.Kill(serverPID(t, old[0]), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server's end", refuses(dead.URL("postgres")))

	next := join(t, dir)
	if refuses(next.URL("postgres"))() {
		t.Error("the new server does not answer")
	}
	if err := next.Leave(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of both servers' folders", func() bool { return len(runs(t, dir)) == 0 })
}
