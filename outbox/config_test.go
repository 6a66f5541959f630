package outbox_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
)

const fullFile = `
destinations:
  - name: crm
    kind: webhook
    filter:
      events: [GRANTED, REVERSED]
      entitlement_types: [team_access]
    internal: true
    deduplicates: true
    timeout: 5s
    deadline: 20s
    retry: {limit: 7, min_delay: 2s, max_delay: 1h}
    concurrency: 64
    webhook:
      url: https://crm.example.com/events
      lookup_url: https://crm.example.com/events/{key}
      secrets:
        - file: /run/secrets/crm
        - env: CRM_SECRET
  - name: tiny
    kind: webhook
    deadline: 3s
    webhook: {url: "http://127.0.0.1:8000/", secrets: [{env: TINY}]}
`

func TestParseDestinations(t *testing.T) {
	all, err := outbox.ParseDestinations("d.yaml", []byte(fullFile))
	if err != nil {
		t.Fatal(err)
	}
	crm, tiny := &all[0], &all[1]
	if crm.Name != "crm" || crm.Kind != "webhook" || !crm.Internal || !crm.Deduplicates || crm.Concurrency != 64 ||
		crm.Timeout != 5*time.Second || crm.Deadline != 20*time.Second ||
		crm.Retry != (outbox.Retry{Limit: 7, MinDelay: 2 * time.Second, MaxDelay: time.Hour}) ||
		!slices.Equal(crm.EntitlementTypes, []string{"team_access"}) || !slices.Equal(crm.Events, []entitlementv1.EntryKind{
		entitlementv1.EntryKind_ENTRY_KIND_GRANTED, entitlementv1.EntryKind_ENTRY_KIND_REVERSED}) {
		t.Errorf("%+v", crm)
	}
	if tiny.Internal || tiny.Deduplicates || tiny.Concurrency != 16 || tiny.Timeout != 3*time.Second || tiny.Deadline != 3*time.Second ||
		tiny.Retry != (outbox.Retry{Limit: 12, MinDelay: time.Second, MaxDelay: 15 * time.Minute}) || tiny.Events != nil {
		t.Errorf("%+v", tiny)
	}
	stored := outbox.Stored(all)
	if len(stored) != 2 || stored[0].Name != "crm" || !stored[0].Deduplicates || stored[1].Deduplicates || stored[0].Template != "" {
		t.Errorf("%+v", stored)
	}
}

