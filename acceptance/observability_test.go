package acceptance_test

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	// The runbook asks for health.
	_ "google.golang.org/grpc/health/grpc_health_v1"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// alert is a rule of docs/alerts.yaml.
type alert struct {
	Alert       string
	Expr        string
	Labels      map[string]string
	Annotations struct {
		Summary    string
		RunbookURL string `yaml:"runbook_url"`
	}
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []alert }
	}
	if err := yaml.Unmarshal(doc(t, "alerts.yaml"), &file); err != nil {
		t.Fatal(err)
	}
	var all []alert
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("no alerts")
	}
	return all
}

func doc(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("../docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// panels are the queries of docs/dashboard.json, by panel.
func panels(t *testing.T) map[string][]string {
	t.Helper()
	var file struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Query string }
		}
	}
	if err := json.Unmarshal(doc(t, "dashboard.json"), &file); err != nil {
		t.Fatal(err)
	}
	all := make(map[string][]string)
	for _, p := range file.Panels {
		for _, target := range p.Targets {
			all[p.Title] = append(all[p.Title], target.Expr)
		}
	}
	if len(all) == 0 {
		t.Fatal("no panels")
	}
	return all
}

// selector is a metric of a query with the labels that it matches or is grouped by.
type selector struct {
	metric string
	labels []string
}

var (
	selectorPattern = regexp.MustCompile(`\b([a-z]+_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	matcherPattern  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"`)
	groupPattern    = regexp.MustCompile(`\b(?:by|on|ignoring|without) \(([^)]*)\)`)
	callPattern     = regexp.MustCompile(`\b[a-z_]+\(`)
)

// selectors finds the metrics of a query. Labels that a query groups by are asked of each of them.
func selectors(query string) []selector {
	var groups []string
	for _, m := range groupPattern.FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(m[1], ",") {
			groups = append(groups, strings.TrimSpace(label))
		}
	}
	query = callPattern.ReplaceAllString(groupPattern.ReplaceAllString(query, ""), "(")
	var all []selector
	for _, m := range selectorPattern.FindAllStringSubmatch(query, -1) {
		s := selector{metric: m[1], labels: slices.Clone(groups)}
		for _, label := range matcherPattern.FindAllStringSubmatch(m[2], -1) {
			s.labels = append(s.labels, label[1])
		}
		all = append(all, s)
	}
	return all
}

