package pgdev_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/grantd/grantd/internal/pgdev"
)

func TestStart_KeepsDataAcrossStarts(t *testing.T) {
	dir := filepath.Join(folder(t), "made", "by start")
	first := start(t, dir)
	exec1(t, first.URL("postgres"), `CREATE TABLE kept AS SELECT 1`)
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	if !refuses(first.URL("postgres"))() {
		t.Error("the server answers after Stop")
	}
	if n := rows(t, start(t, dir).URL("postgres")); n != 1 {
		t.Errorf("%d rows after the second start, want 1", n)
	}
}

func TestStart_TemporaryDataGoWithTheServer(t *testing.T) {
	server := start(t, "")
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	if !missing(server.DataDir()) {
		t.Errorf("%s is still there after Stop", server.DataDir())
	}
}

// A container that is started again gives the process ids of a crashed server to other processes. PostgreSQL takes the
// id in its stale pid file for a running server and refuses to start.
func TestStart_StalePIDFileNamesAnotherProcess(t *testing.T) {
	dir := filepath.Join(folder(t), "data")
	first := start(t, dir)
	exec1(t, first.URL("postgres"), `CREATE TABLE kept AS SELECT 1`)
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(pidFile(dir))
	if err != nil {
		t.Fatalf("a killed server leaves its pid file: %v", err)
	}
	_, rest, _ := strings.Cut(string(content), "\n")
	// PostgreSQL minds processes of its own account only, such as another server's.
	bystander := start(t, "")
	if err := os.WriteFile(pidFile(dir), fmt.Appendf(nil, "%d\n%s", serverPID(t, bystander.DataDir()), rest), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := rows(t, start(t, dir).URL("postgres")); n != 1 {
		t.Errorf("%d rows after the crash, want 1", n)
	}
	if refuses(bystander.URL("postgres"))() {
		t.Error("the process that has the id now was stopped")
	}
}

// `grantd dev` was killed together with the watchdog, and the server lives on without an owner.
func TestStart_StopsServerWithoutOwner(t *testing.T) {
	dir := filepath.Join(folder(t), "data")
	left := start(t, dir)
	exec1(t, left.URL("postgres"), `CREATE TABLE kept AS SELECT 1`)
	if err := left.LoseLock(); err != nil {
		t.Fatal(err)
	}
	second, err := pgdev.Start(t.Context(), options(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer second.Stop()
	if n := rows(t, second.URL("postgres")); n != 1 {
		t.Errorf("%d rows in the second server, want 1", n)
	}
	select {
	case <-left.Done():
	case <-time.After(30 * time.Second):
		t.Error("the first server still runs")
	}
	log, err := os.ReadFile(filepath.Join(dir, "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(log), "was not properly shut down") {
		t.Error("the first server was not stopped in order")
	}
}

func TestStart_RefusesFolderInUse(t *testing.T) {
	dir := filepath.Join(folder(t), "data")
	first := start(t, dir)
	second, err := pgdev.Start(t.Context(), options(dir))
	if err == nil {
		second.Stop()
		t.Fatal("two servers started in one folder")
	}
	if !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("error %q does not say that the folder is in use", err)
	}
	if refuses(first.URL("postgres"))() {
		t.Error("the first server does not answer any more")
	}
}

func TestStart_RefusesOtherMajorVersion(t *testing.T) {
	dir := filepath.Join(folder(t), "data")
	first := start(t, dir)
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "pgdata", "PG_VERSION"), []byte("9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	second, err := pgdev.Start(t.Context(), options(dir))
	if err == nil {
		second.Stop()
		t.Fatal("a server started on data of version 9")
	}
	if want := "made by PostgreSQL 9, but the server found in"; !strings.Contains(err.Error(), want) {
		t.Errorf("error %q lacks %q", err, want)
	}
}

func TestStart_ReportsWhatTheServerSays(t *testing.T) {
	wrong := options("")
	wrong.Settings["no_such_setting"] = "1"
	server, err := pgdev.Start(t.Context(), wrong)
	if err == nil {
		server.Stop()
		t.Fatal("the server started with an unknown setting")
	}
	if !strings.Contains(err.Error(), `unrecognized configuration parameter "no_such_setting"`) {
		t.Errorf("error %q lacks the server's own words", err)
	}
}

func TestRestart_RecoversOnTheSamePort(t *testing.T) {
	server := start(t, "")
	url := server.URL("postgres")
	exec1(t, url, `CREATE TABLE kept AS SELECT 1`)
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if !refuses(url)() {
		t.Fatal("the server answers after Kill")
	}
	if err := server.Restart(t.Context(), map[string]string{"default_transaction_read_only": "on"}); err != nil {
		t.Fatal(err)
	}
	if server.URL("postgres") != url {
		t.Errorf("the URL changed from %s to %s", url, server.URL("postgres"))
	}
	if n := rows(t, url); n != 1 {
		t.Errorf("%d rows after the crash, want 1", n)
	}
	if err := server.Halt(); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(t.Context(), map[string]string{"default_transaction_read_only": "off"}); err != nil {
		t.Fatal(err)
	}
	exec1(t, url, `DELETE FROM kept`)
}

func TestStart_ServerEndsWithItsKilledOwner(t *testing.T) {
	for _, name := range []string{"kept", "temporary"} {
		t.Run(name, func(t *testing.T) {
			task, dir := "start ", ""
			if name == "kept" {
				dir = filepath.Join(folder(t), "data")
				task += dir
			}
			owner := startChild(t, task)
			if refuses(owner.url)() {
				t.Fatal("the server does not answer")
			}
			owner.kill()
			eventually(t, "the server's end", refuses(owner.url))
			if dir != "" {
				eventually(t, "the shutdown in order, which removes the pid file", func() bool { return missing(pidFile(dir)) })
			}
		})
	}
}