func TestParseDestinations_Refusals(t *testing.T) {
	const webhook = "webhook: {url: \"https://x.example\", secrets: [{env: A}]}"
	one := func(lines ...string) string { return "destinations:\n- " + strings.Join(lines, "\n  ") + "\n" }
	for name, c := range map[string]struct{ text, want string }{
		"empty":             {"", "d.yaml:1: the file is empty; it must have the field destinations"},
		"no mapping":        {"[]", "d.yaml:1: must be a mapping with the field destinations"},
		"other field":       {"sinks: []", "d.yaml:1: sinks: unknown field; the only one here is destinations"},
		"missing":           {"{}", "d.yaml:1: destinations: required"},
		"no list":           {"destinations: {}", "d.yaml:1: destinations: must be a list"},
		"two documents":     {"destinations: []\n---\n{}", "d.yaml:2: must be a single YAML document"},
		"syntax":            {"destinations: [", "d.yaml:1: did not find expected node content"},
		"no name":           {one("kind: webhook", webhook), "d.yaml:2: destinations[0].name: required"},
		"no kind":           {one("name: a"), "d.yaml:2: destinations[0].kind: required"},
		"no section":        {one("name: a", "kind: webhook"), "d.yaml:2: destinations[0].webhook: required"},
		"bad name":          {one("name: A", "kind: webhook", webhook), "d.yaml:2: destinations[0].name: must be a lower-case letter"},
		"bad kind":          {one("name: a", "kind: fax"), "d.yaml:3: destinations[0].kind: must be webhook, nats or smtp"},
		"unknown field":     {one("name: a", "kind: webhook", "retries: 3", webhook), "d.yaml:4: destinations[0].retries: unknown field; known are name,"},
		"twice a field":     {one("name: a", "kind: webhook", "name: b", webhook), "d.yaml:4: destinations[0].name: stands in line 2 already"},
		"twice a name":      {one("name: a", "kind: webhook", webhook) + "- name: a\n  kind: webhook\n  " + webhook, "d.yaml:5: destinations[1]: the name a stands in line 2 already"},
		"other section":     {one("name: a", "kind: webhook", webhook, "nats: {}"), "d.yaml:5: destinations[0].nats: does not belong to the kind webhook"},
		"alias":             {one("name: &n a", "kind: webhook", "filter: {entitlement_types: [*n]}", webhook), "d.yaml:4: destinations[0].filter.entitlement_types[0]: must be written out: aliases"},
		"event":             {one("name: a", "kind: webhook", "filter: {events: [granted]}", webhook), "d.yaml:4: destinations[0].filter.events[0]: must be GRANTED, REVERSED or REINSTATED"},
		"event unspecified": {one("name: a", "kind: webhook", "filter: {events: [UNSPECIFIED]}", webhook), "destinations[0].filter.events[0]: must be GRANTED"},
		"empty filter":      {one("name: a", "kind: webhook", "filter: {events: []}", webhook), "d.yaml:4: destinations[0].filter.events: must not be empty"},
		"bool":              {one("name: a", "kind: webhook", "internal: yes", webhook), "d.yaml:4: destinations[0].internal: must be true or false"},
		"duration":          {one("name: a", "kind: webhook", "deadline: 10", webhook), "d.yaml:4: destinations[0].deadline: must be a duration like 10s or 15m, from 1ms to 10m0s"},
		"timeout":           {one("name: a", "kind: webhook", "timeout: 20s", "deadline: 10s", webhook), "d.yaml:4: destinations[0].timeout: must not be longer than the deadline"},
		"delays":            {one("name: a", "kind: webhook", "retry: {min_delay: 1m, max_delay: 1s}", webhook), "d.yaml:4: destinations[0].retry: max_delay must not be less"},
		"limit":             {one("name: a", "kind: webhook", "retry: {limit: 0}", webhook), "d.yaml:4: destinations[0].retry.limit: must be a whole number from 1 to 1000"},
		"concurrency":       {one("name: a", "kind: webhook", "concurrency: many", webhook), "d.yaml:4: destinations[0].concurrency: must be a whole number from 1 to 1024"},
		"plaintext":         {one("name: a", "kind: webhook", "webhook: {url: \"http://x.example\", secrets: [{env: A}]}"), "d.yaml:4: destinations[0].webhook.url: must be https, except for loopback"},
		"plaintext look-up": {one("name: a", "kind: webhook", "webhook: {url: \"https://x.example\", lookup_url: \"http://x.example/{key}\", secrets: [{env: A}]}"), "destinations[0].webhook.lookup_url: must be https"},
		"look-up without":   {one("name: a", "kind: webhook", "webhook: {url: \"https://x.example\", lookup_url: \"https://x.example/\", secrets: [{env: A}]}"), "destinations[0].webhook.lookup_url: must have {key}"},
		"password in a URL": {one("name: a", "kind: webhook", "webhook: {url: \"https://u:p4ss@x.example\", secrets: [{env: A}]}"), "destinations[0].webhook.url: must be an absolute URL"},
		"relative URL":      {one("name: a", "kind: webhook", "webhook: {url: /events, secrets: [{env: A}]}"), "destinations[0].webhook.url: must be an absolute URL"},
		"no secrets":        {one("name: a", "kind: webhook", "webhook: {url: \"https://x.example\"}"), "d.yaml:4: destinations[0].webhook.secrets: required"},
		"two of a secret":   {one("name: a", "kind: webhook", "webhook: {url: \"https://x.example\", secrets: [{env: A, file: b}]}"), "destinations[0].webhook.secrets[0]: must name a file or an environment variable, one of the two"},
		"secret in the file": {one("name: a", "kind: webhook", "webhook: {url: \"https://x.example\", secrets: [whsec_p4ss]}"),
			"destinations[0].webhook.secrets[0]: must be a mapping of fields: file or env"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := outbox.ParseDestinations("d.yaml", []byte(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got  %v\nwant %s", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "p4ss") {
				t.Errorf("it shows a secret: %v", err)
			}
		})
	}
}

func FuzzParseDestinations(f *testing.F) {
	f.Add(fullFile)
	example, err := os.ReadFile("../docs/destinations.example.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(example))
	f.Fuzz(func(t *testing.T, text string) {
		all, err := outbox.ParseDestinations("d.yaml", []byte(text))
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if !strings.HasPrefix(line, "d.yaml:") {
					t.Errorf("no file in %q", line)
				}
			}
			return
		}
		for i := range all {
			if d := &all[i]; d.Name == "" || d.Kind == "" || d.Deadline <= 0 || d.Timeout > d.Deadline || d.Concurrency < 1 {
				t.Errorf("%+v", d)
			}
		}
	})
}

// The example is what people copy.
func TestParseDestinations_Example(t *testing.T) {
	text, err := os.ReadFile("../docs/destinations.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all, err := outbox.ParseDestinations("destinations.example.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	kinds := make(map[string]bool)
	for i := range all {
		kinds[all[i].Kind] = true
	}
	if len(kinds) != 3 {
		t.Errorf("it shows the kinds %v", kinds)
	}
}
