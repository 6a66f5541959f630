package store

import (
	"fmt"
	"regexp"
	"slices"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Destination is what the store must know of one: for each entry that passes its filter, a delivery commits with the entry.
type Destination struct {
	// Name is `[a-z][a-z0-9_-]{0,62}`. It is part of the delivery key: a renamed destination is a new one.
	Name string
	// Kinds are those of the entries it gets; empty for all.
	Kinds []entitlementv1.EntryKind
	// EntitlementTypes are those of the entitlements it hears of; empty for all.
	EntitlementTypes []string
	// Deduplicates says that it recognises a delivery key: what may have been sent is then sent again, and is UNKNOWN otherwise.
	Deduplicates bool
	// Template names a mail of at most 63 bytes. It makes the destination one that notifies: deliveries are made only for commands with
	// Notify, and only where no other destination's mail has that template.
	Template string
	// Render, if set, makes the body with the entry, so that no claim need read what the event is about. Where it fails, and where one
	// command appends very many entries, the claim makes the body.
	Render Renderer
}

var destinationName = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,62}$`)

func checkDestinations(all []Destination) error {
	names := make(map[string]bool, len(all))
	for i := range all {
		d := &all[i]
		switch {
		case !destinationName.MatchString(d.Name):
			return fmt.Errorf("destination %q: the name must match %s", d.Name, destinationName)
		case names[d.Name]:
			return fmt.Errorf("destination %q: there are two of that name", d.Name)
		case len(d.Template) > 63:
			return fmt.Errorf("destination %q: the template's name has more than 63 bytes", d.Name)
		}
		for _, k := range d.Kinds {
			if entitlementv1.EntryKind_name[int32(k)] == "" || k == entitlementv1.EntryKind_ENTRY_KIND_UNSPECIFIED {
				return fmt.Errorf("destination %q: there is no kind of entry %d", d.Name, k)
			}
		}
		names[d.Name] = true
	}
	return nil
}

// wants says whether an entry is bound for the destination.
func (d *Destination) wants(kind entitlementv1.EntryKind, entitlementType string, notify *Notify) bool {
	return (len(d.Kinds) == 0 || slices.Contains(d.Kinds, kind)) &&
		(len(d.EntitlementTypes) == 0 || slices.Contains(d.EntitlementTypes, entitlementType)) &&
		(d.Template == "" || notify != nil)
}

// destination returns the one of that name, or nil.
func (s *Store) destination(name string) *Destination {
	for i := range s.config.Destinations {
		if s.config.Destinations[i].Name == name {
			return &s.config.Destinations[i]
		}
	}
	return nil
}
