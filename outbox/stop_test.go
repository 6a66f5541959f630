package outbox_test

import (
	"net"
	"testing"
	"time"

	"github.com/grantd/grantd/outbox"
)

// A call is cut off at the stop before the mail was spoken of. It is known not to have been sent, and goes back: left to its lease it would be
// in doubt, and wait for an operator.
func TestOutbox_StopGivesBackWhatWasNotSent(t *testing.T) {
	greets := make(chan struct{}, 1)
	addr := mailScript(t, func(_ net.Conn, command string) bool {
		if command == "" {
			greets <- struct{}{}
		}
		return command == ""
	})
	b := setup(t, "destinations:"+mailHook("customer", addr))
	r := b.start(func(c *outbox.Config) { c.Grace = time.Millisecond })
	b.apply(grantAndTell("INV-1", "ann@example.com"))
	<-greets
	r.stop()
	b.awaitState("customer", pending, 1)
}

// The database refuses to record what came of a call when the process is told to stop, and takes it before the grace is over. One that gave
// up at once would leave a mail in doubt that was accepted.
func TestOutbox_StopRecordsUntilTheGraceIsOver(t *testing.T) {
	m := &mailServer{}
	serveMail(t, m, nil, false)
	b := setup(t, "destinations:"+mailHook("customer", m.addr))
	b.exec(`ALTER TABLE settled_deliveries ADD CONSTRAINT refused CHECK (false)`)
	refused := make(logged)
	r := b.start(func(c *outbox.Config) { c.Grace, c.Log = time.Minute, refused.log() })
	b.apply(grantAndTell("INV-1", "ann@example.com"))
	<-refused
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	select {
	case <-stopped:
	case <-time.After(3 * time.Second):
		b.exec(`ALTER TABLE settled_deliveries DROP CONSTRAINT refused`)
		<-stopped
	}
	b.awaitState("customer", delivered, 1)
}
