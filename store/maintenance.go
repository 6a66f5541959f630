package store

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// maintenanceInterval is how often the store looks for what has expired.
	maintenanceInterval = 10 * time.Minute
	// maintenanceTimeout bounds one look, so that a silent server does not end them all.
	maintenanceTimeout = time.Hour
	// partitionsAhead is how many days of attempts have a partition before they come: a service that cannot make one has that
	// long to be noticed before a grant fails for want of it.
	partitionsAhead = 14
	// purgeBatch is how many aliases or deliveries one statement removes, so that no lock is held for long.
	purgeBatch = 1000
)

// startMaintenance makes the partitions that are needed at once, then looks after them, and after what has expired, until the
// store is closed. Every replica does so; they do not mind each other.
func (s *Store) startMaintenance(ctx context.Context) error {
	now, err := s.databaseTime(ctx)
	if err == nil {
		err = s.makePartitions(ctx, now)
	}
	if err != nil {
		return fmt.Errorf("make the partitions of attempts: %w", err)
	}
	ctx, s.stopMaintenance = context.WithCancel(context.WithoutCancel(ctx))
	s.maintenance.Go(func() {
		tick := time.NewTicker(maintenanceInterval)
		defer tick.Stop()
		for {
			if err := s.maintainNow(ctx); err != nil && ctx.Err() == nil {
				s.config.Log.Error("maintenance failed, and will be tried again", "error", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return nil
}

func (s *Store) maintainNow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maintenanceTimeout)
	defer cancel()
	now, err := s.databaseTime(ctx)
	if err != nil {
		return err
	}
	return s.Maintain(ctx, now)
}

// databaseTime is the clock that rows are written by.
func (s *Store) databaseTime(ctx context.Context) (now time.Time, err error) {
	err = s.house.QueryRow(ctx, clockSQL).Scan(&now)
	return now, err
}

// Maintain makes the partitions of the coming days, and removes what has expired as of now: aliases, attempts and settled deliveries. What
// it removes never reopens anything: a purged alias of a grant still meets the business key, and deliveries are made with entries alone.
func (s *Store) Maintain(ctx context.Context, now time.Time) error {
	if err := s.makePartitions(ctx, now); err != nil {
		return err
	}
	if err := s.purgeAliases(ctx, now.Add(-s.config.AliasRetention)); err != nil {
		return err
	}
	if err := s.purgeDeliveries(ctx, now.Add(-s.config.DeliveryRetention)); err != nil {
		return err
	}
	if err := s.dropPartitions(ctx, now.Add(-s.config.AttemptRetention)); err != nil {
		return err
	}
	s.writer.meters.maintained.Store(time.Now().Unix())
	return nil
}

// purgeDeliveriesSQL removes some deliveries that were settled before a time, with their attempts. What operators did and who was
// told stays.
const purgeDeliveriesSQL = `
WITH old AS (
    DELETE FROM settled_deliveries d
     USING (SELECT tenant_id, entitlement_id, entry_number, destination FROM settled_deliveries
             WHERE settled_at IS NOT NULL AND settled_at < $1
             ORDER BY settled_at LIMIT $2
               FOR UPDATE SKIP LOCKED) AS c
     WHERE d.tenant_id = c.tenant_id AND d.entitlement_id = c.entitlement_id AND d.entry_number = c.entry_number
       AND d.destination = c.destination
    RETURNING d.tenant_id, d.delivery_id), gone AS (
    DELETE FROM delivery_attempts a USING old
     WHERE a.tenant_id = old.tenant_id AND a.delivery_id = old.delivery_id)
SELECT count(*) FROM old`

func (s *Store) purgeDeliveries(ctx context.Context, before time.Time) error {
	for {
		var n int
		if err := s.reads.QueryRow(ctx, purgeDeliveriesSQL, before, purgeBatch).Scan(&n); err != nil {
			return fmt.Errorf("purge deliveries: %w", err)
		}
		s.writer.meters.removed(purgedDeliveries, int64(n))
		if n < purgeBatch {
			return nil
		}
	}
}

// purgeAliasesSQL calls a function, since the service's role may delete nothing of operations by itself.
const purgeAliasesSQL = `SELECT purge_aliases($1, $2)`

func (s *Store) purgeAliases(ctx context.Context, before time.Time) error {
	for {
		var purged int64
		if err := s.house.QueryRow(ctx, purgeAliasesSQL, before, purgeBatch).Scan(&purged); err != nil {
			return fmt.Errorf("purge aliases: %w", err)
		}
		s.writer.meters.removed(purgedAliases, purged)
		if purged < purgeBatch {
			return nil
		}
	}
}

// partitionName is the table of a day of attempts, in UTC.
func partitionName(day time.Time) string {
	return "attempts_" + day.Format("20060102")
}

var partitionPattern = regexp.MustCompile(`^attempts_(\d{8})$`)

// partitionDay reads the day from a partition's name.
func partitionDay(name string) (time.Time, bool) {
	m := partitionPattern.FindStringSubmatch(name)
	if m == nil {
		return time.Time{}, false
	}
	day, err := time.Parse("20060102", m[1])
	return day, err == nil
}

// listPartitionsSQL names the tables of attempts, attached or not: one that was detached before a crash is still to be dropped.
const listPartitionsSQL = `
SELECT c.relname, i.inhrelid IS NOT NULL, COALESCE(i.inhdetachpending, false)
  FROM pg_class c
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
 WHERE c.relnamespace = 'grantd'::regnamespace AND c.relkind = 'r' AND c.relname ~ '^attempts_[0-9]{8}$'
 -- One whose detaching was cut off comes first: until it is finished, no other can be detached.
 ORDER BY COALESCE(i.inhdetachpending, false) DESC, c.relname`

type partition struct {
	Name          string
	Attached      bool
	DetachPending bool
}

func (s *Store) partitions(ctx context.Context) ([]partition, error) {
	rows, err := s.house.Query(ctx, listPartitionsSQL)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[partition])
}

// makePartitions makes those of yesterday, which a clock behind the database's may still need, to partitionsAhead.
func (s *Store) makePartitions(ctx context.Context, now time.Time) error {
	have, err := s.partitions(ctx)
	if err != nil {
		return err
	}
	attached := make(map[string]bool, len(have))
	for _, p := range have {
		attached[p.Name] = p.Attached
	}
	missing := false
	today := now.UTC().Truncate(24 * time.Hour)
	for d := -1; d <= partitionsAhead; d++ {
		day := today.AddDate(0, 0, d)
		if !attached[partitionName(day)] {
			switch err := s.makePartition(ctx, day); {
			case errors.Is(err, errNameTaken):
				s.config.Log.ErrorContext(ctx, "a day of attempts has no partition, since a table has its name", "table", partitionName(day))
				missing = missing || d >= 0
			case err != nil:
				return fmt.Errorf("make %s: %w", partitionName(day), err)
			}
		}
		if !missing {
			s.writer.meters.partitionsEnd.Store(day.AddDate(0, 0, 1).Unix())
		}
	}
	return nil
}

// errNameTaken says that a table that is no partition has a partition's name: somebody detached it.
var errNameTaken = errors.New("the name is taken")

// makePartition waits a short time for its lock only, since the writes queue behind it.
func (s *Store) makePartition(ctx context.Context, day time.Time) error {
	err := pgx.BeginFunc(ctx, s.house, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'`); err != nil {
			return err
		}
		// Made apart and then attached: that waits for no reader and keeps no writer waiting, as PARTITION OF would.
		if _, err := tx.Exec(ctx, fmt.Sprintf(`CREATE TABLE %s (LIKE attempts INCLUDING ALL)`, partitionName(day))); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE attempts ATTACH PARTITION %s FOR VALUES FROM ('%s') TO ('%s')`,
			partitionName(day), day.Format(time.RFC3339), day.AddDate(0, 0, 1).Format(time.RFC3339)))
		return err
	})
	if hasCode(err, "42P07", "42710", "23505") { // duplicate table, object or catalogue row: another replica made it meanwhile
		have, err := s.partitions(ctx)
		if err == nil && !slices.Contains(have, partition{Name: partitionName(day), Attached: true}) {
			err = errNameTaken
		}
		return err
	}
	return err
}

func hasCode(err error, codes ...string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && slices.Contains(codes, pg.Code)
}

// anotherReplica is what is told to the one that comes second to a partition: undefined_table, object_not_in_prerequisite_state,
// deadlock_detected. The next round finds what is left.
var anotherReplica = []string{"42P01", "55000", "40P01"}

// dropPartitions removes the days that ended before a time. They are detached concurrently first, so that no write waits.
func (s *Store) dropPartitions(ctx context.Context, before time.Time) error {
	have, err := s.partitions(ctx)
	if err != nil {
		return err
	}
	for _, p := range have {
		day, ok := partitionDay(p.Name)
		if !ok || day.AddDate(0, 0, 1).After(before) {
			continue
		}
		if p.Attached {
			how := "CONCURRENTLY"
			if p.DetachPending {
				how = "FINALIZE"
			}
			_, err := s.house.Exec(ctx, fmt.Sprintf(`ALTER TABLE attempts DETACH PARTITION %s %s`, p.Name, how))
			if hasCode(err, anotherReplica...) {
				continue
			}
			if err != nil {
				return fmt.Errorf("detach %s: %w", p.Name, err)
			}
		}
		switch _, err := s.house.Exec(ctx, `DROP TABLE IF EXISTS `+p.Name); {
		case err == nil:
			s.writer.meters.removed(purgedDays, 1)
		case !hasCode(err, anotherReplica...):
			return fmt.Errorf("drop %s: %w", p.Name, err)
		}
	}
	return nil
}
