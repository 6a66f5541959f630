package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/grantd/grantd/internal/pgdev"
)

// DeliveriesOptions say how deliveries are measured.
type DeliveriesOptions struct {
	// Serve is the command that starts a server; the flags for its database, addresses and destinations are added.
	Serve []string
	// Duration is that of one measurement of grants.
	Duration time.Duration
	Rounds   int
	Conns    int
	// Backlog is how many deliveries at least wait when the draining of them begins.
	Backlog int
	// Concurrency is that of the destination; 0 leaves the default.
	Concurrency int
	// BinDir and Settings are those of the private PostgreSQL.
	BinDir   string
	Settings map[string]string
	// StartNATS starts a NATS server that keeps its streams in dir.
	StartNATS func(dir string) (url string, stop func(), err error)
	// Logf receives a line for each measurement.
	Logf func(format string, args ...any)
}

// comparedCallers make the grants that deliveries are compared with, sustainedCallers those of which a destination gets the events meanwhile.
var comparedCallers = []int{32, 128, 512}

const sustainedCallers = 128

// drainTimeout bounds the wait for deliveries that do not come.
const drainTimeout = 5 * time.Minute

// Measure is one measurement of grants or of deliveries.
type Measure struct {
	Name      string  `json:"name"`
	PerSecond float64 `json:"per_second"`
	// ServerMicros, PostgresMicros and LoadMicros are the CPU time of one grant or delivery; 0 where the system does not tell. The load is
	// the callers, or the receiver or broker.
	ServerMicros   float64 `json:"server_cpu_us"`
	PostgresMicros float64 `json:"postgres_cpu_us"`
	LoadMicros     float64 `json:"load_cpu_us"`
	// GrantsPerSecond, Waiting and CatchUpSeconds are those of a sustained measurement: grants made beside the deliveries, how many
	// deliveries waited when the grants ended, and how long it took until none did. The CPU time is then that of a grant and its
	// delivery.
	GrantsPerSecond float64 `json:"grants_per_second,omitempty"`
	Waiting         int64   `json:"waiting,omitempty"`
	CatchUpSeconds  float64 `json:"catch_up_seconds,omitempty"`
}

// DeliveriesReport is what Deliveries measured: one measure a round for each name of Names.
type DeliveriesReport struct {
	Machine  Machine               `json:"machine"`
	Settings map[string]string     `json:"postgres_settings"`
	Seconds  float64               `json:"seconds_per_point"`
	Rounds   int                   `json:"rounds"`
	Backlog  int                   `json:"backlog"`
	Names    []string              `json:"names"`
	Results  map[string][]*Measure `json:"results"`
}

// deliveryBench is a run of Deliveries.
type deliveryBench struct {
	DeliveriesOptions
	report     *DeliveriesReport
	database   *database
	postmaster int
	dir        string
}

// Deliveries starts a private PostgreSQL and measures, in several rounds, one server that makes grants, without a destination and with one
// that takes no events meanwhile, one that drains the backlog of that, and one that grants and delivers at once. All of it is gone afterwards.
func Deliveries(ctx context.Context, o DeliveriesOptions) (_ *DeliveriesReport, err error) {
	settings := productionSettings()
	for name, value := range o.Settings {
		settings[name] = value
	}
	postgres, err := pgdev.Start(ctx, pgdev.Options{BinDir: o.BinDir, Settings: settings})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, postgres.Stop()) }()
	b := &deliveryBench{DeliveriesOptions: o, report: &DeliveriesReport{
		Machine: readMachine(postgres.Version()), Settings: settings, Seconds: o.Duration.Seconds(), Rounds: o.Rounds, Backlog: o.Backlog,
		Results: make(map[string][]*Measure),
	}}
	if b.dir, err = os.MkdirTemp("", "grantd-bench-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(b.dir)
	name := fmt.Sprintf("grantd_bench_%d", time.Now().Unix())
	if b.database, err = newDatabase(ctx, postgres, name, CompareOptions{Serve: o.Serve, Conns: o.Conns}); err != nil {
		return nil, err
	}
	defer b.database.close()
	if b.postmaster, err = postmasterOf(ctx, b.database.url); err != nil {
		return nil, err
	}
	if _, err := b.database.load.Run(ctx, Point{Callers: baseClients, Duration: warmUp}); err != nil {
		return nil, err
	}
	for range o.Rounds {
		if err := b.round(ctx); err != nil {
			return nil, err
		}
	}
	return b.report, nil
}

