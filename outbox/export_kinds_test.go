package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/grantd/grantd/store"
)

// Kind is one destination's sender, with what a test may see of its results.
type Kind struct {
	destination *Destination
	sender      sender
}

// Attempt is a result.
type Attempt struct {
	// Verdict is delivered, transient, permanent, gone or uncertain.
	Verdict     string
	StatusCode  int
	Reason      string
	Note        string
	Unreachable bool
}

// OpenKind opens the sender of a destination.
func OpenKind(d *Destination, getenv func(string) string) (*Kind, error) {
	s, err := d.section.open(d, surroundings{getenv: getenv, now: time.Now, log: slog.New(slog.DiscardHandler)})
	return &Kind{d, s}, err
}

// Render is what the store has done at a delivery's first claim.
func (k *Kind) Render(d *store.Delivery) (err error) {
	d.Body, d.ContentType, err = k.sender.render(d)
	return err
}

// Send makes one attempt, in the context that the worker gives it.
func (k *Kind) Send(ctx context.Context, d *store.Delivery) Attempt {
	r := k.sender.send(originContext(ctx, d), d)
	return Attempt{
		Verdict: [...]string{
			uncertain: "uncertain", delivered: "delivered", transient: "transient", permanent: "permanent", gone: "gone",
		}[r.verdict],
		StatusCode: r.statusCode, Reason: r.reason, Note: r.note, Unreachable: r.unreachable,
	}
}

func (k *Kind) Close() { k.sender.close() }
