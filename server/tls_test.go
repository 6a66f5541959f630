package server_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grantd/grantd/server"
)

var quiet = slog.New(slog.DiscardHandler)

// authority issues certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func serial(t *testing.T) *big.Int {
	t.Helper()
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// pair is a certificate and its key.
type pair struct {
	cert, key []byte
	serial    string
}

// issue returns a certificate for "grantd.test", good for servers and clients, with a SPIFFE ID unless that is empty.
func (a *authority) issue(t *testing.T, spiffe string) pair {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: serial(t), DNSNames: []string{"grantd.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if spiffe != "" {
		u, err := url.Parse(spiffe)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = []*url.URL{u}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pair{
		cert:   pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		key:    pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
		serial: template.SerialNumber.String(),
	}
}

// files writes a fresh pair, and the authority itself as the client CA if wanted.
func (a *authority) files(t *testing.T, clientCA bool) server.TLSFiles {
	t.Helper()
	dir := t.TempDir()
	files := server.TLSFiles{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
	p := a.issue(t, "")
	write(t, files.Cert, p.cert)
	write(t, files.Key, p.key)
	if clientCA {
		files.ClientCA = filepath.Join(dir, "ca.crt")
		write(t, files.ClientCA, a.pem)
	}
	return files
}

// client returns the configuration of a client that trusts the authority and has a certificate of it.
func (a *authority) client(t *testing.T, spiffe string) *tls.Config {
	t.Helper()
	p := a.issue(t, spiffe)
	cert, err := tls.X509KeyPair(p.cert, p.key)
	if err != nil {
		t.Fatal(err)
	}
	config := a.anonymous()
	config.Certificates = []tls.Certificate{cert}
	return config
}

func (a *authority) anonymous() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{RootCAs: pool, ServerName: "grantd.test", NextProtos: []string{"h2"}}
}

// write replaces a file in place.
func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// rename replaces a file as careful writers do.
func rename(t *testing.T, path string, data []byte) {
	t.Helper()
	write(t, path+".new", data)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// handshake connects, and returns the state once the server has accepted it: with TLS 1.3 a refused client certificate
// shows only in the first read.
func handshake(addr string, config *tls.Config) (tls.ConnectionState, error) {
	conn, err := tls.Dial("tcp", addr, config)
	if err != nil {
		return tls.ConnectionState{}, err
	}
	defer conn.Close()
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		return tls.ConnectionState{}, err
	}
	return conn.ConnectionState(), nil
}

// serveTLS serves with files, looked at in every handshake.
func serveTLS(t *testing.T, files server.TLSFiles) (b *served, log *logLines) {
	t.Helper()
	log = &logLines{}
	config, err := server.NewEagerTLSConfig(files, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return setupTransport(t, transportSetup{tls: config}), log
}

func wantSerial(t *testing.T, what string, b *served, config *tls.Config, want string) {
	t.Helper()
	state, err := handshake(b.addr, config)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if got := state.PeerCertificates[0].SerialNumber.String(); got != want {
		t.Errorf("%s: the server showed certificate %s, want %s", what, got, want)
	}
}

func TestTLS_Versions(t *testing.T) {
	a := newAuthority(t)
	b, _ := serveTLS(t, a.files(t, false))
	state, err := handshake(b.addr, a.anonymous())
	if err != nil || state.Version != tls.VersionTLS13 || state.NegotiatedProtocol != "h2" {
		t.Errorf("version %x, protocol %q, error %v; want TLS 1.3, h2", state.Version, state.NegotiatedProtocol, err)
	}
	older := a.anonymous()
	older.MaxVersion = tls.VersionTLS12
	if state, err := handshake(b.addr, older); err != nil || state.Version != tls.VersionTLS12 {
		t.Errorf("TLS 1.2: version %x, error %v", state.Version, err)
	}
	old := a.anonymous()
	old.MinVersion, old.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if _, err := handshake(b.addr, old); err == nil {
		t.Error("TLS 1.1 was accepted")
	}
	other := a.anonymous()
	other.NextProtos = []string{"http/1.1"}
	if _, err := handshake(b.addr, other); err == nil {
		t.Error("a client without h2 was accepted")
	}
}

func TestTLS_RotationByRename(t *testing.T) {
	a := newAuthority(t)
	files := a.files(t, false)
	b, log := serveTLS(t, files)
	next := a.issue(t, "")
	rename(t, files.Cert, next.cert)
	before, err := handshake(b.addr, a.anonymous())
	if err != nil {
		t.Fatalf("with the new certificate and the old key: %v", err)
	}
	if got := before.PeerCertificates[0].SerialNumber.String(); got == next.serial {
		t.Error("a certificate is used without its key")
	}
	if log.count("do not load") != 1 {
		t.Error("a certificate without its key is not logged")
	}
	rename(t, files.Key, next.key)
	wantSerial(t, "after the key", b, a.anonymous(), next.serial)
	if log.count("reloaded") != 1 {
		t.Error("the reload is not logged")
	}
}

// Story: the kubelet swaps the symlink ..data, through which the files' own symlinks go, and removes the old folder.
func TestTLS_RotationBySymlinkSwap(t *testing.T) {
	a := newAuthority(t)
	dir := t.TempDir()
	generation := 0
	swap := func(p pair) {
		t.Helper()
		generation++
		name := "..generation" + string(rune('0'+generation%10)) + string(rune('0'+generation/10))
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "tls.crt"), p.cert)
		write(t, filepath.Join(dir, name, "tls.key"), p.key)
		old, _ := os.Readlink(filepath.Join(dir, "..data"))
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
		if old != "" {
			if err := os.RemoveAll(filepath.Join(dir, old)); err != nil {
				t.Fatal(err)
			}
		}
	}
	swap(a.issue(t, ""))
	for _, name := range []string{"tls.crt", "tls.key"} {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	b, _ := serveTLS(t, server.TLSFiles{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")})

	// Nobody is turned away while it rotates.
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := handshake(b.addr, a.anonymous()); err != nil {
					t.Errorf("during a rotation: %v", err)
					return
				}
			}
		})
	}
	var last pair
	for range 20 {
		last = a.issue(t, "")
		swap(last)
	}
	close(stop)
	callers.Wait()
	wantSerial(t, "after the last swap", b, a.anonymous(), last.serial)
}

