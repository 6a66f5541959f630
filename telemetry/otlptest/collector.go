// Package otlptest is an OTLP collector for tests: it takes spans over gRPC, as a collector does, and keeps them.
package otlptest

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// patience is how long spans may be on their way. The SDK sends them every five seconds unless told otherwise.
const patience = 10 * time.Second

// Collector keeps the spans that were exported to it.
type Collector struct {
	collectorpb.UnimplementedTraceServiceServer
	t        testing.TB
	endpoint string

	mu      sync.Mutex
	spans   []*Span
	arrived chan struct{} // closed, and made anew, when spans arrive
}

// Start starts a collector on a free port of the loopback interface, which ends with the test.
func Start(t testing.TB) *Collector {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &Collector{t: t, endpoint: "http://" + listener.Addr().String(), arrived: make(chan struct{})}
	s := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(s, c)
	var served sync.WaitGroup
	served.Go(func() {
		if err := s.Serve(listener); err != nil {
			t.Errorf("the collector: %v", err)
		}
	})
	t.Cleanup(func() {
		s.Stop()
		served.Wait()
	})
	return c
}

// Endpoint is the value for OTEL_EXPORTER_OTLP_ENDPOINT.
func (c *Collector) Endpoint() string { return c.endpoint }

// Environ returns the variables, each as NAME=value, that make a process export to the collector without delay.
func (c *Collector) Environ() []string {
	return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.endpoint, "OTEL_BSP_SCHEDULE_DELAY=20"}
}

// Setenv sets Environ's variables for the rest of the test.
func (c *Collector) Setenv(t *testing.T) {
	t.Helper()
	for _, variable := range c.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
}

// Export implements the OTLP service.
func (c *Collector) Export(_ context.Context, r *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range r.GetResourceSpans() {
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				c.spans = append(c.spans, &Span{Span: s, Scope: ss.GetScope().GetName(), Resource: values(rs.GetResource().GetAttributes())})
			}
		}
	}
	close(c.arrived)
	c.arrived = make(chan struct{})
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// Spans returns what has arrived so far.
func (c *Collector) Spans() []*Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// Await waits until at least n spans have arrived that match, and returns all that do. The test fails, with a list of what came
// instead, when they do not.
func (c *Collector) Await(n int, match func(*Span) bool) []*Span {
	c.t.Helper()
	late := time.After(patience)
	for {
		c.mu.Lock()
		arrived := c.arrived
		var found []*Span
		for _, s := range c.spans {
			if match(s) {
				found = append(found, s)
			}
		}
		c.mu.Unlock()
		if len(found) >= n {
			return found
		}
		select {
		case <-arrived:
		case <-late:
			c.t.Fatalf("%d of %d spans arrived; all that did:%.10000s", len(found), n, c)
		}
	}
}

// AwaitAttribute waits for n spans with an attribute, as a search in a trace viewer would find them.
func (c *Collector) AwaitAttribute(n int, name, value string) []*Span {
	c.t.Helper()
	return c.Await(n, func(s *Span) bool { return s.Attribute(name) == value })
}

// String lists the spans with their attributes, one a line.
func (c *Collector) String() string {
	var b strings.Builder
	for _, s := range c.Spans() {
		fmt.Fprintf(&b, "\n%s %s < %s %q %v", s.Trace(), s.ID(), s.Parent(), s.GetName(), s.Attributes())
	}
	return b.String()
}

// Span is an exported span.
type Span struct {
	*tracepb.Span
	// Scope names the library that made it.
	Scope string
	// Resource is the process that it came from.
	Resource map[string]string
}

// Trace is the trace id, in hexadecimal digits.
func (s *Span) Trace() string { return hex.EncodeToString(s.GetTraceId()) }

// ID is the span id, in hexadecimal digits.
func (s *Span) ID() string { return hex.EncodeToString(s.GetSpanId()) }

// Parent is the parent's span id, empty for a root.
func (s *Span) Parent() string { return hex.EncodeToString(s.GetParentSpanId()) }

// Attribute is an attribute's value as text, empty when there is none.
func (s *Span) Attribute(name string) string { return s.Attributes()[name] }

// Attributes are the span's attributes, as text.
func (s *Span) Attributes() map[string]string { return values(s.Span.GetAttributes()) }

// LinksTo reports whether the span has a link to another.
func (s *Span) LinksTo(other *Span) bool {
	return slices.ContainsFunc(s.GetLinks(), func(l *tracepb.Span_Link) bool {
		return hex.EncodeToString(l.GetTraceId()) == other.Trace() && hex.EncodeToString(l.GetSpanId()) == other.ID()
	})
}

func values(attributes []*commonpb.KeyValue) map[string]string {
	m := make(map[string]string, len(attributes))
	for _, a := range attributes {
		m[a.GetKey()] = text(a.GetValue())
	}
	return m
}

func text(v *commonpb.AnyValue) string {
	switch v := v.GetValue().(type) {
	case *commonpb.AnyValue_StringValue:
		return v.StringValue
	case *commonpb.AnyValue_ArrayValue:
		var items []string
		for _, item := range v.ArrayValue.GetValues() {
			items = append(items, text(item))
		}
		return "[" + strings.Join(items, ",") + "]"
	case *commonpb.AnyValue_IntValue:
		return fmt.Sprint(v.IntValue)
	case *commonpb.AnyValue_BoolValue:
		return fmt.Sprint(v.BoolValue)
	case *commonpb.AnyValue_DoubleValue:
		return fmt.Sprint(v.DoubleValue)
	default:
		return ""
	}
}