func TestSelectors(t *testing.T) {
	got := fmt.Sprint(selectors(`histogram_quantile(0.99, sum by (le, kind) (rate(a_x_bucket{job=~"$job", state!="x"}[5m]))) > 3 * max_over_time(b_y[1d] offset 10m)`))
	if want := "[{a_x_bucket [le kind job state]} {b_y [le kind]}]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// page is what /metrics shows.
func page(t *testing.T, web string) string {
	t.Helper()
	resp, err := http.Get("http://" + web + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// scraped are the metrics of /metrics, each with the labels that its series have. Those that Prometheus adds are there as well.
func scraped(t *testing.T, web string) map[string]map[string]bool {
	t.Helper()
	all := make(map[string]map[string]bool)
	for line := range strings.Lines(page(t, web)) {
		if m := selectorPattern.FindStringSubmatch(line); m != nil && !strings.HasPrefix(line, "#") {
			if all[m[1]] == nil {
				all[m[1]] = map[string]bool{"job": true, "instance": true}
			}
			for _, label := range matcherPattern.FindAllStringSubmatch(m[2], -1) {
				all[m[1]][label[1]] = true
			}
		}
	}
	return all
}

// A panel or an alert about a metric that is misspelt, or was renamed, shows nothing and never fires, and nobody notices.
func TestMetrics_AlertsAndDashboardUseWhatIsThere(t *testing.T) {
	b := setup(t)
	r := receive(t)
	p := serveProcess(t, b.url, "127.0.0.1:0", "--destinations", destinationsFile(t, true, map[string]*receiver{crm: r}))
	served := &bundle{EntitlementServiceClient: pb.NewEntitlementServiceClient(dial(t, p.addr))}
	served.want(t, newly, byNothing, grant("t1", "K1", "INV-1"))
	served.want(t, rejected, byNothing, grant("t1", "K2", "INV-2", evidence(unpaid, 1)))
	if _, err := served.GrantEntitlement(t.Context(), grant("t1", "", "INV-1")); status.Code(err) != codes.InvalidArgument {
		t.Fatal(err)
	}
	for _, want := range []string{`"OK",rpc_system_name="grpc"} 2`, `"INVALID_ARGUMENT",rpc_system_name="grpc"} 1`} {
		want = `rpc_server_call_duration_seconds_count{rpc_method="entitlement.v1.EntitlementService/GrantEntitlement",rpc_response_status_code=` + want
		// A call is measured after its caller has the answer.
		eventually(t, want, func() bool { return strings.Contains(page(t, p.web), want) })
	}
	eventually(t, "the delivery is counted", func() bool {
		return scraped(t, p.web)["grantd_delivery_duration_seconds_count"] != nil
	})
	there := scraped(t, p.web)
	check := func(where, query string) {
		t.Helper()
		found := selectors(query)
		if len(found) == 0 {
			t.Errorf("%s: no metric in %s", where, query)
		}
		for _, s := range found {
			labels, ok := there[s.metric]
			if !ok {
				t.Errorf("%s: there is no %s", where, s.metric)
			}
			for _, label := range s.labels {
				if ok && !labels[label] {
					t.Errorf("%s: %s has no label %s", where, s.metric, label)
				}
			}
		}
	}
	for _, a := range alerts(t) {
		check(a.Alert, a.Expr)
	}
	for title, queries := range panels(t) {
		for _, query := range queries {
			check(title, query)
		}
	}
	for name, labels := range there {
		for label := range labels {
			if strings.Contains(label, "tenant") || strings.Contains(label, "key") || strings.Contains(label, "invoice") {
				t.Errorf("%s has the label %s, which is not bounded", name, label)
			}
		}
	}
}

// section is what a document says under a heading of the second level.
func section(t *testing.T, text, heading string) string {
	t.Helper()
	_, rest, found := strings.Cut(text, "\n## "+heading+"\n")
	if !found {
		t.Errorf("no paragraph %s", heading)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	return rest
}

func TestAlerts_HaveParagraphsAndCases(t *testing.T) {
	runbook := string(doc(t, "runbook.md"))
	var cases struct {
		Tests []struct {
			Queries []struct {
				Expr    string
				Samples []any `yaml:"exp_samples"`
			} `yaml:"promql_expr_test"`
		}
	}
	if err := yaml.Unmarshal(doc(t, "alerts_test.yaml"), &cases); err != nil {
		t.Fatal(err)
	}
	fires, silent := make(map[string]bool), make(map[string]bool)
	for _, c := range cases.Tests {
		for _, q := range c.Queries {
			name := regexp.MustCompile(`alertname="(\w+)", alertstate="firing"`).FindStringSubmatch(q.Expr)
			if name == nil {
				t.Fatalf("a case is not about an alert: %s", q.Expr)
			}
			fires[name[1]] = fires[name[1]] || len(q.Samples) > 0
			silent[name[1]] = silent[name[1]] || len(q.Samples) == 0
		}
	}
	names := make(map[string]bool)
	for _, a := range alerts(t) {
		names[a.Alert] = true
		if want := "https://github.com/grantd/grantd/blob/main/docs/runbook.md#" + strings.ToLower(a.Alert); a.Annotations.RunbookURL != want {
			t.Errorf("%s: runbook_url is %q, want %q", a.Alert, a.Annotations.RunbookURL, want)
		}
		if a.Annotations.Summary == "" || !slices.Contains([]string{"critical", "warning"}, a.Labels["severity"]) {
			t.Errorf("%s has no summary or no severity", a.Alert)
		}
		if start := strings.TrimSpace(section(t, runbook, a.Alert)); !strings.HasPrefix(start, "```sh\ngrpcurl ") {
			t.Errorf("the paragraph of %s does not begin with a line for grpcurl", a.Alert)
		}
		if !fires[a.Alert] || !silent[a.Alert] {
			t.Errorf("%s: a case that fires: %t, one that does not: %t", a.Alert, fires[a.Alert], silent[a.Alert])
		}
	}
	for _, heading := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(runbook, -1) {
		if !names[heading[1]] {
			t.Errorf("the runbook has a paragraph for %s, which is no alert", heading[1])
		}
	}
	// The panels that the runbook names.
	titles := strings.Join(slices.Collect(maps.Keys(panels(t))), "\n")
	for _, m := range regexp.MustCompile(`\*([A-Z][^*\n]+)\*`).FindAllStringSubmatch(runbook, -1) {
		if !strings.Contains(titles, m[1]) {
			t.Errorf("the runbook names the panel %s, which is not there", m[1])
		}
	}
}

var (
	blockPattern   = regexp.MustCompile("(?s)```(sh|sql)\n(.*?)```")
	grpcurlPattern = regexp.MustCompile(`(?s)^grpcurl -plaintext -d '(.*)'\s+127\.0\.0\.1:50051\s+(\S+)/(\S+)$`)
)

// What the runbook says to type at three in the morning must work: every line is sent to a server, every query to its database.
func TestRunbook_LinesWork(t *testing.T) {
	b := setup(t)
	blocks := blockPattern.FindAllStringSubmatch(string(doc(t, "runbook.md")), -1)
	if len(blocks) < len(alerts(t)) {
		t.Fatalf("%d blocks", len(blocks))
	}
	for _, block := range blocks {
		text := strings.TrimSpace(strings.ReplaceAll(block[2], "\\\n", ""))
		if block[1] == "sql" {
			b.exec(t, text)
			continue
		}
		m := grpcurlPattern.FindStringSubmatch(text)
		if m == nil {
			t.Errorf("no line for grpcurl: %s", text)
			continue
		}
		request, response := messagesOf(t, m[2], m[3])
		if err := protojson.Unmarshal([]byte(m[1]), request); err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		err := b.conn.Invoke(t.Context(), path.Join("/", m[2], m[3]), request, response)
		// What is named in the runbook is not in this database; a request that makes no sense is INVALID_ARGUMENT.
		if code := status.Code(err); code != codes.OK && code != codes.NotFound {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// messagesOf returns an empty request and an empty response of a method.
func messagesOf(t *testing.T, service, method string) (request, response proto.Message) {
	t.Helper()
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		t.Fatalf("%s: %v", service, err)
	}
	m := found.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(method))
	if m == nil {
		t.Fatalf("%s has no method %s", service, method)
	}
	in, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	if err != nil {
		t.Fatal(err)
	}
	out, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		t.Fatal(err)
	}
	return in.New().Interface(), out.New().Interface()
}
