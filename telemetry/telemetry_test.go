package telemetry_test

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/pgdev/pgtest"
	"github.com/grantd/grantd/telemetry"
	"github.com/grantd/grantd/telemetry/otlptest"
)

func TestSetup_Environment(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	const anywhere = "http://127.0.0.1:4317"
	for name, c := range map[string]struct {
		environment map[string]string
		tracing     bool
	}{
		"nothing":             {nil, false},
		"empty":               {map[string]string{endpoint: ""}, false},
		"endpoint":            {map[string]string{endpoint: anywhere}, true},
		"endpoint of traces":  {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": anywhere}, true},
		"endpoint of metrics": {map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": anywhere}, false},
		"gRPC target":         {map[string]string{endpoint: "dns:///collector:4317"}, true},
		"disabled":            {map[string]string{endpoint: anywhere, "OTEL_SDK_DISABLED": "TRUE"}, false},
		"not disabled":        {map[string]string{endpoint: anywhere, "OTEL_SDK_DISABLED": "0"}, true},
		"exporter none":       {map[string]string{endpoint: anywhere, "OTEL_TRACES_EXPORTER": "none"}, false},
		"exporter otlp":       {map[string]string{endpoint: anywhere, "OTEL_TRACES_EXPORTER": "otlp"}, true},
		"exporter unknown":    {map[string]string{endpoint: anywhere, "OTEL_TRACES_EXPORTER": "zipkin"}, false},
		"several exporters":   {map[string]string{endpoint: anywhere, "OTEL_TRACES_EXPORTER": "console, otlp"}, true},
		"bad attributes":      {map[string]string{endpoint: anywhere, "OTEL_RESOURCE_ATTRIBUTES": "nonsense"}, true},
		"other protocol":      {map[string]string{endpoint: anywhere, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			clearEnvironment(t)
			for variable, value := range c.environment {
				t.Setenv(variable, value)
			}
			tel := setUp(t)
			if got := tel.ServerHandler() != nil; got != c.tracing {
				t.Errorf("a handler: %t", got)
			}
			if got := tel.QueryTracer() != nil; got != c.tracing {
				t.Errorf("a query tracer: %t", got)
			}
			_, span := tel.TracerProvider.Tracer("test").Start(t.Context(), "test")
			if span.IsRecording() != c.tracing {
				t.Errorf("records: %t", span.IsRecording())
			}
		})
	}
}

// The caller decides; what it leaves open is sampled, unless the standard variables say otherwise.
func TestSetup_Sampler(t *testing.T) {
	remote := func(flags trace.TraceFlags) trace.SpanContext {
		return trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: flags, Remote: true})
	}
	sampled, not, none := remote(trace.FlagsSampled), remote(0), trace.SpanContext{}
	for _, c := range []struct {
		sampler, argument string
		parent            trace.SpanContext
		want              bool
	}{
		{"", "", none, true}, {"", "", sampled, true}, {"", "", not, false},
		{"parentbased_traceidratio", "0", none, false}, {"parentbased_traceidratio", "0", sampled, true},
		{"parentbased_traceidratio", "1", none, true}, {"parentbased_traceidratio", "1", not, false},
		{"parentbased_always_off", "", none, false}, {"parentbased_always_off", "", sampled, true},
		{"always_off", "", sampled, false}, {"always_on", "", not, true},
	} {
		t.Run(c.sampler+c.argument, func(t *testing.T) {
			clearEnvironment(t)
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
			t.Setenv("OTEL_TRACES_SAMPLER", c.sampler)
			t.Setenv("OTEL_TRACES_SAMPLER_ARG", c.argument)
			tel := setUp(t)
			_, span := tel.TracerProvider.Tracer("test").Start(trace.ContextWithRemoteSpanContext(t.Context(), c.parent), "call")
			if span.IsRecording() != c.want || span.SpanContext().IsSampled() != c.want {
				t.Errorf("below %v: records %t", c.parent.TraceFlags(), span.IsRecording())
			}
		})
	}
}

