package store

import (
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Failure reasons: why the database gave no answer. They are part of the contract (google.rpc.ErrorInfo.reason).
const (
	ReasonQueueFull           = "QUEUE_FULL"
	ReasonDatabaseUnavailable = "DATABASE_UNAVAILABLE"
	ReasonReadOnly            = "READ_ONLY"
	ReasonCommitUnknown       = "COMMIT_UNKNOWN"
	ReasonLockTimeout         = "LOCK_TIMEOUT"
	ReasonContention          = "CONTENTION"
	ReasonNewerRecipe         = "NEWER_RECIPE"
	ReasonShuttingDown        = "SHUTTING_DOWN"
)

// Failure is a request without an answer: the same request is safe to send again.
type Failure struct {
	// Reason is one of the Reason constants.
	Reason string
	// RetryDelay is how long to wait first.
	RetryDelay time.Duration
	// Overload says that the service, not the database, turned the request away.
	Overload bool
	// cause is for the log alone.
	cause error
}

func (f *Failure) Error() string {
	if f.cause == nil {
		return "retryable: " + f.Reason
	}
	return fmt.Sprintf("retryable: %s: %v", f.Reason, f.cause)
}

func (f *Failure) Unwrap() error { return f.cause }

// newerRecipe says that a newer build wrote the payload. The delay is no longer than others': another replica may be of that build, and a
// retry may reach it.
func newerRecipe() *Failure {
	return &Failure{Reason: ReasonNewerRecipe, RetryDelay: jitter(time.Second)}
}

// winnerGone says that an entitlement is there, and not the operation that made it: somebody has had his hands in the tables.
func winnerGone(e *Entitlement) error {
	return fmt.Errorf("tenant %q: the operation that made entitlement %s is not there", e.Grant.TenantID, e.ID)
}

// ErrNotFound says that the tenant has no such row.
var ErrNotFound = errors.New("not found")

// remedy is what the writer does about an error of a transaction.
type remedy int

const (
	// runAgain: a race or a deadlock was lost; nothing was committed, and the next try sees the winner.
	runAgain remedy = iota
	// splitOff: one command's lock is held elsewhere, or one command's data is refused; the others go on without it.
	splitOff
	// dropConnection: the session is of no use; every command of the batch is answered as retryable.
	dropConnection
	// giveUp: a bug or a wrong set-up, the same for every command.
	giveUp
)

// constraints that a lost race may violate. Any other violation is a bug in the command's data.
var raced = map[string]bool{
	"invoices_pkey":             true,
	"operations_pkey":           true,
	"entitlements_pkey":         true,
	"entitlements_business_key": true,
	"entries_pkey":              true,
	"notifications_pkey":        true,
	"deliveries_pkey":           true,
	"deliveries_id":             true,
	"attempts_pkey":             true,
	"operator_actions_pkey":     true,
}

// rebuilt ends the name of an index that REINDEX CONCURRENTLY makes or replaces. Both are looked at meanwhile, and either may be the one
// that is violated.
var rebuilt = regexp.MustCompile(`_cc(new|old)\d*$`)

// interpretError is the one place that turns an error of the driver into what is done about it, by SQLSTATE and
// constraint name, and names the reason that callers see if nothing more can be done.
func interpretError(err error) (remedy, string) {
	var pg *pgconn.PgError
	if errors.Is(err, errRaced) {
		return runAgain, ReasonContention
	}
	if errors.Is(err, errBug) {
		return giveUp, ""
	}
	if errors.Is(err, errReadOnly) {
		return dropConnection, ReasonReadOnly
	}
	// Whatever keeps a session from being made, a wrong password too, is the set-up's trouble and may pass.
	var connect *pgconn.ConnectError
	if errors.Is(err, errNoSession) || errors.As(err, &connect) || !errors.As(err, &pg) {
		return dropConnection, ReasonDatabaseUnavailable
	}
	switch pg.Code {
	case "40001", "40P01": // serialization_failure, deadlock_detected
		return runAgain, ReasonContention
	case "23505": // unique_violation
		// The partition's name stands in a violation of a partitioned table's key.
		name := rebuilt.ReplaceAllString(pg.ConstraintName, "")
		if raced[name] || name == pg.TableName+"_pkey" {
			return runAgain, ReasonContention
		}
		return splitOff, ""
	case "55P03": // lock_not_available
		return splitOff, ReasonLockTimeout
	case "23514": // check_violation; without a constraint's name, attempts has no partition for today
		if pg.ConstraintName == "" && pg.TableName == "attempts" {
			return dropConnection, ReasonDatabaseUnavailable
		}
		return splitOff, ""
	case "25006": // read_only_sql_transaction
		return dropConnection, ReasonReadOnly
	case "25P03", "25P04": // the session was ended while idle in, or too long in, a transaction
		return dropConnection, ReasonDatabaseUnavailable
	case "0A000", "26000": // cached plan must not change result type; prepared statement does not exist
		return dropConnection, ReasonDatabaseUnavailable
	}
	if len(pg.Code) < 2 {
		return giveUp, ""
	}
	switch pg.Code[:2] {
	case "22", "23": // data exception, constraint violation
		return splitOff, ""
	case "08", "25", "53", "57", "58": // connection, transaction state (idle too long), resources, operator, system
		return dropConnection, ReasonDatabaseUnavailable
	}
	return giveUp, ""
}

// errNoSession says that no session with a writable primary could be made.
var errNoSession = errors.New("no session with a writable primary")

// errReadOnly says that the server takes no writes.
var errReadOnly = errors.New("the server is read-only")

// errBug says that a transaction failed for no reason of the database: the driver could not send or read what a well session has for it,
// or something panicked.
var errBug = errors.New("bug")

// errRaced says that a command took its invoice's lock, moved its record, and then found that it had been answered meanwhile.
var errRaced = errors.New("lost a race")

// errNotCommitted says that COMMIT ended with another tag, or without the standby that it waited for.
var errNotCommitted = errors.New("the commit was not confirmed")
