package outbox

import (
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/internal/strictyaml"
	"github.com/grantd/grantd/store"
)

// Destination is one entry of the destinations' file.
type Destination struct {
	// Name is [a-z][a-z0-9_-]{0,62}. Deliveries are bound to it, so that a new name is a new destination.
	Name string
	// Kind is webhook, nats or smtp.
	Kind string
	// Events and EntitlementTypes are the filter; empty lets everything through.
	Events           []entitlementv1.EntryKind
	EntitlementTypes []string
	// Internal destinations are told the trace and the allowed baggage.
	Internal bool
	// Deduplicates says that the destination has an effect once, however often it gets the same key.
	Deduplicates bool
	// Timeout bounds the wait for the beginning of an answer, Deadline the whole attempt.
	Timeout, Deadline time.Duration
	Retry             Retry
	// Concurrency is how many attempts one replica makes at once.
	Concurrency int

	section section
}

// Retry says when a transient failure is followed by another attempt.
type Retry struct {
	// Limit is how many transient failures count against one delivery before it is DEAD. Those of an outage of the whole
	// destination do not count.
	Limit int
	// MinDelay and MaxDelay bound the full-jitter backoff; MaxDelay also bounds what Retry-After may ask for.
	MinDelay, MaxDelay time.Duration
}

// section is what the part of the file that belongs to one kind says. It opens the kind's sender.
type section interface {
	open(d *Destination, in surroundings) (sender, error)
}

// surroundings is what a sender may use of its process.
type surroundings struct {
	getenv func(string) string
	now    func() time.Time
	log    *slog.Logger
}

// notifying is the section of a destination that tells a person, where the request named one.
type notifying interface{ template() string }

// stored is the destination as the store must know it.
func (d *Destination) stored() store.Destination {
	s := store.Destination{Name: d.Name, Kinds: d.Events, EntitlementTypes: d.EntitlementTypes, Deduplicates: d.Deduplicates}
	if n, ok := d.section.(notifying); ok {
		s.Template = n.template()
	} else {
		s.Render = renderEvent
	}
	return s
}

// Stored is what the store is configured with, so that a delivery for each of them commits with every entry.
func Stored(all []Destination) []store.Destination {
	stored := make([]store.Destination, len(all))
	for i := range all {
		stored[i] = all[i].stored()
	}
	return stored
}

const (
	defaultTimeout     = 10 * time.Second
	defaultDeadline    = 30 * time.Second
	defaultRetryLimit  = 12
	defaultMinDelay    = time.Second
	defaultMaxDelay    = 15 * time.Minute
	defaultConcurrency = 16
	// A broker takes messages on one connection, so that more at once cost it nothing.
	defaultNATSConcurrency = 256

	maxDeadline    = 10 * time.Minute
	maxRetryLimit  = 1000
	maxDelay       = 24 * time.Hour
	maxConcurrency = 1024
)

const (
	ruleName        = "must be a lower-case letter, then at most 62 of a-z 0-9 _ and -"
	ruleKind        = "must be webhook, nats or smtp"
	ruleEvents      = "must be GRANTED, REVERSED or REINSTATED"
	ruleType        = "must be 1 to 128 visible ASCII characters, no spaces"
	knownFields     = "name, kind, filter, internal, deduplicates, timeout, deadline, retry, concurrency and the kind's own section"
	knownFilter     = "events and entitlement_types"
	knownRetry      = "limit, min_delay and max_delay"
	ruleDestination = "must be a mapping with the field destinations"
)

