package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"strings"
	"testing"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/server"
)

func TestCaller_CertificateName(t *testing.T) {
	long := "spiffe://example.org/" + strings.Repeat("a", 300)
	for _, c := range []struct {
		name string
		uris []string
		dns  []string
		want string
	}{
		{"SPIFFE before DNS", []string{"spiffe://example.org/ns/prod/sa/billing"}, []string{"billing.internal"}, "spiffe://example.org/ns/prod/sa/billing"},
		{"trust domain alone", []string{"spiffe://example.org"}, nil, "spiffe://example.org"},
		{"first DNS name", nil, []string{"billing.internal", "other.internal"}, "billing.internal"},
		{"wildcard", nil, []string{"*.internal"}, "*.internal"},
		{"no name", nil, nil, ""},
		{"another scheme", []string{"https://example.org/x"}, []string{"billing.internal"}, "billing.internal"},
		{"two URIs", []string{"spiffe://example.org/a", "spiffe://example.org/b"}, []string{"billing.internal"}, "billing.internal"},
		{"upper-case trust domain", []string{"spiffe://Example.org/a"}, nil, ""},
		{"no trust domain", []string{"spiffe:///a"}, nil, ""},
		{"opaque", []string{"spiffe:example.org"}, nil, ""},
		{"port", []string{"spiffe://example.org:80/a"}, nil, ""},
		{"user", []string{"spiffe://me@example.org/a"}, nil, ""},
		{"query", []string{"spiffe://example.org/a?b"}, nil, ""},
		{"empty query", []string{"spiffe://example.org/a?"}, nil, ""},
		{"fragment", []string{"spiffe://example.org/a#b"}, nil, ""},
		{"trailing slash", []string{"spiffe://example.org/a/"}, nil, ""},
		{"slash alone", []string{"spiffe://example.org/"}, nil, ""},
		{"dots", []string{"spiffe://example.org/a/../b"}, nil, ""},
		{"percent-encoding", []string{"spiffe://example.org/a%2Fb"}, nil, ""},
		{"other characters", []string{"spiffe://example.org/ä"}, nil, ""},
		{"DNS name with NUL", nil, []string{"billing\x00.internal", "other.internal"}, "other.internal"},
		{"empty DNS name", nil, []string{""}, ""},
		{"bound", []string{long}, nil, long[:183] + "~fd9bc0db99308f8a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cert := &x509.Certificate{DNSNames: c.dns}
			for _, s := range c.uris {
				u, err := url.Parse(s)
				if err != nil {
					t.Fatal(err)
				}
				cert.URIs = append(cert.URIs, u)
			}
			if got := server.CertificateName(cert); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	short, longer := &x509.Certificate{DNSNames: []string{strings.Repeat("a", 200)}}, &x509.Certificate{DNSNames: []string{strings.Repeat("a", 201)}}
	if got := server.CertificateName(short); got != short.DNSNames[0] {
		t.Errorf("a name of 200 bytes became %q", got)
	}
	if got := server.CertificateName(longer); len(got) != 200 || got == short.DNSNames[0] {
		t.Errorf("a name of 201 bytes became %q", got)
	}
}

func TestCaller_OfACall(t *testing.T) {
	var caller string
	grants := &grantFunc{grant: func(ctx context.Context, _ *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
		caller = server.CallerOf(ctx)
		return &entitlementv1.GrantEntitlementResponse{}, nil
	}}
	a := newAuthority(t)
	for _, c := range []struct {
		name     string
		clientCA bool
		plain    bool
		want     string
	}{
		{"plaintext", false, true, ""},
		{"TLS", false, false, ""},
		{"client certificate", true, false, "spiffe://example.org/billing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var config, clientConfig *tls.Config
			if !c.plain {
				files := a.files(t, c.clientCA)
				var err error
				if config, err = server.NewTLSConfig(files, quiet); err != nil {
					t.Fatal(err)
				}
				// Also without a client CA: a certificate that nobody verified names no one.
				clientConfig = a.client(t, "spiffe://example.org/billing")
			}
			caller = "unset"
			b := setupTransport(t, transportSetup{tls: config, grants: grants})
			client := entitlementv1.NewEntitlementServiceClient(b.connect(t, clientConfig))
			if _, err := client.GrantEntitlement(t.Context(), &entitlementv1.GrantEntitlementRequest{}); err != nil {
				t.Fatal(err)
			}
			if caller != c.want {
				t.Errorf("caller %q, want %q", caller, c.want)
			}
		})
	}
	if got := server.CallerOf(t.Context()); got != "" {
		t.Errorf("caller %q outside a call", got)
	}
}
