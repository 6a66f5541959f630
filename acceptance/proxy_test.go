package acceptance_test

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
)

// fault is what happens to the reply that says that a statement is done.
type fault int

const (
	passOn fault = iota
	// breakOff loses the reply and ends the connection, on both sides.
	breakOff
	// fallSilent loses it and all that follows, and leaves the connection open.
	fallSilent
	// holdBack keeps it until release is called.
	holdBack
)

// postgresProxy stands between a store and PostgreSQL, and does one thing to one reply.
type postgresProxy struct {
	url string

	mu    sync.Mutex
	tag   string
	after string
	fault fault
	// reached is closed when the reply arrived from PostgreSQL: what it reports has happened.
	reached chan struct{}
	held    chan struct{}
	conns   []net.Conn
}

// serveProxyTo returns a proxy to the database that the URL names.
func serveProxyTo(t testing.TB, database string) *postgresProxy {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	u.Host = lis.Addr().String()
	query := u.Query()
	query.Set("sslmode", "disable") // so that replies can be read
	u.RawQuery = query.Encode()
	p := &postgresProxy{url: u.String()}
	var running sync.WaitGroup
	running.Go(func() {
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
			p.mu.Lock()
			p.conns = append(p.conns, client, server)
			p.mu.Unlock()
			running.Go(func() { io.Copy(server, client); server.Close() })
			running.Go(func() { p.replies(client, server); client.Close(); server.Close() })
		}
	})
	t.Cleanup(func() {
		lis.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		p.release()
		running.Wait()
	})
	return p
}

// on sets what happens to the next reply with this command tag, for example "COMMIT". It returns a channel that is closed when that
// reply is there.
func (p *postgresProxy) on(tag string, f fault) <-chan struct{} { return p.onAfter("", tag, f) }

// onAfter passes over replies with this tag in transactions that had none with the tag after.
func (p *postgresProxy) onAfter(after, tag string, f fault) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.after, p.tag, p.fault, p.reached, p.held = after, tag, f, make(chan struct{}), make(chan struct{})
	return p.reached
}

// release lets a reply go on that is held back.
func (p *postgresProxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held != nil {
		close(p.held)
		p.held = nil
	}
}

// meets says what happens to the last of a transaction's replies, once.
func (p *postgresProxy) meets(tags []string) (fault, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == passOn || tags[len(tags)-1] != p.tag || p.after != "" && !slices.Contains(tags, p.after) {
		return passOn, nil
	}
	f := p.fault
	p.fault = passOn
	close(p.reached)
	return f, p.held
}

// replies copies PostgreSQL's messages: a byte for the type, four for the length, and the body.
func (p *postgresProxy) replies(client, server net.Conn) {
	in := bufio.NewReader(server)
	var message []byte
	var tags []string // of the transaction under way
	for {
		message = slices.Grow(message[:0], 5)[:5]
		if _, err := io.ReadFull(in, message); err != nil {
			return
		}
		size := int(binary.BigEndian.Uint32(message[1:])) - 4
		message = slices.Grow(message, size)[:5+size]
		if _, err := io.ReadFull(in, message[5:]); err != nil {
			return
		}
		if message[0] == 'C' { // CommandComplete
			tag := strings.TrimRight(string(message[5:]), "\x00")
			if tag == "BEGIN" {
				tags = nil
			}
			tags = append(tags, tag)
			switch f, held := p.meets(tags); f {
			case breakOff:
				return
			case fallSilent:
				io.Copy(io.Discard, in)
				return
			case holdBack:
				<-held
			}
		}
		if _, err := client.Write(message); err != nil {
			return
		}
	}
}
