package server

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"net/url"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// maxCallerBytes bounds a caller's name, which stands in every attempt.
const maxCallerBytes = 200

// callerOf returns the name in the verified client certificate of a call: its SPIFFE ID, else its first DNS name, else "".
// A name of more than 200 bytes ends in a digest of the whole, so that two long names stay two.
func callerOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 || len(info.State.PeerCertificates) == 0 {
		return ""
	}
	return certificateName(info.State.PeerCertificates[0])
}

func certificateName(cert *x509.Certificate) string {
	if id := spiffeID(cert.URIs); id != "" {
		return boundedCaller(id)
	}
	for _, name := range cert.DNSNames {
		if isDNSName(name) {
			return boundedCaller(name)
		}
	}
	return ""
}

// spiffeID returns the one SPIFFE ID among a certificate's URIs. A certificate with several names no one: X.509-SVID
// allows one URI only.
func spiffeID(uris []*url.URL) string {
	if len(uris) != 1 {
		return ""
	}
	u := uris[0]
	if u.Scheme != "spiffe" || u.User != nil || u.Opaque != "" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return ""
	}
	if u.Host == "" || !consistsOf(u.Host, lowerCase+digits+".-_") {
		return ""
	}
	if u.Path != "" {
		// The escaped form: SPIFFE paths have no percent-encoding.
		for segment := range strings.SplitSeq(strings.TrimPrefix(u.EscapedPath(), "/"), "/") {
			if segment == "" || segment == "." || segment == ".." || !consistsOf(segment, lettersAndDigits+".-_") {
				return ""
			}
		}
	}
	return "spiffe://" + u.Host + u.Path
}

// isDNSName keeps out what a certificate may carry but a row or a log line may not, such as NUL.
func isDNSName(name string) bool {
	return name != "" && consistsOf(name, lettersAndDigits+".-_*")
}

const lettersAndDigits = lowerCase + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + digits

func consistsOf(s, allowed string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return !strings.ContainsRune(allowed, r) }) < 0
}

func boundedCaller(name string) string {
	if len(name) <= maxCallerBytes {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	digest := "~" + hex.EncodeToString(sum[:8])
	return name[:maxCallerBytes-len(digest)] + digest
}