func (b *deliveryBench) round(ctx context.Context) error {
	if err := emptyTables(ctx, b.database.url); err != nil {
		return err
	}
	for _, callers := range comparedCallers {
		if err := b.grants(ctx, b.database.service, b.database.load, "", unary(callers)); err != nil {
			return err
		}
	}
	for _, kind := range []string{"webhook", "nats"} {
		for _, measure := range []func(context.Context, string) error{b.waiting, b.drain, b.sustain} {
			if err := measure(ctx, kind); err != nil {
				return fmt.Errorf("%s: %w", kind, err)
			}
		}
	}
	return nil
}

func (b *deliveryBench) keep(m *Measure) {
	if b.report.Results[m.Name] == nil {
		b.report.Names = append(b.report.Names, m.Name)
	}
	b.report.Results[m.Name] = append(b.report.Results[m.Name], m)
	b.Logf("%s", m)
}

// grants measures a server.
func (b *deliveryBench) grants(ctx context.Context, s *service, load *Load, prefix string, p Point) error {
	p.Duration = b.Duration
	before := b.cpu(s)
	result, err := load.Run(ctx, p)
	if err != nil {
		return err
	}
	if u := result.Unexpected(); len(u) > 0 {
		return fmt.Errorf("%s: %v", result.Name, u)
	}
	m := &Measure{Name: prefix + result.Name, PerSecond: result.PerSecond}
	m.share(b.cpu(s).since(before), float64(result.Requests))
	b.keep(m)
	return nil
}

func (b *deliveryBench) cpu(s *service) cpu { return readCPU(s.cmd.Process.Pid, b.postmaster) }

func (m *Measure) share(used cpu, among float64) {
	m.ServerMicros = float64(used.server.Microseconds()) / max(among, 1)
	m.PostgresMicros = float64(used.postgres.Microseconds()) / max(among, 1)
	m.LoadMicros = float64(used.load.Microseconds()) / max(among, 1)
}

// micros is the CPU time of all that took part.
func (m *Measure) micros() float64 { return m.ServerMicros + m.PostgresMicros + m.LoadMicros }

const (
	pauseSQL = `
INSERT INTO grantd.destination_pauses (destination, pause_number, paused_at, tenant_id, delivery_id, attempt_number)
SELECT $1, count(*) + 1, now(), '-', gen_random_uuid(), 1 FROM grantd.destination_pauses WHERE destination = $1`
	resumeSQL = `UPDATE grantd.destination_pauses SET resumed_at = now() WHERE destination = $1 AND resumed_at IS NULL`
)

// waitsFor is the beginning of the names of grants that are made for a destination which takes none of their events.
func waitsFor(kind string) string { return kind + " paused, " }

// waiting measures grants of a server with a destination that takes nothing meanwhile, and leaves the backlog that they make.
func (b *deliveryBench) waiting(ctx context.Context, kind string) error {
	if err := emptyTables(ctx, b.database.url); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, b.database.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, pauseSQL, kind); err != nil {
		return err
	}
	d, err := b.startDestination(ctx, kind)
	if err != nil {
		return err
	}
	defer d.stop()
	conns, err := openConns(d.service.addr, b.Conns)
	if err != nil {
		return err
	}
	defer closeConns(conns)
	load := NewLoad(conns)
	for _, callers := range comparedCallers {
		if err := b.grants(ctx, d.service, load, waitsFor(kind), unary(callers)); err != nil {
			return err
		}
	}
	if err := load.Fill(ctx, b.Backlog); err != nil {
		return err
	}
	_, err = conn.Exec(ctx, resumeSQL, kind)
	return err
}

// drain measures a server that finds a backlog.
func (b *deliveryBench) drain(ctx context.Context, kind string) error {
	conn, err := pgx.Connect(ctx, b.database.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := execute(ctx, b.database.url, "VACUUM ANALYZE grantd.deliveries", "CHECKPOINT"); err != nil {
		return err
	}
	var backlog int64
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM grantd.deliveries WHERE destination = $1", kind).Scan(&backlog); err != nil {
		return err
	}
	idle := readCPU(0, b.postmaster)
	d, err := b.startDestination(ctx, kind)
	if err != nil {
		return err
	}
	defer d.stop()
	if err := d.wait(ctx, conn, backlog); err != nil {
		return err
	}
	elapsed := time.Since(*d.arrivals.first.Load())
	m := &Measure{Name: kind + ", a backlog", PerSecond: float64(backlog) / elapsed.Seconds()}
	m.share(b.cpu(d.service).since(idle), float64(backlog))
	b.keep(m)
	return nil
}