// Whoever looks in vain for spans begins with the log: are they exported, where to, and does that side speak TLS?
func TestSetup_SaysWhereSpansGo(t *testing.T) {
	const endpoint, sampler, argument = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
	const plaintext = "http://127.0.0.1:4317"
	for name, c := range map[string]struct {
		environment map[string]string
		want        string
	}{
		"off":                 {nil, `msg="spans are not exported"`},
		"http":                {map[string]string{endpoint: plaintext}, "endpoint=http://127.0.0.1:4317 transport=plaintext"},
		"https":               {map[string]string{endpoint: "https://127.0.0.1:4317"}, "endpoint=https://127.0.0.1:4317 transport=TLS"},
		"no scheme":           {map[string]string{endpoint: "localhost:4317"}, "endpoint=localhost:4317 transport=TLS"},
		"no scheme, insecure": {map[string]string{endpoint: "localhost:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"}, "transport=plaintext"},
		"http, not insecure":  {map[string]string{endpoint: plaintext, "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "false"}, "transport=TLS"},
		"a password":          {map[string]string{endpoint: "https://me:secret@127.0.0.1:4317"}, "endpoint=https://me:xxxxx@127.0.0.1:4317 "},
		"sampler":             {map[string]string{endpoint: plaintext, sampler: "nonsense"}, "level=WARN msg=\"OTEL_TRACES_SAMPLER names"},
		"ratio":               {map[string]string{endpoint: plaintext, sampler: "traceidratio", argument: "2"}, "level=WARN msg=\"OTEL_TRACES_SAMPLER_ARG is"},
	} {
		t.Run(name, func(t *testing.T) {
			clearEnvironment(t)
			for variable, value := range c.environment {
				t.Setenv(variable, value)
			}
			var out strings.Builder
			tel, err := telemetry.Setup(t.Context(), telemetry.Config{Log: slog.New(slog.NewTextHandler(&out, nil))})
			if err != nil {
				t.Fatal(err)
			}
			if err := tel.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
			if !strings.Contains(out.String(), c.want) {
				t.Errorf("the log lacks %s:\n%s", c.want, out.String())
			}
		})
	}
}

func TestSetup_EndpointThatIsNoURL(t *testing.T) {
	clearEnvironment(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1:4317")
	_, err := telemetry.Setup(t.Context(), telemetry.Config{})
	if err == nil || !strings.Contains(err.Error(), "OTEL_EXPORTER_OTLP_ENDPOINT must be a URL such as http://") {
		t.Errorf("%v", err)
	}
}

// Everything that one call does is found by its key, in the caller's trace, and holds nothing of what it carries.
func TestTracing_KeyOnEverySpanOfACall(t *testing.T) {
	const secret = "p4yl0ad"
	url := pgtest.NewEmpty(t)
	clearEnvironment(t)
	collector := otlptest.Start(t)
	collector.Setenv(t)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
	b := start(t, func(tel *telemetry.Telemetry) handler {
		config, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		config.Tracer = tel.QueryTracer()
		return func(ctx context.Context, r *entitlementv1.GrantEntitlementRequest) error {
			ctx = tel.WithKey(ctx, r.GetIdempotencyKey())
			conn, err := pgx.ConnectConfig(ctx, config)
			if err != nil {
				return err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			if _, err := conn.Exec(ctx, "SELECT $1::text", secret); err != nil {
				return err
			}
			// The server quotes the value in the first error, the driver in the second.
			if _, err := conn.Exec(ctx, "SELECT $1::text::int", secret); err == nil || !strings.Contains(err.Error(), secret) {
				t.Errorf("the server's error is %v", err)
			}
			if _, err := conn.Exec(ctx, "SELECT $1::int8", []any{secret}); err == nil || !strings.Contains(err.Error(), secret) {
				t.Errorf("the driver's error is %v", err)
			}
			batch := &pgx.Batch{}
			batch.Queue("SELECT $1::text::int", secret)
			if err := conn.SendBatch(ctx, batch).Close(); err == nil || !strings.Contains(err.Error(), secret) {
				t.Errorf("the batch's error is %v", err)
			}
			return nil
		}
	})
	b.grant(t, metadata.AppendToOutgoingContext(t.Context(), "traceparent", traceparent), key)
	b.finish(t)

	statements, servers := 0, 0
	for _, span := range collector.Spans() {
		if span.Trace() != traceID || span.Attribute(telemetry.KeyName) != key {
			t.Errorf("%s has trace %s and the attributes %v", span.GetName(), span.Trace(), span.Attributes())
		}
		if strings.Contains(span.String(), secret) {
			t.Errorf("%s leaks: %s", span.GetName(), span)
		}
		if strings.HasPrefix(span.Attribute("db.query.text"), "SELECT $1") {
			statements++
		}
		if span.Parent() == spanID {
			servers++
		}
		for name, want := range map[string]string{
			"service.name": "grantd", "service.version": "1.2.3", "deployment.environment.name": "test",
		} {
			if got := span.Resource[name]; got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
	}
	if servers != 1 || statements < 4 {
		t.Errorf("%d server spans, %d of statements:%s", servers, statements, collector)
	}
	if page := scrape(t, b.Telemetry); strings.Contains(page, "rpc_server") || strings.Contains(page, "db_client") {
		t.Error("metrics that are there only while tracing is on")
	}
}

// A commit links to each call that it combines. The SDK keeps 128 links unless told otherwise, and values of any length.
func TestTracing_Limits(t *testing.T) {
	b := setup(t, noHandler)
	tracer := b.TracerProvider.Tracer("test")
	var links []trace.Link
	for range 1000 {
		_, call := tracer.Start(t.Context(), "call")
		links = append(links, trace.Link{SpanContext: call.SpanContext()})
	}
	_, commit := tracer.Start(t.Context(), "commit", trace.WithLinks(links...),
		trace.WithAttributes(attribute.String("statement", strings.Repeat("s", 100_000))))
	commit.End()
	span := b.collector.Await(1, func(s *otlptest.Span) bool { return s.GetName() == "commit" })[0]
	if n := len(span.GetLinks()); n != len(links) {
		t.Errorf("%d links", n)
	}
	if n := len(span.Attribute("statement")); n != 2048 {
		t.Errorf("%d bytes of the statement", n)
	}
}

func TestTracing_ServiceName(t *testing.T) {
	clearEnvironment(t)
	t.Setenv("OTEL_SERVICE_NAME", "entitlements")
	collector := otlptest.Start(t)
	collector.Setenv(t)
	tel := setUp(t)
	_, span := tel.TracerProvider.Tracer("test").Start(t.Context(), "test")
	span.End()
	if got := collector.Await(1, func(*otlptest.Span) bool { return true })[0].Resource["service.name"]; got != "entitlements" {
		t.Errorf("service.name is %q", got)
	}
}

func TestTracing_HealthMakesNoSpans(t *testing.T) {
	b := setup(t, func(tel *telemetry.Telemetry) handler {
		return func(context.Context, *entitlementv1.GrantEntitlementRequest) error { return nil }
	})
	if _, err := healthpb.NewHealthClient(b.conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	b.grant(t, t.Context(), key)
	b.finish(t)
	if spans := b.collector.Spans(); len(spans) != 1 || spans[0].GetName() != "entitlement.v1.EntitlementService/GrantEntitlement" {
		t.Errorf("spans:%s", b.collector)
	}
}

// lines is a log whose reader waits for each line.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// A collector that is away must be noticed, once, and must not hold up the end of the process.
func TestTracing_CollectorIsAway(t *testing.T) {
	clearEnvironment(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := listener.Addr().String()
	listener.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+nobody)
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "50")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
	logged := make(lines, 100)
	tel, err := telemetry.Setup(t.Context(), telemetry.Config{Log: slog.New(slog.NewTextHandler(logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if line := <-logged; !strings.Contains(line, "spans are exported") {
		t.Errorf("logged %s", line)
	}
	_, span := tel.TracerProvider.Tracer("test").Start(t.Context(), "first")
	span.End()
	select {
	case line := <-logged:
		if !strings.Contains(line, "spans cannot be exported") || !strings.Contains(line, "level=WARN") {
			t.Errorf("logged %s", line)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nothing was logged")
	}
	if got := sample(t, tel, "grantd_trace_spans_lost_total"); got != "1" {
		t.Errorf("%s spans lost", got)
	}

	_, span = tel.TracerProvider.Tracer("test").Start(t.Context(), "second")
	span.End()
	started := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := tel.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if took := time.Since(started); took > 30*time.Second {
		t.Errorf("shutdown took %v", took)
	}
	if len(logged) != 0 {
		t.Errorf("logged again: %s", <-logged)
	}
}

func TestMetrics(t *testing.T) {
	clearEnvironment(t)
	tel := setUp(t)
	counter, err := tel.MeterProvider.Meter("test").Int64Counter("grantd.test.arrivals", metric.WithUnit("{arrival}"))
	if err != nil {
		t.Fatal(err)
	}
	counter.Add(t.Context(), 3)
	page := scrape(t, tel)
	for _, want := range []string{
		"grantd_test_arrivals_total 3\n", "target_info{", `service_name="grantd"`, `service_version="1.2.3"`, "go_goroutines ",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s in\n%s", want, page)
		}
	}
}

// The variable turns off every signal of OpenTelemetry; what is left is the Go library's own.
func TestMetrics_SDKDisabled(t *testing.T) {
	clearEnvironment(t)
	t.Setenv("OTEL_SDK_DISABLED", "true")
	page := scrape(t, setUp(t))
	if strings.Contains(page, "target_info") || !strings.Contains(page, "go_goroutines ") {
		t.Errorf("metrics:\n%s", page)
	}
}
