package store_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// metered has the store's instruments read by the reader that it returns.
func metered() (func(*store.Config), *sdkmetric.ManualReader) {
	reader := sdkmetric.NewManualReader()
	return func(c *store.Config) { c.MeterProvider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)) }, reader
}

// series are the values of all series, by name and labels: of a histogram the count.
func series(t testing.TB, reader *sdkmetric.ManualReader) map[string]float64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	note := func(name string, labels attribute.Set, value float64) {
		for _, label := range labels.ToSlice() {
			name += fmt.Sprintf(" %s=%s", label.Key, label.Value.String())
		}
		values[name] = value
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Sum[float64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, p.Value)
				}
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Histogram[int64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Count))
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					note(m.Name, p.Attributes, float64(p.Count))
				}
			default:
				t.Errorf("%s is a %T", m.Name, m.Data)
			}
		}
	}
	return values
}

func wantSeries(t testing.TB, got, want map[string]float64) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if value, ok := got[name]; !ok || value != want[name] {
			t.Errorf("%s is %v (%v), want %v", name, value, ok, want[name])
		}
	}
}

func TestMeters_Answers(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters, func(c *store.Config) { c.QueueLimit = 77 })
	wantSeries(t, series(t, reader), map[string]float64{
		// There before they count: the increase of a series that begins at ten is none.
		"grantd.operations kind=grant matched_by=idempotency_key outcome=conflicting_payload": 0,
		"grantd.duplicates cause=business_key":                                                0,
		"grantd.unanswered reason=queue_full":                                                 0,
		"grantd.unanswered reason=internal":                                                   0,
	})
	want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	want(t, b.Store, grant("t", "k1", "i", "x"), already)
	want(t, b.Store, grant("t", "k2", "i", "x"), already)
	want(t, b.Store, grant("t", "k2", "i", "y"), conflict)
	wantRejected(t, b.Store, record("t", "r", "i", paid, 0), pb.RejectionReason_REJECTION_REASON_STALE_VERSION)
	want(t, b.Store, reverse("t", "v1", "i", "x"), newly)
	want(t, b.Store, reverse("t", "v2", "i", "x"), already)

	now := time.Now()
	exec(t, b.sql, `UPDATE operations SET applied_at = applied_at - interval '500 days' WHERE owner_key IS NOT NULL`)
	maintain(t, b.Store, now)
	got := series(t, reader)
	wantSeries(t, got, map[string]float64{
		"grantd.operations kind=grant outcome=newly_applied":                                  1,
		"grantd.operations kind=grant matched_by=idempotency_key outcome=already_applied":     1,
		"grantd.operations kind=grant matched_by=business_key outcome=already_applied":        1,
		"grantd.operations kind=grant matched_by=idempotency_key outcome=conflicting_payload": 1,
		"grantd.operations kind=record_invoice_state outcome=rejected reason=stale_version":   1,
		"grantd.duplicates cause=idempotency_key":                                             1,
		"grantd.duplicates cause=business_key":                                                2,
		"grantd.commit.batch_size":                                                            7,
		"grantd.commit.duration":                                                              7,
		"grantd.queue.wait":                                                                   7,
		"grantd.queue.depth":                                                                  0,
		"grantd.queue.limit":                                                                  77,
		"grantd.attempts.partitions_ahead":                                                    14,
		"grantd.purged kind=alias":                                                            2,
		"db.client.connection.max db.client.connection.pool.name=reads":                       8,
	})
	if at := got["grantd.maintenance.last_success_timestamp"]; at < float64(now.Unix()) {
		t.Errorf("maintained at %v, want %v or later", at, now.Unix())
	}
}

// Some of a transaction's commands get no answer, though it commits: the payload is one of a newer build, or the winner was deleted. Nobody
// would hear of a rollout that is stuck half-way, or of such a table, if only failed transactions were counted.
func TestMeters_UnansweredBesideOthers(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters)
	want(t, b.Store, grant("t", "newer", "i1", "x"), newly)
	want(t, b.Store, grant("t", "gone", "i2", "x"), newly)
	exec(t, b.sql, `UPDATE operations SET recipe = 99 WHERE idempotency_key = 'newer'`)
	exec(t, b.sql, `DELETE FROM operations WHERE idempotency_key = 'gone'`)
	if _, err := b.ApplyAll(t.Context(), []store.Command{
		*grant("t", "newer", "i1", "x"), *grant("t", "gone", "i2", "x"), *grant("t", "k", "i3", "x"),
	}, nil); err != nil {
		t.Fatal(err)
	}
	b.Close()
	for _, c := range []*store.Command{grant("t", "late", "i4", "x"), reverse("t", "late", "i1", "x")} {
		if _, err := b.Apply(t.Context(), c); err == nil {
			t.Error("applied after the end")
		}
	}
	wantSeries(t, series(t, reader), map[string]float64{
		"grantd.unanswered reason=newer_recipe":              1,
		"grantd.unanswered reason=internal":                  1,
		"grantd.unanswered reason=shutting_down":             1,
		"grantd.unanswered reason=database_unavailable":      1, // its target could not be looked for
		"grantd.operations kind=grant outcome=newly_applied": 3,
	})
}

