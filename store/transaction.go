package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// transaction runs a batch of commands in one PostgreSQL transaction, in two flights of pipelined statements, or three where something
// must be known before it is known what to lock:
//
//	BEGIN · what is known? read it, if anything is     who may write? Replays and refusals skip the next flight.
//	lock the invoices, move them, read again           decide, without I/O
//	append, turn, deliver, record · COMMIT             answer
//
// Grants of one invoice each are locked in the first flight, those alone of which nothing is known, and there is no second unless
// something was.
//
// READ COMMITTED is set explicitly: each statement sees what was committed before it began, so what is read under the locks
// has every winner that they waited for.
type transaction struct {
	session *session
	catalog *Catalog
	// destinations get what is appended; made is told when something was made for them.
	destinations []Destination
	made         func()
	timeout      time.Duration
	// lockTimeout, when set, is shorter than the session's.
	lockTimeout time.Duration
	// chosen are the commands that the statements under way are about, and locks those whose evidence the locking one takes, one for each
	// invoice.
	chosen []*pending
	locks  []*pending
	out    output
	facts  []facts
	// places are the commands of the batch that the flight under way is about.
	places []int
	// locked says that the first flight has locked what is new; movedRows is how many records moved when the locks were taken.
	locked    bool
	movedRows int64
	// replayed says that the batch before held replays.
	replayed bool
	// now is database time, read after the last wait.
	now time.Time
}

// transactionStatements are prepared when a session is made.
var transactionStatements = []string{
	beginSQL, findKnownSQL, readFactsSQL, readOnInvoiceSQL, clockSQL, lockTimeoutSQL, lockIfUnknownSQL, lockInvoicesSQL, readInvoicesSQL,
	insertOperationsSQL, insertEntitlementsSQL, turnEntitlementsSQL, insertEntriesSQL, insertNotificationsSQL,
	insertDeliveriesSQL, insertAttemptsSQL, commitSQL, rollbackSQL,
}

const (
	beginSQL    = `BEGIN ISOLATION LEVEL READ COMMITTED`
	commitSQL   = `COMMIT`
	rollbackSQL = `ROLLBACK`
	// lockTimeoutSQL holds for the transaction alone.
	lockTimeoutSQL = `SELECT set_config('lock_timeout', $1, true)`
	// now() would be the time of BEGIN, before the wait for the locks.
	clockSQL = `SELECT clock_timestamp()`
)

// unknownFate wraps an error after which the transaction may or may not have committed.
type unknownFate struct{ error }

func (e unknownFate) Unwrap() error { return e.error }

// run decides and commits the batch, and sets the answers once COMMIT is confirmed. After an error nothing is committed,
// unless it is an unknownFate. The session must be connected; ctx carries the trace alone, and is never cancelled.
func (t *transaction) run(ctx context.Context, batch []*pending) error {
	silence := t.session.bound(t.timeout)
	defer silence.Stop()
	if err := t.read(ctx, batch); err != nil {
		return t.abandon(ctx, err)
	}
	silence.Reset(t.timeout)
	if err := t.lock(ctx, batch); err != nil {
		return t.abandon(ctx, err)
	}
	if err := t.decide(batch); err != nil {
		return t.abandon(ctx, err)
	}
	silence.Reset(t.writeTimeout())
	err := t.write(ctx)
	if len(t.out.deliveries) > 0 {
		// Also when the fate of the commit is unknown: a look in vain costs next to nothing.
		t.made()
	}
	if err == nil {
		return nil
	}
	var fate unknownFate
	if errors.As(err, &fate) {
		return err
	}
	return t.abandon(ctx, err)
}

// usualEntries is how many a transaction of grants has at most, unless configured. Only a refund has more, and each of these gets entryTime.
const (
	usualEntries = 1000
	entryTime    = time.Millisecond
)

// writeTimeout bounds the last flight, whose answers all come at its end: what is written meanwhile is no silence.
func (t *transaction) writeTimeout() time.Duration {
	return t.timeout + time.Duration(max(0, len(t.out.entries)-usualEntries))*entryTime
}

// abandon rolls back, so that the session can be used again, and returns why. What the driver complains about while the session
// is well is a bug of ours.
func (t *transaction) abandon(ctx context.Context, why error) error {
	if t.session.conn.IsClosed() {
		return why
	}
	var pg *pgconn.PgError
	if !errors.As(why, &pg) && !errors.Is(why, errRaced) {
		why = fmt.Errorf("%w: %w", errBug, why)
	}
	if _, err := t.session.conn.Exec(ctx, rollbackSQL); err != nil {
		t.session.drop()
	}
	return why
}

// decide climbs the ladder for every command, and collects what is to be written.
func (t *transaction) decide(batch []*pending) error {
	t.out.reset()
	t.replayed = false
	for i, p := range batch {
		f := &t.facts[i]
		t.replayed = t.replayed || f.known != nil
		f.now = t.now
		id := ids{attempt: newID()}
		if p.command.Kind == entitlementv1.OperationKind_OPERATION_KIND_GRANT && f.known == nil && f.entitlement == nil {
			id.entitlement = newID()
		}
		answer, ch, ok := decide(&p.command, f, t.catalog, id)
		if f.moved && answer.Outcome != entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED {
			// This command's evidence moved the record before its key or its effect turned out to be taken, by a winner
			// that the lock waited for. Nothing of it may stay: the next try sees the winner and leaves the invoice alone.
			return errRaced
		}
		if !ok && f.winner == nil {
			p.err = winnerGone(f.entitlement)
			continue
		}
		if !ok {
			p.err = newerRecipe()
			continue
		}
		p.answer, p.err = answer, nil
		t.out.add(&p.command, &p.answer, &ch, id.attempt, f.now, t.destinations)
	}
	return nil
}

// write is the last flight. COMMIT travels with it: the tables' unique constraints stop a lost race, and with it the
// COMMIT. Only where entitlements turn must a row count speak before COMMIT is sent.
func (t *transaction) write(ctx context.Context) error {
	var b pgx.Batch
	t.out.queue(&b)
	statements := b.Len()
	commitAlong := len(t.out.turned) == 0
	if commitAlong {
		b.Queue(commitSQL)
	}
	results := t.session.conn.SendBatch(ctx, &b)
	defer results.Close()
	for _, q := range b.QueuedQueries[:statements] {
		tag, err := results.Exec()
		if err != nil {
			var pg *pgconn.PgError
			if commitAlong && !errors.As(err, &pg) {
				return unknownFate{err}
			}
			return err
		}
		if q.SQL == turnEntitlementsSQL && tag.RowsAffected() != int64(len(t.out.turned)) {
			return errRaced
		}
	}
	if commitAlong {
		tag, err := results.Exec()
		if err == nil {
			err = results.Close()
		}
		return t.confirm(tag, err)
	}
	if err := results.Close(); err != nil {
		return err
	}
	tag, err := t.session.conn.Exec(ctx, commitSQL)
	return t.confirm(tag, err)
}

// confirm accepts nothing but the tag COMMIT, without the notice that the wait for the standby was given up. A COMMIT of an
// aborted transaction succeeds with the tag ROLLBACK.
func (t *transaction) confirm(tag pgconn.CommandTag, err error) error {
	if err == nil && (tag.String() != commitSQL || t.session.unconfirmed) {
		err = errNotCommitted
	}
	if err != nil {
		return unknownFate{err}
	}
	return nil
}

// newID returns a UUID of version 7: ids that follow each other in time stand beside each other in an index.
func newID() uuid.UUID {
	return uuid.Must(uuid.NewV7())
}
