package outbox

import (
	"context"
	"time"

	"github.com/grantd/grantd/store"
)

// sender is the way to one destination. Each kind has its own. Its methods are called from many goroutines at once.
type sender interface {
	// render makes the body and its media type, for a delivery that has none: the store keeps the bytes, and every attempt sends them, also
	// after a new build. With an error the delivery is DEAD.
	render(d *store.Delivery) (body []byte, contentType string, err error)
	// send makes one attempt. ctx ends at the destination's deadline, holds the attempt's span and, for internal destinations only,
	// the members of baggage that may travel on; carry writes both where a message has headers. send returns soon after ctx has ended.
	// If it panics, the call may have been made.
	send(ctx context.Context, d *store.Delivery) result
	// close ends what the sender keeps open, after the last send has returned.
	close()
}

// asker is a sender whose destination can be asked whether a delivery arrived. Deliveries of other ones stay UNKNOWN until an
// operator resolves them.
type asker interface {
	// ask returns an error where there is no answer. canAsk says whether there is anyone to ask.
	ask(ctx context.Context, d *store.Delivery) (arrived bool, err error)
	canAsk() bool
}

// result is what came of one attempt.
type result struct {
	verdict verdict
	// statusCode is the answer's where the protocol has one (HTTP, SMTP), and 0 otherwise.
	statusCode int
	// retryAfter is how long the destination asked to wait; 0 where it did not say.
	retryAfter time.Duration
	// reason says what went wrong, for people. It is sanitised and cut to 1 KiB by the worker, and must not hold secrets.
	reason string
	// note says more of a success, for example "duplicate".
	note string
	// unreachable says that nothing of the delivery has to do with the failure: nobody answered, or the answer was about the
	// destination itself. It never counts against the delivery.
	unreachable bool
}

// verdict is what an attempt means for the delivery.
type verdict int

const (
	// uncertain: it may have it, and so the verdict of a result that says nothing. Where the destination deduplicates this is transient;
	// else the delivery goes to UNKNOWN.
	uncertain verdict = iota
	// delivered: the destination has it.
	delivered
	// transient: it does not have it, and a later attempt may succeed.
	transient
	// permanent: it does not want it, and would not later.
	permanent
	// gone is permanent, and the destination takes nothing else either: it is paused until an operator resumes it.
	gone
)
