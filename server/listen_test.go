package server_test

import (
	"crypto/tls"
	"strings"
	"testing"

	"github.com/grantd/grantd/server"
)

func TestListen_PlaintextOnLoopbackOnly(t *testing.T) {
	for _, c := range []struct {
		addr     string
		loopback bool
	}{
		{"127.0.0.1:0", true},
		{"127.0.0.2:0", true},
		{"localhost:0", true},
		{"[::1]:0", true},
		{"[::ffff:127.0.0.1]:0", true},
		{":0", false},
		{"", false},
		{"0.0.0.0:0", false},
		{"[::]:0", false},
		{"192.0.2.1:0", false},
	} {
		refused := func(config *tls.Config, insecurePlaintext bool) bool {
			lis, err := server.Listen(c.addr, config, insecurePlaintext)
			if err == nil {
				lis.Close()
			}
			// Some machines have no IPv6, and none has 192.0.2.1: that is another error.
			return err != nil && strings.Contains(err.Error(), "plaintext is refused")
		}
		if got := refused(nil, false); got == c.loopback {
			t.Errorf("%s in plaintext: refused = %v", c.addr, got)
		}
		if refused(nil, true) || refused(&tls.Config{}, false) {
			t.Errorf("%s was refused with --insecure-plaintext or with TLS", c.addr)
		}
	}
}

func TestListen_BadAddress(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "127.0.0.1:http:1", "no-such-host.invalid:1"} {
		if lis, err := server.Listen(addr, nil, true); err == nil {
			lis.Close()
			t.Errorf("%q was accepted", addr)
		}
	}
}
