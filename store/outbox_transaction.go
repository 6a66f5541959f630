package store

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// inTransaction runs f in a transaction of the outbox's own sessions, again when a deadlock or a race was lost. After an unknownFate it may
// have committed.
func (s *Store) inTransaction(ctx context.Context, f func(pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := s.tryTransaction(ctx, f)
		if err == nil {
			return nil
		}
		what, reason := interpretError(err)
		if what == runAgain {
			s.writer.meters.failed(err)
		}
		if reason == ReasonReadOnly {
			// These sessions have lost their primary. Later ones go and look for it.
			s.outbox.Reset()
		}
		if what != runAgain || try == maxTries {
			return err
		}
		s.writer.meters.retried(err)
	}
}

func (s *Store) tryTransaction(ctx context.Context, f func(pgx.Tx) error) error {
	tx, err := s.outbox.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx) // nothing is left for it after Commit
	if err := f(tx); err != nil {
		return err
	}
	err = tx.Commit(ctx)
	var pg *pgconn.PgError
	if err != nil && !errors.As(err, &pg) && !errors.Is(err, pgx.ErrTxCommitRollback) {
		return unknownFate{err}
	}
	return err
}