var (
	namePattern = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,62}$`)
	kindPattern = regexp.MustCompile(`^(webhook|nats|smtp)$`)
	typePattern = regexp.MustCompile(`^[!-~]{1,128}$`)
)

// ParseDestinations reads the YAML text of a destinations' file; docs/deliveries.md lists its fields. Whatever is not understood is
// refused. The error has a line for each problem, 20 at most, of the form
// `destinations.yaml:4: destinations[0].retry.limit: must be …`, with name for the file.
func ParseDestinations(name string, text []byte) ([]Destination, error) {
	var all []Destination
	err := strictyaml.Read(name, text, "destinations", func(f *strictyaml.File, root *yaml.Node) {
		found := false
		f.Fields(root, root.Line, "", ruleDestination, func(key, value *yaml.Node) {
			if key.Value != "destinations" {
				f.Refuse(key.Line, strictyaml.Shown(key.Value), "unknown field; the only one here is destinations")
				return
			}
			found = true
			names := make(map[string]int)
			field{f, key.Line, key.Value, value}.items(func(f field) {
				d := readDestination(f)
				if first, again := names[d.Name]; again && d.Name != "" {
					f.refuse(fmt.Sprintf("the name %s stands in line %d already", d.Name, first))
				}
				names[d.Name] = f.line
				all = append(all, d)
			})
		})
		if !found && !f.Problems() {
			f.Refuse(root.Line, "destinations", "required")
		}
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

func readDestination(f field) Destination {
	d := Destination{
		Timeout: defaultTimeout, Deadline: defaultDeadline,
		Retry: Retry{Limit: defaultRetryLimit, MinDelay: defaultMinDelay, MaxDelay: defaultMaxDelay},
	}
	var deduplicates, timeout *field
	sections := make(map[string]field)
	f.fields(knownFields, func(name string, f field) bool {
		switch name {
		case "name":
			d.Name = f.match(namePattern, ruleName)
		case "kind":
			d.Kind = f.match(kindPattern, ruleKind)
		case "filter":
			d.readFilter(f)
		case "internal":
			d.Internal = f.bool()
		case "deduplicates":
			d.Deduplicates, deduplicates = f.bool(), &f
		case "timeout":
			d.Timeout, timeout = f.duration(time.Millisecond, maxDeadline), &f
		case "deadline":
			d.Deadline = f.duration(time.Millisecond, maxDeadline)
		case "retry":
			d.Retry.read(f)
		case "concurrency":
			d.Concurrency = f.integer(1, maxConcurrency)
		case "webhook", "nats", "smtp":
			sections[name] = f
		default:
			return false
		}
		return true
	})
	if f.value.Kind != yaml.MappingNode {
		return d
	}
	if d.Concurrency == 0 {
		d.Concurrency = defaultConcurrency
		if d.Kind == "nats" {
			d.Concurrency = defaultNATSConcurrency
		}
	}
	switch {
	case timeout == nil:
		d.Timeout = min(d.Timeout, d.Deadline)
	case d.Timeout > d.Deadline:
		timeout.refuse("must not be longer than the deadline")
	}
	d.readSection(f, sections, deduplicates)
	return d
}

// readSection reads the section that the kind names, which must be the only one, and settles what the kind says of deduplication.
func (d *Destination) readSection(f field, sections map[string]field, deduplicates *field) {
	if d.Name == "" {
		f.missing("name")
	}
	if d.Kind == "" {
		f.missing("kind")
		return
	}
	for name, s := range sections {
		if name != d.Kind {
			s.refuse("does not belong to the kind " + d.Kind)
		}
	}
	s, ok := sections[d.Kind]
	if !ok {
		f.missing(d.Kind)
		return
	}
	switch d.Kind {
	case "webhook":
		d.section = readWebhook(s)
	case "nats":
		if deduplicates != nil && !d.Deduplicates {
			deduplicates.refuse("must be true or left out: JetStream deduplicates by Nats-Msg-Id")
		}
		d.Deduplicates = true
		d.section = readNATS(s)
	case "smtp":
		if d.Deduplicates {
			deduplicates.refuse("must be false or left out: no mail server deduplicates")
		}
		d.section = readSMTP(s)
	}
}

// missing refuses a mapping for a field that it lacks, unless something is wrong already that may be the cause.
func (f field) missing(name string) {
	if !f.file.Problems() {
		f.file.Refuse(f.line, strictyaml.Under(f.path, name), "required")
	}
}

func (d *Destination) readFilter(f field) {
	f.fields(knownFilter, func(name string, f field) bool {
		switch name {
		case "events":
			f.items(func(f field) {
				n, ok := entitlementv1.EntryKind_value["ENTRY_KIND_"+f.value.Value]
				if !strictyaml.Text(f.value) || !ok || n == 0 {
					f.refuse(ruleEvents)
					return
				}
				d.Events = append(d.Events, entitlementv1.EntryKind(n))
			})
		case "entitlement_types":
			f.items(func(f field) { d.EntitlementTypes = append(d.EntitlementTypes, f.match(typePattern, ruleType)) })
		default:
			return false
		}
		if f.value.Kind == yaml.SequenceNode && len(f.value.Content) == 0 {
			f.refuse("must not be empty; without the field everything passes")
		}
		return true
	})
}

func (r *Retry) read(f field) {
	f.fields(knownRetry, func(name string, f field) bool {
		switch name {
		case "limit":
			r.Limit = f.integer(1, maxRetryLimit)
		case "min_delay":
			r.MinDelay = f.duration(time.Millisecond, maxDelay)
		case "max_delay":
			r.MaxDelay = f.duration(time.Millisecond, maxDelay)
		default:
			return false
		}
		return true
	})
	if r.MaxDelay < r.MinDelay {
		f.refuse("max_delay must not be less than min_delay")
	}
}

// plainEvent is the event's name as the file and the metrics have it.
func plainEvent(k entitlementv1.EntryKind) string {
	return strings.TrimPrefix(k.String(), "ENTRY_KIND_")
}
