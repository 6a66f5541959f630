package main

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// Two addresses are opened: who reads that one is in use must learn which flag moves it.
func TestServe_AddressInUse(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for flag, addr := range map[string]*service{
		"--grpc-addr": {GRPCAddr: taken.Addr().String(), HTTPAddr: "127.0.0.1:0"},
		"--http-addr": {GRPCAddr: "127.0.0.1:0", HTTPAddr: taken.Addr().String()},
	} {
		addr.LogLevel = "info"
		err := addr.serve(t.Context(), "", nil, stdio{stdout: io.Discard, stderr: io.Discard}, nil)
		if err == nil || !strings.HasPrefix(err.Error(), flag+": ") || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// A retention below zero reaches into the future: the day of attempts that every write needs would be dropped, and the aliases of this
// very moment. And 0 is no retention that anybody can mean: the store takes it for its default.
func TestServe_NumbersWithoutSense(t *testing.T) {
	url := pgtest.New(t)
	for _, flag := range []string{
		"--committers=0", "--queue-limit=0", "--queue-limit=-1",
		"--alias-retention=0", "--attempt-retention=0s", "--attempt-retention=-48h", "--delivery-retention=-1ns",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err := run(ctx, []string{"serve", "--database-url", url, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", flag}, nil, io.Discard, io.Discard)
		cancel()
		name, _, _ := strings.Cut(flag, "=")
		if err == nil || !strings.Contains(err.Error(), name+" must be") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