// A key is taken between the look at it and the insert. The constraint stops the transaction, the next try sees the winner, and the caller
// notices nothing; the meters do.
func TestMeters_LostRace(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters, patient)
	want(t, b.Store, grant("t", "k1", "i", "x"), newly)
	rival, session := begin(t, b.url)
	exec(t, session, `INSERT INTO operations SELECT (jsonb_populate_record(o, '{"idempotency_key": "k2"}')).* FROM operations o`)
	done := make(chan store.Answer)
	go func() {
		a, err := b.Apply(t.Context(), grant("t", "k2", "i", "x"))
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	eventually(t, b.sql, blockedSQL, 0)
	if err := rival.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a.Outcome != already || a.MatchedBy != byKey {
		t.Errorf("got %v by %v", a.Outcome, a.MatchedBy)
	}
	wantSeries(t, series(t, reader), map[string]float64{
		"grantd.commit.constraint_violations constraint=operations_pkey": 1,
		"grantd.commit.failures sqlstate_class=23":                       1,
		"grantd.commit.retries sqlstate_class=23":                        1,
	})
}

// Whoever was told by mail is spared a second one, and that is a duplicate too.
func TestMeters_NotifiedBefore(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters, to(mail))
	want(t, b.Store, telling(grant("t", "k", "i", "x"), "ana@example.com"), newly)
	claimOne(t, b.Store, "mail")
	exec(t, b.sql, `INSERT INTO notifications_sent SELECT tenant_id, entitlement_id, entry_number, template, recipient, now() FROM notifications`)
	leaseOut(t, b)
	if again := claim(t, b.Store, "mail"); len(again) != 0 {
		t.Errorf("%d mails are sent again", len(again))
	}
	wantSeries(t, series(t, reader), map[string]float64{"grantd.duplicates cause=notification": 1})
}

func TestMeters_Orders(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters, to(crm))
	want(t, b.Store, grant("t", "k", "i", "x"), newly)
	d := claimOne(t, b.Store, "crm")
	settle(t, b.Store, store.Dead, d)
	wantOrder(t, newly, 0)(b.Discard(t.Context(), order(d)))
	wantOrder(t, already, 0)(b.Discard(t.Context(), order(d)))
	wantSeries(t, series(t, reader), map[string]float64{
		"grantd.delivery.orders destination=crm kind=discard":   1,
		"grantd.delivery.orders destination=crm kind=redeliver": 0,
	})
}

const lastRound = "grantd.maintenance.last_success_timestamp"

// firstRound waits until the store's own first round of maintenance is over.
func firstRound(t *testing.T, reader *sdkmetric.ManualReader) float64 {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); series(t, reader)[lastRound] == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no round of maintenance")
		}
	}
	return series(t, reader)[lastRound]
}

// A role had lost its right to make partitions. For a fortnight the meter went on to show what there had been on the last good day, and then
// every grant failed.
func TestMeters_PartitionsThatAreNotMade(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters)
	before := firstRound(t, reader)
	today := time.Now().UTC().Truncate(24 * time.Hour)
	for d := 4; d <= 14; d++ {
		exec(t, b.sql, `DROP TABLE attempts_`+today.AddDate(0, 0, d).Format("20060102"))
	}
	exec(t, b.sql, `REVOKE CREATE ON SCHEMA grantd FROM grantd_service`)
	if err := b.Maintain(t.Context(), time.Now()); err == nil {
		t.Fatal("the partitions were made")
	}
	wantSeries(t, series(t, reader), map[string]float64{
		"grantd.attempts.partitions_ahead": 3, lastRound: before,
	})
}

// Somebody had detached the partition of a day to come. Its name was taken for another replica's work: the metric said that all days were
// there, and every write of that day would have failed.
func TestMeters_PartitionThatIsDetached(t *testing.T) {
	withMeters, reader := metered()
	b := setup(t, withMeters)
	firstRound(t, reader)
	exec(t, b.sql, `ALTER TABLE attempts DETACH PARTITION attempts_`+time.Now().UTC().AddDate(0, 0, 5).Format("20060102"))
	maintain(t, b.Store, time.Now())
	wantSeries(t, series(t, reader), map[string]float64{"grantd.attempts.partitions_ahead": 4})
}