func TestTLS_HalfWrittenFilesKeepTheOldOnes(t *testing.T) {
	a := newAuthority(t)
	files := a.files(t, false)
	b, log := serveTLS(t, files)
	state, err := handshake(b.addr, a.anonymous())
	if err != nil {
		t.Fatal(err)
	}
	old := state.PeerCertificates[0].SerialNumber.String()
	next := a.issue(t, "")
	chain := append(bytes.Clone(next.cert), a.pem...)
	write(t, files.Key, next.key)
	for _, half := range [][]byte{nil, chain[:10], next.cert[:len(next.cert)/2], chain[:len(next.cert)+100]} {
		write(t, files.Cert, half)
		wantSerial(t, "half a certificate file", b, a.anonymous(), old)
	}
	if err := os.Remove(files.Cert); err != nil {
		t.Fatal(err)
	}
	wantSerial(t, "no certificate file", b, a.anonymous(), old)
	failures := log.count("do not load")
	wantSerial(t, "no certificate file, again", b, a.anonymous(), old)
	if got := log.count("do not load"); got != failures {
		t.Errorf("the same failure was logged again")
	}
	write(t, files.Cert, chain)
	wantSerial(t, "the whole file", b, a.anonymous(), next.serial)
}

func TestTLS_ClientCARotation(t *testing.T) {
	a, next := newAuthority(t), newAuthority(t)
	files := a.files(t, true)
	b, log := serveTLS(t, files)
	// A cache, so that the client tries to resume a session which the old authority opened.
	ours := a.client(t, "")
	ours.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	// The new authority's clients trust the server's own authority, which does not change here.
	theirs := next.client(t, "")
	theirs.RootCAs = ours.RootCAs
	accepted := func(what string, config *tls.Config, want bool) {
		t.Helper()
		if _, err := handshake(b.addr, config); (err == nil) != want {
			t.Errorf("%s: error %v, accepted should be %v", what, err, want)
		}
	}

	accepted("no certificate", a.anonymous(), false)
	accepted("the old authority's", ours, true)
	accepted("the new authority's, before", theirs, false)

	both := append(bytes.Clone(a.pem), next.pem...)
	rename(t, files.ClientCA, both[:len(both)-40])
	accepted("the old authority's, with half a list", ours, true)
	accepted("the new authority's, with half a list", theirs, false)
	// A list whose first half is whole must not drop the second one.
	swapped := append(bytes.Clone(next.pem), a.pem...)
	write(t, files.ClientCA, swapped[:len(swapped)-40])
	accepted("the old authority's, with the other half", ours, true)
	write(t, files.ClientCA, nil)
	accepted("the old authority's, with an empty list", ours, true)
	if log.count("client CA") == 0 {
		t.Error("a bad list is not logged")
	}

	rename(t, files.ClientCA, both)
	accepted("the old authority's, with both", ours, true)
	accepted("the new authority's, with both", theirs, true)

	rename(t, files.ClientCA, next.pem)
	accepted("the old authority's, after", ours, false)
	accepted("the new authority's, after", theirs, true)
}

func TestTLS_Refusals(t *testing.T) {
	a := newAuthority(t)
	for _, c := range []struct {
		name  string
		spoil func(*server.TLSFiles)
	}{
		{"no certificate", func(f *server.TLSFiles) { f.Cert += ".none" }},
		{"no key", func(f *server.TLSFiles) { f.Key += ".none" }},
		{"no client CA", func(f *server.TLSFiles) { f.ClientCA += ".none" }},
		{"another's key", func(f *server.TLSFiles) { write(t, f.Key, a.issue(t, "").key) }},
		{"a key as the client CA", func(f *server.TLSFiles) { f.ClientCA = f.Key }},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := a.files(t, true)
			c.spoil(&files)
			if _, err := server.NewTLSConfig(files, quiet); err == nil {
				t.Error("accepted")
			} else if errors.Is(err, os.ErrNotExist) != (c.name[:3] == "no ") || !strings.Contains(err.Error(), filepath.Dir(files.Cert)) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// The second between two looks at the files is real time here.
func TestTLS_FollowsWithinASecond(t *testing.T) {
	a := newAuthority(t)
	files := a.files(t, false)
	config, err := server.NewTLSConfig(files, quiet)
	if err != nil {
		t.Fatal(err)
	}
	b := setupTransport(t, transportSetup{tls: config})
	next := a.issue(t, "")
	rename(t, files.Cert, next.cert)
	rename(t, files.Key, next.key)
	for deadline := time.Now().Add(10 * time.Second); ; {
		state, err := handshake(b.addr, a.anonymous())
		if err != nil {
			t.Fatal(err)
		}
		if state.PeerCertificates[0].SerialNumber.String() == next.serial {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the new certificate is not in use after ten seconds")
		}
	}
}
