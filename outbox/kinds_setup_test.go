package outbox_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/outbox"
	"github.com/grantd/grantd/store"
)

// openKind opens the only destination of a file's text.
func openKind(t *testing.T, text string, env map[string]string) *outbox.Kind {
	t.Helper()
	all, err := outbox.ParseDestinations("destinations.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	kind, err := outbox.OpenKind(&all[0], func(name string) string { return env[name] })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kind.Close)
	return kind
}

// newDelivery is a delivery of a fresh grant, to a customer who reads German.
func newDelivery() *store.Delivery {
	key := make([]byte, 32)
	rand.Read(key)
	at := time.Date(2026, 3, 1, 12, 30, 0, 0, time.UTC)
	ends := at.AddDate(1, 0, 0)
	seats := int64(10)
	id := uuid.New()
	return &store.Delivery{
		TenantID: "acme", ID: uuid.New(), Key: hex.EncodeToString(key), Destination: "under_test", Attempts: 1,
		Notify: &store.Notify{Recipient: "Ann <ann@example.com>", Locale: "de-AT"},
		Event: &store.Event{
			Entry: store.Entry{
				TenantID: "acme", EntitlementID: id, Number: 1, Kind: entitlementv1.EntryKind_ENTRY_KIND_GRANTED,
				OperationKey: "billing:grant:INV-1:team_access", InvoiceVersion: 1, At: at,
			},
			Entitlement: store.Entitlement{
				ID: id, OperationKey: "billing:grant:INV-1:team_access", GrantedAt: at, EndsAt: &ends,
				State: entitlementv1.EntitlementState_ENTITLEMENT_STATE_ACTIVE, Version: 1, ChangedAt: at,
				Grant: store.Grant{
					TenantID: "acme", InvoiceID: "INV-1", EntitlementType: "team_access", Scope: map[string]string{"region": "eu"},
					Quantity: &seats, ExpiresAt: &ends,
				},
			},
			Operation: store.Operation{
				TenantID: "acme", IdempotencyKey: "billing:grant:INV-1:team_access",
				Origin: store.Origin{TraceID: [16]byte{1, 2, 3}, SpanID: [8]byte{4, 5, 6}},
			},
		},
	}
}

// rendered is a delivery as its first claim leaves it.
func rendered(t *testing.T, kind *outbox.Kind) *store.Delivery {
	t.Helper()
	d := newDelivery()
	if err := kind.Render(d); err != nil {
		t.Fatal(err)
	}
	return d
}

// within bounds an attempt as the worker does.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// serverCertificate makes a certificate for 127.0.0.1, and returns it with the name of a PEM file of its authority.
func serverCertificate(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, name
}

// silentServer accepts connections and says nothing on them.
func silentServer(t *testing.T) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener.Addr().String()
}
