package outbox

import (
	"context"

	"github.com/grantd/grantd/store"
)

// Panicking has the sender of a destination panic at a step, `render`, `send` or `ask`, for the deliveries of one tenant.
func Panicking(d *Destination, step, tenant string) {
	d.section = panickingSection{d.section, step, tenant}
}

type panickingSection struct {
	section
	step, tenant string
}

func (s panickingSection) open(d *Destination, in surroundings) (sender, error) {
	opened, err := s.section.open(d, in)
	return panickingSender{opened, s}, err
}

type panickingSender struct {
	sender
	at panickingSection
}

func (s panickingSender) meet(step string, d *store.Delivery) {
	if step == s.at.step && d.TenantID == s.at.tenant {
		panic("a bug in " + step)
	}
}

func (s panickingSender) render(d *store.Delivery) ([]byte, string, error) {
	s.meet("render", d)
	return s.sender.render(d)
}

func (s panickingSender) send(ctx context.Context, d *store.Delivery) result {
	s.meet("send", d)
	return s.sender.send(ctx, d)
}

func (s panickingSender) ask(ctx context.Context, d *store.Delivery) (bool, error) {
	s.meet("ask", d)
	return s.sender.(asker).ask(ctx, d)
}

func (s panickingSender) canAsk() bool { return s.sender.(asker).canAsk() }