// sustain measures a server that makes grants at full speed and delivers their events.
func (b *deliveryBench) sustain(ctx context.Context, kind string) error {
	conn, err := pgx.Connect(ctx, b.database.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	d, err := b.startDestination(ctx, kind)
	if err != nil {
		return err
	}
	defer d.stop()
	conns, err := openConns(d.service.addr, b.Conns)
	if err != nil {
		return err
	}
	defer closeConns(conns)
	load := NewLoad(conns)
	before := b.cpu(d.service)
	result, err := load.Run(ctx, Point{Callers: sustainedCallers, Duration: b.Duration})
	if err != nil {
		return err
	}
	granted := int64(result.Requests)
	delivered := d.arrivals.distinct.Load()
	ended := time.Now()
	if err := d.wait(ctx, conn, granted); err != nil {
		return err
	}
	m := &Measure{
		Name: fmt.Sprintf("%s, beside grants of %d callers", kind, sustainedCallers), PerSecond: float64(delivered) / result.Seconds,
		GrantsPerSecond: result.PerSecond, Waiting: granted - delivered, CatchUpSeconds: time.Since(ended).Seconds(),
	}
	m.share(b.cpu(d.service).since(before), float64(granted))
	b.keep(m)
	return nil
}

// destination is one that deliveries go to, with the server that makes them.
type destination struct {
	arrivals *arrivals
	kind     string
	service  *service
	stops    []func()
}

func (d *destination) stop() {
	for _, stop := range slices.Backward(d.stops) {
		stop()
	}
}

// wait returns once the destination got that many different deliveries and all of them are recorded as delivered.
func (d *destination) wait(ctx context.Context, conn *pgx.Conn, count int64) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	for {
		if d.arrivals.distinct.Load() >= count {
			var left bool
			err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM grantd.deliveries WHERE destination = $1 AND stuck = 0 AND due_at > '-infinity')`, d.kind).Scan(&left)
			if err != nil || !left {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d arrived: %w\n%s", d.arrivals.distinct.Load(), count, ctx.Err(), d.service.log)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// benchSecret signs what nobody verifies.
const benchSecret = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

func (b *deliveryBench) startDestination(ctx context.Context, kind string) (_ *destination, err error) {
	d := &destination{kind: kind}
	defer func() {
		if err != nil {
			d.stop()
		}
	}()
	dir, err := os.MkdirTemp(b.dir, kind)
	if err != nil {
		return nil, err
	}
	text := "destinations:\n- name: " + kind + "\n  kind: " + kind + "\n"
	if b.Concurrency > 0 {
		text += "  concurrency: " + strconv.Itoa(b.Concurrency) + "\n"
	}
	if kind == "nats" {
		url, arrived, stop, err := b.startStream(ctx, dir)
		if err != nil {
			return nil, err
		}
		d.arrivals, d.stops = arrived, append(d.stops, stop)
		text += fmt.Sprintf("  nats: {servers: [%q], subject: %q}\n", url, benchSubject)
	} else {
		r, err := startReceiver()
		if err != nil {
			return nil, err
		}
		d.arrivals, d.stops = &r.arrivals, append(d.stops, r.stop)
		secret := filepath.Join(dir, "secret")
		if err := os.WriteFile(secret, []byte(benchSecret), 0o600); err != nil {
			return nil, err
		}
		text += fmt.Sprintf("  deduplicates: true\n  webhook: {url: %q, secrets: [{file: %q}]}\n", r.url, secret)
	}
	file := filepath.Join(dir, "destinations.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	if d.service, err = startService(ctx, append(slices.Clone(b.Serve), "--destinations", file), b.database.url); err != nil {
		return nil, err
	}
	d.stops = append(d.stops, d.service.stop)
	return d, nil
}

const benchSubject = "bench.entitlements"

// startStream starts a broker with a stream on disk, and counts what the stream took.
func (b *deliveryBench) startStream(ctx context.Context, dir string) (url string, arrived *arrivals, stop func(), err error) {
	url, stopServer, err := b.StartNATS(dir)
	if err != nil {
		return "", nil, nil, err
	}
	conn, err := nats.Connect(url)
	if err != nil {
		stopServer()
		return "", nil, nil, err
	}
	counting, cancel := context.WithCancel(ctx)
	stop = func() {
		cancel()
		conn.Close()
		stopServer()
	}
	js, err := jetstream.New(conn)
	if err != nil {
		stop()
		return "", nil, nil, err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "BENCH", Subjects: []string{benchSubject}, Storage: jetstream.FileStorage})
	if err != nil {
		stop()
		return "", nil, nil, err
	}
	arrived = new(arrivals)
	go func() {
		// The stream keeps each message once, so that its size is the number of different ones.
		ticker := time.NewTicker(5 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-counting.Done():
				return
			case <-ticker.C:
			}
			if info, err := stream.Info(counting); err == nil && info.State.Msgs > 0 {
				if arrived.distinct.Swap(int64(info.State.Msgs)) == 0 {
					arrived.first.Store(&info.State.FirstTime)
				}
			}
		}
	}()
	return url, arrived, stop, nil
}
