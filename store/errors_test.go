package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

func TestInterpretError_BySQLSTATE(t *testing.T) {
	for _, c := range []struct {
		err    error
		remedy remedy
		reason string
	}{
		{errRaced, runAgain, ReasonContention},
		{fmt.Errorf("decide: %w", errRaced), runAgain, ReasonContention},
		{&pgconn.PgError{Code: "40001"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "40P01"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "invoices", ConstraintName: "invoices_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "operations", ConstraintName: "operations_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "entitlements", ConstraintName: "entitlements_business_key"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "entries", ConstraintName: "entries_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "deliveries", ConstraintName: "deliveries_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "notifications", ConstraintName: "notifications_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "attempts_20260301", ConstraintName: "attempts_20260301_pkey"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "operations", ConstraintName: "operations_pkey_ccnew"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "attempts_20260301", ConstraintName: "attempts_20260301_pkey_ccold1"}, runAgain, ReasonContention},
		{&pgconn.PgError{Code: "23505", TableName: "other", ConstraintName: "other_name_key"}, splitOff, ""},
		{&pgconn.PgError{Code: "55P03"}, splitOff, ReasonLockTimeout},
		{&pgconn.PgError{Code: "23514", TableName: "entries", ConstraintName: "entries_granted_first"}, splitOff, ""},
		// No partition for today: no command's fault, and it will be made.
		{&pgconn.PgError{Code: "23514", TableName: "attempts"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "22P05"}, splitOff, ""},
		{&pgconn.PgError{Code: "22021"}, splitOff, ""},
		{&pgconn.PgError{Code: "25006"}, dropConnection, ReasonReadOnly},
		{&pgconn.PgError{Code: "25P03"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "0A000"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "26000"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "08006"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "53100"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "53300"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "57014"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "57P01"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "57P03"}, dropConnection, ReasonDatabaseUnavailable},
		{&pgconn.PgError{Code: "58030"}, dropConnection, ReasonDatabaseUnavailable},
		{fmt.Errorf("connect: %w", io.ErrUnexpectedEOF), dropConnection, ReasonDatabaseUnavailable},
		{context.DeadlineExceeded, dropConnection, ReasonDatabaseUnavailable},
		{fmt.Errorf("%w: %w", errNoSession, &pgconn.PgError{Code: "28P01"}), dropConnection, ReasonDatabaseUnavailable},
		{fmt.Errorf("%w: %w", errNoSession, errReadOnly), dropConnection, ReasonReadOnly},
		// The same for every command, until somebody mends it.
		{fmt.Errorf("%w: %w", errBug, io.ErrUnexpectedEOF), giveUp, ""},
		{&pgconn.PgError{Code: "42501"}, giveUp, ""},
		{&pgconn.PgError{Code: "42P01"}, giveUp, ""},
		{&pgconn.PgError{Code: "28P01"}, giveUp, ""},
		{&pgconn.PgError{Code: "XX000"}, giveUp, ""},
	} {
		if what, reason := interpretError(c.err); what != c.remedy || reason != c.reason {
			t.Errorf("%v: got %d %q, want %d %q", c.err, what, reason, c.remedy, c.reason)
		}
	}
}

// Errors as PostgreSQL really words them: the table above trusts that these are the codes and constraint names.
func TestInterpretError_OfARealDatabase(t *testing.T) {
	url := pgtest.New(t)
	connect := func(t *testing.T, settings ...string) *pgx.Conn {
		cfg, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		cfg.RuntimeParams["search_path"] = "grantd"
		for i := 0; i < len(settings); i += 2 {
			cfg.RuntimeParams[settings[i]] = settings[i+1]
		}
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close(context.Background()) })
		return conn
	}
	run := func(t *testing.T, conn *pgx.Conn, statements ...string) (err error) {
		for _, sql := range statements {
			if err != nil {
				t.Fatal(err)
			}
			_, err = conn.Exec(t.Context(), sql)
		}
		return err
	}
	const (
		invoice = `INSERT INTO invoices VALUES ('t', 'i', 2, 1, 'k', now())`
		attempt = `INSERT INTO attempts VALUES ('t', '2026-03-01 12:00Z', '01900000-0000-7000-8000-000000000001', 'k', 1, 1, 0, 0, NULL,
			'i', 'x', 0, '', '', '', NULL, NULL)`
	)
	for _, c := range []struct {
		name    string
		provoke func(t *testing.T) error
		code    string
		remedy  remedy
		reason  string
	}{
		{"a key that is taken", func(t *testing.T) error {
			return run(t, connect(t), "BEGIN", invoice, invoice)
		}, "23505", runAgain, ReasonContention},
		{"a key of a partition that is taken", func(t *testing.T) error {
			return run(t, connect(t), "BEGIN", `CREATE TABLE attempts_20260301 PARTITION OF attempts FOR VALUES FROM ('2026-03-01') TO ('2026-03-02')`,
				attempt, attempt)
		}, "23505", runAgain, ReasonContention},
		{"a key that is taken, while its index is rebuilt", func(t *testing.T) error {
			// A reader keeps the rebuilding from dropping the index that it has replaced.
			reader, rebuilder := connect(t), connect(t)
			if err := run(t, reader, "BEGIN", `SELECT FROM invoices`); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			go func() {
				_, err := rebuilder.Exec(context.Background(), `REINDEX INDEX CONCURRENTLY invoices_pkey`)
				ended <- err
			}()
			conn := connect(t)
			for replaced := false; !replaced; time.Sleep(time.Millisecond) {
				if err := conn.QueryRow(t.Context(), `SELECT to_regclass('invoices_pkey_ccold') IS NOT NULL`).Scan(&replaced); err != nil {
					t.Fatal(err)
				}
			}
			err := run(t, conn, "BEGIN", invoice, invoice)
			conn.Close(t.Context())
			reader.Close(t.Context())
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			return err
		}, "23505", runAgain, ReasonContention},
		{"no partition", func(t *testing.T) error { return run(t, connect(t), attempt) }, "23514", dropConnection, ReasonDatabaseUnavailable},
		{"a lock held elsewhere", func(t *testing.T) error {
			if err := run(t, connect(t), "BEGIN", `LOCK TABLE invoices`); err != nil {
				t.Fatal(err)
			}
			return run(t, connect(t, "lock_timeout", "1"), invoice)
		}, "55P03", splitOff, ReasonLockTimeout},
		{"a deadlock", func(t *testing.T) error {
			one, other := connect(t, "deadlock_timeout", "10"), connect(t, "deadlock_timeout", "10min")
			if err := run(t, one, "BEGIN", `LOCK TABLE invoices`); err != nil {
				t.Fatal(err)
			}
			if err := run(t, other, "BEGIN", `LOCK TABLE entries`); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			go func() {
				_, err := other.Exec(t.Context(), `LOCK TABLE invoices`)
				ended <- err
			}()
			err := run(t, one, `LOCK TABLE entries`)
			one.Close(t.Context())
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			return err
		}, "40P01", runAgain, ReasonContention},
		{"a read-only session", func(t *testing.T) error {
			return run(t, connect(t, "default_transaction_read_only", "on"), invoice)
		}, "25006", dropConnection, ReasonReadOnly},
		{"an escaped NUL in JSON", func(t *testing.T) error { return run(t, connect(t), `SELECT '{"a": "\u0000"}'::jsonb`) }, "22P05", splitOff, ""},
		{"a text that is not UTF-8", func(t *testing.T) error {
			_, err := connect(t).Exec(t.Context(), `SELECT $1::text`, "\xff")
			return err
		}, "22021", splitOff, ""},
		{"a statement that took too long", func(t *testing.T) error {
			return run(t, connect(t, "statement_timeout", "1"), `SELECT pg_sleep(1)`)
		}, "57014", dropConnection, ReasonDatabaseUnavailable},
		{"a session that was idle in a transaction", func(t *testing.T) error {
			conn := connect(t, "idle_in_transaction_session_timeout", "1")
			if err := run(t, conn, "BEGIN"); err != nil {
				t.Fatal(err)
			}
			// What arrives unasked is the end of the session.
			_, err := conn.WaitForNotification(t.Context())
			return err
		}, "25P03", dropConnection, ReasonDatabaseUnavailable},
		{"a session that was ended", func(t *testing.T) error {
			conn := connect(t)
			if err := run(t, connect(t), fmt.Sprintf(`SELECT pg_terminate_backend(%d, 1000)`, conn.PgConn().PID())); err != nil {
				t.Fatal(err)
			}
			_, err := conn.WaitForNotification(t.Context())
			return err
		}, "57P01", dropConnection, ReasonDatabaseUnavailable},
		{"a socket that was closed", func(t *testing.T) error {
			conn := connect(t)
			conn.PgConn().Conn().Close()
			return run(t, conn, invoice)
		}, "", dropConnection, ReasonDatabaseUnavailable},
		{"a table that is not there", func(t *testing.T) error { return run(t, connect(t), `SELECT FROM absent`) }, "42P01", giveUp, ""},
		{"a privilege that is missing", func(t *testing.T) error {
			return run(t, connect(t, "role", serviceRole), `DELETE FROM entries`)
		}, "42501", giveUp, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.provoke(t)
			if err == nil {
				t.Fatal("no error")
			}
			code := ""
			if pg := new(pgconn.PgError); errors.As(err, &pg) {
				code = pg.Code
			}
			what, reason := interpretError(err)
			if code != c.code || what != c.remedy || reason != c.reason {
				t.Errorf("%v: got %q, %d %q; want %q, %d %q", err, code, what, reason, c.code, c.remedy, c.reason)
			}
		})
	}
}

func TestFailure_CauseIsForTheLogAlone(t *testing.T) {
	cause := &pgconn.PgError{Code: "55P03", Message: "canceling statement due to lock timeout"}
	err := fmt.Errorf("apply: %w", &Failure{Reason: ReasonLockTimeout, cause: cause})
	var f *Failure
	if !errors.As(err, &f) || f.Reason != ReasonLockTimeout {
		t.Errorf("%v is not a failure for %s", err, ReasonLockTimeout)
	}
	if !errors.Is(err, error(cause)) {
		t.Errorf("%v does not lead to its cause", err)
	}
}
