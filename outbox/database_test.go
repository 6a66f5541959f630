package outbox_test

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"

	"github.com/grantd/grantd/outbox"
)

// holdUp is a proxy to PostgreSQL, which can hold up one connection.
type holdUp struct {
	url string

	mu  sync.Mutex
	tag []byte
	// reached is closed when PostgreSQL has said what the connection is held up at; released lets it go on.
	reached, released chan struct{}
}

func serveHoldUp(t *testing.T, database string) *holdUp {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	lis := listenOn(t, "127.0.0.1:0")
	target, query := u.Host, u.Query()
	query.Set("sslmode", "disable")
	u.Host, u.RawQuery = lis.Addr().String(), query.Encode()
	p := &holdUp{url: u.String(), reached: make(chan struct{}), released: make(chan struct{})}
	t.Cleanup(func() { lis.Close(); p.release() })
	go relay(lis, target, func(client, server net.Conn) {
		go func() { io.Copy(server, client); server.Close() }()
		go func() { p.replies(client, server); client.Close() }()
	})
	return p
}

// relay connects what comes to the target, until the listener is closed.
func relay(lis net.Listener, target string, connect func(client, server net.Conn)) {
	for {
		client, err := lis.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close()
			continue
		}
		connect(client, server)
	}
}

// at holds up the next connection on which the end of such a command is reported, until release.
func (p *holdUp) at(command string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tag = []byte(command + "\x00")
}

func (p *holdUp) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.released != nil {
		close(p.released)
		p.released = nil
	}
}

func (p *holdUp) replies(client, server net.Conn) {
	buffer := make([]byte, 1<<16)
	for {
		n, err := server.Read(buffer)
		if err != nil {
			return
		}
		p.mu.Lock()
		released := p.released
		meets := p.tag != nil && released != nil && bytes.Contains(buffer[:n], p.tag)
		if meets {
			p.tag = nil
			close(p.reached)
		}
		p.mu.Unlock()
		if meets {
			<-released
		}
		if _, err := client.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// setupHeldUp has a destination that cannot deduplicate, and a replica behind the proxy.
func setupHeldUp(t *testing.T, changes ...func(*outbox.Config)) (*bundle, *holdUp, *replica) {
	in := newInbox(t, func(http.ResponseWriter, *http.Request, *event.Event, int) bool { return false })
	b := setup(t, "destinations:"+hook("crm", in.URL, in.ca, "deduplicates: false\n  timeout: 1s\n  deadline: 1s", ""))
	p := serveHoldUp(t, b.url)
	beside := *b
	beside.url = p.url
	behind := beside.openStore()
	return b, p, b.start(append(changes, func(c *outbox.Config) { c.Store = behind })...)
}

// The network to the database fails without a word while a claim waits for an answer. The worker must not wait for ever: other
// connections are as good as ever. It waits for as long as a lease lasts.
func TestOutbox_ClaimsAgainWhereTheDatabaseFellSilent(t *testing.T) {
	b, p, _ := setupHeldUp(t, func(c *outbox.Config) { c.LeaseMargin = 5 * time.Second })
	p.at("BEGIN")
	b.grant("acme", "INV-1", "team_access")
	<-p.reached
	b.awaitState("crm", delivered, 1)
}

// The process is told to stop when a claim has just been committed, and its answer is still on the way. The call was not made, so
// that the delivery goes back: left to its lease, it would be in doubt, and wait for an operator.
func TestOutbox_StopGivesBackWhatIsBeingClaimed(t *testing.T) {
	b, p, r := setupHeldUp(t)
	p.at("COMMIT")
	b.grant("acme", "INV-1", "team_access")
	<-p.reached
	b.awaitState("crm", sending, 1)
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	select {
	case <-stopped:
	case <-time.After(200 * time.Millisecond):
		p.release()
		<-stopped
	}
	b.awaitState("crm", pending, 1)
}
