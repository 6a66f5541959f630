//go:build unix

package pgdev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const defaultIdleSeconds = 30

// Shared is a user's hold on a server that several processes use.
type Shared struct {
	cluster cluster
	pipe    *os.File
}

// Join returns a hold on the server of this folder, which it makes, and starts one when there is none that answers. The
// server runs while any process holds it and Options.IdleSeconds longer; a killed process lets go as well. Its data are
// lost with it. The folder should be in TempDir.
//
// The options count only for the process that starts the server, so processes that differ in them need different folders.
// Options.DataDir has no meaning here.
func Join(ctx context.Context, dir string, options Options) (*Shared, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := makeSharedDir(dir, account); err != nil {
		return nil, err
	}
	lock, err := lockFile(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if shared, err := joinRunning(ctx, dir); err == nil {
		return shared, nil
	} else if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err := sweep(ctx, dir, account); err != nil {
		return nil, err
	}
	return startShared(ctx, dir, options, account)
}

// URL is as of Server.
func (s *Shared) URL(database string) string { return s.cluster.url(database) }

// Leave gives up the hold; the end of the process does so, too.
func (s *Shared) Leave() error { return s.pipe.Close() }

// makeSharedDir refuses a folder that another user has put in its place. The folder of the runs belongs to the server's
// account, because the watchdog has to remove from it.
func makeSharedDir(dir string, account *account) error {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("%s is not a folder of this user: remove it", dir)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	runs := filepath.Join(dir, "runs")
	if err := os.Mkdir(runs, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	}
	return account.own(runs)
}

// sharedState is the file "current": which run a newcomer joins.
type sharedState struct {
	Dir  string `json:"dir"`
	Port int    `json:"port"`
}

func joinRunning(ctx context.Context, dir string) (*Shared, error) {
	content, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		return nil, err
	}
	var state sharedState
	if err := json.Unmarshal(content, &state); err != nil {
		return nil, err
	}
	// Without a watchdog that reads, this fails at once.
	pipe, err := openUserEnd(filepath.Join(state.Dir, "users"))
	if err != nil {
		return nil, err
	}
	shared := &Shared{cluster: cluster{dir: state.Dir, port: state.Port}, pipe: pipe}
	if err := shared.greet(ctx); err != nil {
		return nil, errors.Join(err, pipe.Close())
	}
	return shared, nil
}

func openUserEnd(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
}

func (s *Shared) greet(ctx context.Context) error {
	if _, err := s.pipe.WriteString("\n"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// sweep removes what servers left that lost their watchdog. One whose watchdog lives sees to itself.
func sweep(ctx context.Context, dir string, account *account) error {
	runs, err := filepath.Glob(filepath.Join(dir, "runs", "*"))
	if err != nil {
		return err
	}
	for _, run := range runs {
		if watched(run) {
			continue
		}
		left := cluster{account: account, dir: run}
		if err := left.stopLeftover(ctx); err != nil {
			return err
		}
		if err := os.RemoveAll(run); err != nil {
			return err
		}
	}
	return nil
}

func watched(run string) bool {
	for _, name := range []string{"users", "users.closed"} {
		if pipe, err := openUserEnd(filepath.Join(run, name)); err == nil {
			pipe.Close()
			return true
		}
	}
	return false
}

func startShared(ctx context.Context, dir string, options Options, account *account) (_ *Shared, err error) {
	run, err := os.MkdirTemp(filepath.Join(dir, "runs"), "")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(run))
		}
	}()
	if err := account.own(run); err != nil {
		return nil, err
	}
	shared := &Shared{cluster: cluster{account: account, dir: run, settings: options.Settings}}
	if err := account.checkReach(ctx, run); err != nil {
		return nil, err
	}
	shared.cluster.binDir, shared.cluster.major, err = findBinaries(ctx, options, account, 0)
	if err != nil {
		return nil, err
	}
	options.logf("starting a shared PostgreSQL %d from %s in %s", shared.cluster.major, shared.cluster.binDir, run)
	if err := shared.cluster.initialize(ctx); err != nil {
		return nil, err
	}

	path := filepath.Join(run, "users")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		return nil, err
	}
	// Neither end of a named pipe opens without the other, unless it need not block.
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	if shared.pipe, err = openUserEnd(path); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, shared.pipe.Close())
		}
	}()
	// The watchdog has to wait in its reads.
	if err := syscall.SetNonblock(int(reader.Fd()), false); err != nil {
		return nil, err
	}
	life := lifetime{users: reader, idleCount: options.IdleSeconds, pipe: path, remove: run}
	if life.idleCount == 0 {
		life.idleCount = defaultIdleSeconds
	}
	if _, err := shared.cluster.launch(ctx, life); err != nil {
		return nil, err
	}
	state, err := json.Marshal(sharedState{Dir: run, Port: shared.cluster.port})
	if err != nil {
		return nil, err
	}
	draft := filepath.Join(dir, "current.new")
	if err := os.WriteFile(draft, state, 0o600); err != nil {
		return nil, err
	}
	return shared, os.Rename(draft, filepath.Join(dir, "current"))
}
