package outbox_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/grantd/grantd/outbox"
)

// The database refuses one result, and would for ever. It was tried again and again together with all the others, so that none of them was
// recorded, and nothing more was sent.
func TestOutbox_RefusedResultHoldsNobodyUp(t *testing.T) {
	in := newInbox(t, nil)
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, fast+"\n  concurrency: 4", ""))
	b.exec(`ALTER TABLE settled_deliveries ADD CONSTRAINT refused CHECK (tenant_id <> 'refused')`)
	var log bytes.Buffer
	reader := sdkmetric.NewManualReader()
	r := b.start(func(c *outbox.Config) {
		c.Log, c.MeterProvider = slog.New(slog.NewTextHandler(&log, nil)), sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	})
	b.grant("refused", "INV-1", "team_access")
	for i := range 20 {
		b.grant("acme", fmt.Sprint("INV-", i), "team_access")
	}
	b.awaitState("crm", delivered, 20)
	b.awaitState("crm", sending, 1)
	// Nobody holds it any more.
	r.stop()
	if key := b.list("refused", "crm")[0].Key; !strings.Contains(log.String(), "the database refuses a result") || !strings.Contains(log.String(), key) {
		t.Errorf("not logged:\n%s", &log)
	}
	if n := refusedResults(t, reader); n != 1 {
		t.Errorf("%d are counted", n)
	}
	b.exec(`ALTER TABLE settled_deliveries DROP CONSTRAINT refused`)
	b.exec(`UPDATE deliveries SET leased_until = clock_timestamp() WHERE state = 2`)
	b.start()
	b.awaitState("crm", delivered, 21)
}

func refusedResults(t *testing.T, reader *sdkmetric.ManualReader) (n int64) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != "grantd.delivery.results_lost" {
				continue
			}
			for _, p := range m.Data.(metricdata.Sum[int64]).DataPoints {
				if cause, _ := p.Attributes.Value("cause"); cause.AsString() == "refused" {
					n += p.Value
				}
			}
		}
	}
	return n
}

// logged is a log of which the test waits for the first line.
type logged chan struct{}

func (l logged) Write(p []byte) (int, error) {
	select {
	case l <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (l logged) log() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// The database refuses every result, since somebody took away a right. That is no reason to forget what was sent: it is recorded when the
// right is back.
func TestOutbox_ResultsWaitWhereAllAreRefused(t *testing.T) {
	in := newInbox(t, nil)
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, "", ""))
	b.exec(`ALTER TABLE settled_deliveries ADD CONSTRAINT refused CHECK (false)`)
	refused := make(logged, 1)
	b.start(func(c *outbox.Config) { c.Log = refused.log() })
	for i := range 5 {
		b.grant("acme", fmt.Sprint("INV-", i), "team_access")
	}
	waitFor(t, func() (string, bool) { return "not all were sent", in.count() == 5 })
	<-refused
	b.exec(`ALTER TABLE settled_deliveries DROP CONSTRAINT refused`)
	b.awaitState("crm", delivered, 5)
	if in.count() != 5 {
		t.Errorf("%d taken", in.count())
	}
}
