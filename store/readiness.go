package store

import (
	"context"
)

// Readiness is whether the store can write, and how safely.
type Readiness struct {
	// Writable says that a primary answers and takes writes.
	Writable bool
	// SynchronousStandbys is how many standbys a commit waits for, or may. At 0, nothing acknowledged survives the loss of the
	// primary; below 0, the service's role may not see it.
	SynchronousStandbys int
}

// readinessSQL asks a session of the kind that look-ups use.
const readinessSQL = `
SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off',
       (SELECT CASE WHEN bool_or(sync_state IS NULL) THEN -1 ELSE count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) END
          FROM pg_stat_replication)::int`

// Ready asks the database. An error means that none answers. A session that died while it was idle is not the database's word,
// so a second one is asked.
func (s *Store) Ready(ctx context.Context) (Readiness, error) {
	var r Readiness
	ask := func() error { return s.house.QueryRow(ctx, readinessSQL).Scan(&r.Writable, &r.SynchronousStandbys) }
	err := ask()
	if what, _ := interpretError(err); err != nil && what == dropConnection {
		err = ask()
	}
	m := s.writer.meters
	m.writable.Store(0)
	if err != nil {
		return Readiness{}, readFailure(err)
	}
	m.standbys.Store(int64(r.SynchronousStandbys))
	if r.Writable {
		m.writable.Store(1)
	}
	return r, nil
}
