package outbox_test

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// broker is a real NATS server with JetStream.
type broker struct {
	options *server.Options
	server  *server.Server
}

func newBroker(t *testing.T, change func(*server.Options)) *broker {
	t.Helper()
	b := &broker{options: &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoLog: true, NoSigs: true,
	}}
	if change != nil {
		change(b.options)
	}
	b.start(t)
	t.Cleanup(func() { b.stop() })
	return b
}

// start also starts a broker that was stopped, where it was and with what it stored.
func (b *broker) start(t *testing.T) {
	t.Helper()
	s, err := server.NewServer(b.options.Clone())
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the broker does not start")
	}
	b.server = s
	b.options.Port = s.Addr().(*net.TCPAddr).Port
}

func (b *broker) stop() {
	b.server.Shutdown()
	b.server.WaitForShutdown()
}

func (b *broker) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", b.options.Port) }

// jetStream is the test's own connection.
func (b *broker) jetStream(t *testing.T, options ...nats.Option) jetstream.JetStream {
	t.Helper()
	conn, err := nats.Connect(b.url(), append(options, nats.NoReconnect())...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// stream makes the stream EVENTS, which takes entitlements.>.
func (b *broker) stream(t *testing.T, js jetstream.JetStream, change func(*jetstream.StreamConfig)) jetstream.Stream {
	t.Helper()
	config := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"entitlements.>"}, Storage: jetstream.FileStorage}
	if change != nil {
		change(&config)
	}
	stream, err := js.CreateOrUpdateStream(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func stored(t *testing.T, stream jetstream.Stream) uint64 {
	t.Helper()
	info, err := stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}

func natsDestination(url, more string) string {
	return fmt.Sprintf(`
destinations:
  - name: products
    kind: nats
    internal: true
    timeout: 2s
    nats:
      servers: [%s]
      subject: entitlements.{event}
%s`, url, more)
}
