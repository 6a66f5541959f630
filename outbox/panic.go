package outbox

import (
	"errors"
	"log/slog"
	"runtime/debug"
)

var errPanic = errors.New("it ended in a panic, which the log has")

// caught is deferred where a panic must not end the process, and with it every other delivery: it becomes an error. The log has the key of
// the delivery that it is of, where it is of one.
func caught(log *slog.Logger, what, deliveryKey string, err *error) {
	if p := recover(); p != nil {
		log.Error(what+" panicked", "delivery_key", deliveryKey, "panic", p, "stack", string(debug.Stack()))
		*err = errPanic
	}
}
