package main

import (
	"io"
	"net"
	"strings"
	"testing"
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
		addr.Committers, addr.LogLevel = 1, "info"
		err := addr.serve(t.Context(), "", nil, stdio{stdout: io.Discard, stderr: io.Discard}, nil)
		if err == nil || !strings.HasPrefix(err.Error(), flag+": ") || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
