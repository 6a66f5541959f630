package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// serviceRole is the role that every session of the service takes: it may append to the ledger, never change it.
const serviceRole = "grantd_service"

// sessionSettings are sent with every connection. A value in the database URL goes before.
var sessionSettings = map[string]string{
	"application_name": "grantd",
	"role":             serviceRole,
	"search_path":      "grantd",
	"timezone":         "UTC",
	// What is sent and read is UTF-8, whatever the role or the database is set to.
	"client_encoding": "UTF8",
	// What is acknowledged has reached the disk, and the synchronous standby where one is set up.
	"synchronous_commit": "on",
	// A dead host must not hold locks.
	"tcp_keepalives_idle":                 "30",
	"tcp_keepalives_interval":             "10",
	"tcp_keepalives_count":                "3",
	"tcp_user_timeout":                    "30000",
	"idle_in_transaction_session_timeout": "10000",
	// Every statement is a probe of indexes for a handful of keys, whatever the statistics of a fresh table say.
	"enable_seqscan":   "off",
	"enable_hashjoin":  "off",
	"enable_mergejoin": "off",
	"enable_material":  "off",
	"plan_cache_mode":  "force_generic_plan",
	"jit":              "off",
}

func applySettings(cfg *pgconn.Config) {
	if cfg.RuntimeParams == nil {
		cfg.RuntimeParams = make(map[string]string)
	}
	for name, value := range sessionSettings {
		if _, set := cfg.RuntimeParams[name]; !set {
			cfg.RuntimeParams[name] = value
		}
	}
}

// session is a connection that one committer owns. Committers use no pool, so that a transaction can never wait for a second
// connection.
type session struct {
	config      *pgx.ConnConfig
	lockTimeout time.Duration
	// commitTimeout is how long a COMMIT may be silent.
	commitTimeout time.Duration
	// ended ends the making of a connection, and lets no other be made.
	ended context.Context
	conn  *pgx.Conn
	// socket is the connection's, for whoever must end it from outside.
	socket atomic.Pointer[net.Conn]
	// established makes the dialer refuse: the only thing that pgx would dial for then is a cancel request, and one that
	// reaches a COMMIT waiting for its standby makes the commit visible without it.
	established *atomic.Bool
	// unconfirmed is set by the notice that a commit did not wait for its standby to the end.
	unconfirmed bool
}

var errNoCancelRequests = errors.New("cancel requests are not sent")

// connect makes sure that there is a connection to a writable primary. It belongs to no call's trace. The timeout is each address's own: one
// that is silent, as a lost primary is, must leave time for the next. A name in the URL may have several.
func (s *session) connect(timeout time.Duration) error {
	if s.conn != nil && !s.conn.IsClosed() {
		return nil
	}
	cfg := s.config.Copy()
	cfg.ConnectTimeout = timeout
	cfg.ValidateConnect = validateWriter(s.commitTimeout)
	dial, established := cfg.DialFunc, new(atomic.Bool)
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if established.Load() {
			return nil, errNoCancelRequests
		}
		return dial(ctx, network, addr)
	}
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.Routine == "SyncRepWaitForLSN" {
			s.unconfirmed = true
		}
	}
	conn, err := pgx.ConnectConfig(s.ended, cfg)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoSession, err)
	}
	ctx, cancel := context.WithTimeout(s.ended, timeout)
	defer cancel()
	registerArrays(conn.TypeMap())
	if err := registerRowTypes(ctx, conn); err != nil {
		conn.Close(ctx)
		return fmt.Errorf("%w: %w", errNoSession, err)
	}
	for _, sql := range transactionStatements {
		// Prepared under its own text, so that no transaction has to.
		if _, err := conn.Prepare(ctx, sql, sql); err != nil {
			conn.Close(ctx)
			return fmt.Errorf("%w: prepare: %w", errNoSession, err)
		}
	}
	// Not before: preparing needs locks too, of a table that may just be getting a partition.
	if _, err := conn.Exec(ctx, sessionLockTimeoutSQL, fmt.Sprint(s.lockTimeout.Milliseconds())); err != nil {
		conn.Close(ctx)
		return fmt.Errorf("%w: %w", errNoSession, err)
	}
	s.conn, s.established, s.unconfirmed = conn, established, false
	socket := conn.PgConn().Conn()
	s.socket.Store(&socket)
	s.established.Store(true)
	return nil
}

// standbyAwaitedSQL says whether the service's commits wait for a synchronous standby, and have for a time. Where the service's role may not
// see it, none does.
const standbyAwaitedSQL = `
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE application_name = current_setting('application_name') AND wait_event = 'SyncRep'
                  AND clock_timestamp() - query_start > make_interval(secs => $1))`

var errStandbyAwaited = errors.New("commits wait for the synchronous standby")

// validateWriter refuses a server that takes no writes, or whose commits could not be confirmed, so that another one is asked: this may be an
// old primary beside the new one. PostgreSQL also keeps a session that waits for the standby after its client has left, so that each new
// one would be one less for everybody.
func validateWriter(commitTimeout time.Duration) pgconn.ValidateConnectFunc {
	after := strconv.FormatFloat((commitTimeout / 2).Seconds(), 'f', -1, 64)
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if err := pgconn.ValidateConnectTargetSessionAttrsReadWrite(ctx, conn); err != nil {
			return fmt.Errorf("%w: %w", errReadOnly, err)
		}
		result := conn.ExecParams(ctx, standbyAwaitedSQL, [][]byte{[]byte(after)}, nil, nil, nil).Read()
		if result.Err != nil {
			return result.Err
		}
		if len(result.Rows) == 1 && string(result.Rows[0][0]) == "t" {
			return errStandbyAwaited
		}
		return nil
	}
}

// bound closes the socket after a time, so that a silent network ends the waiting, unless the timer is stopped or set anew.
func (s *session) bound(timeout time.Duration) *time.Timer {
	return time.AfterFunc(timeout, s.cut)
}

const sessionLockTimeoutSQL = `SELECT set_config('lock_timeout', $1, false)`

// cut closes the socket, from any goroutine. Whatever is under way there fails.
func (s *session) cut() {
	if socket := s.socket.Load(); socket != nil {
		(*socket).Close()
	}
}

// drop ends the connection. The server rolls back what was open.
func (s *session) drop() {
	if s.conn == nil {
		return
	}
	socket := s.conn.PgConn().Conn()
	socket.SetDeadline(time.Now().Add(time.Second))
	s.conn.Close(context.Background())
	s.conn = nil
}
