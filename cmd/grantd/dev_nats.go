package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	devStream  = "ENTITLEMENTS"
	devSubject = "entitlements.{event}"

	devStreamMaxAge   = 7 * 24 * time.Hour
	devStreamMaxBytes = 256 << 20
	devNATSStart      = 10 * time.Second
)

// devNATS is a NATS server with JetStream within this process.
type devNATS struct {
	server *natsserver.Server
	url    string
}

// startDevNATS serves on a loopback address and keeps its streams in dir. Where the port is taken it uses a free one: somebody who
// tries grantd may well have a NATS server running.
func startDevNATS(addr, dir string) (*devNATS, error) {
	host, portText, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("--nats-addr: %w", err)
	}
	if !isLoopback(host) {
		return nil, errors.New("--nats-addr must be on loopback: this server asks nobody who they are")
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("--nats-addr: %w", err)
	}
	options := &natsserver.Options{
		ServerName: "grantd-dev", Host: host, Port: int(port), JetStream: true, StoreDir: dir, JetStreamMaxStore: 2 * devStreamMaxBytes,
		// Signals are this process's own to handle.
		NoSigs: true, NoLog: true,
	}
	if taken(addr) || port == 0 {
		options.Port = natsserver.RANDOM_PORT
	}
	server, err := natsserver.NewServer(options)
	if err != nil {
		return nil, err
	}
	n := &devNATS{server: server}
	server.Start()
	if !server.ReadyForConnections(devNATSStart) {
		n.stop()
		return nil, fmt.Errorf("it does not answer at %s", addr)
	}
	n.url = server.ClientURL()
	if err := n.makeStream(); err != nil {
		n.stop()
		return nil, err
	}
	return n, nil
}

func taken(addr string) bool {
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return errors.Is(err, syscall.EADDRINUSE)
	}
	listener.Close()
	return false
}

func (n *devNATS) makeStream() error {
	ctx, cancel := context.WithTimeout(context.Background(), devNATSStart)
	defer cancel()
	conn, err := nats.Connect(n.url)
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return err
	}
	_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: devStream, Subjects: []string{"entitlements.>"}, Storage: jetstream.FileStorage,
		MaxAge: devStreamMaxAge, MaxBytes: devStreamMaxBytes, Duplicates: time.Hour,
	})
	return err
}

func (n *devNATS) stop() {
	n.server.Shutdown()
	n.server.WaitForShutdown()
}
