package server

import (
	"crypto/tls"
	"fmt"
	"net"
)

// Listen opens a TCP listener on addr, for example "127.0.0.1:50051"; an empty host means all interfaces.
//
// config is nil for plaintext, which an address that is not loopback gets only with insecurePlaintext. The listener
// itself never speaks TLS: that is the gRPC server's part.
func Listen(addr string, config *tls.Config, insecurePlaintext bool) (net.Listener, error) {
	// Resolved once, and the result is what is opened: a name that is resolved again could have moved off loopback.
	resolved, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", addr, err)
	}
	if config == nil && !insecurePlaintext && !resolved.IP.IsLoopback() {
		return nil, fmt.Errorf("listen on %q (%s): plaintext is refused on an address that is not loopback: "+
			"give a certificate and key, or allow it with --insecure-plaintext", addr, resolved)
	}
	return net.ListenTCP("tcp", resolved)
}
