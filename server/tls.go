package server

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// tlsCheckInterval is how often, at most, a handshake looks at the files.
const tlsCheckInterval = time.Second

// TLSFiles names PEM files. They are read again when their contents change, so that certificates rotate without a restart.
type TLSFiles struct {
	// Cert holds the certificate and its intermediates, Key the private key.
	Cert, Key string
	// ClientCA holds the authorities whose certificates callers must present; empty asks callers for none.
	ClientCA string
}

// NewTLSConfig reads the files and returns a configuration that follows them: the first handshake a second or more after
// a change uses the new contents. Contents that do not load (half written, a certificate without its key) are logged, and
// those before stay in use. Connections that stand are not touched by a change; Limits.MaxConnectionAge bounds them.
func NewTLSConfig(files TLSFiles, log *slog.Logger) (*tls.Config, error) {
	return newTLSConfig(files, log, tlsCheckInterval)
}

func newTLSConfig(files TLSFiles, log *slog.Logger, interval time.Duration) (*tls.Config, error) {
	f := &followedTLS{files: files, log: log, interval: interval}
	contents, err := files.read()
	if err != nil {
		return nil, err
	}
	config, err := contents.config()
	if err != nil {
		return nil, err
	}
	f.config.Store(config)
	f.contents, f.checked = contents, time.Now()
	outer := config.Clone()
	outer.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		f.follow()
		return f.config.Load(), nil
	}
	return outer, nil
}

// followedTLS holds the configuration in use and the contents that it was made of.
//
// Contents are compared, not times or inodes: three small files a second cost nothing, and nothing else is right for
// renames, swapped symlinks, writes in place and file systems with coarse clocks alike.
type followedTLS struct {
	files    TLSFiles
	log      *slog.Logger
	interval time.Duration
	config   atomic.Pointer[tls.Config]

	mu       sync.Mutex
	checked  time.Time
	contents tlsContents
	failure  string // the last one logged; "" after a success
}

func (f *followedTLS) follow() {
	// A handshake never waits for another's look at the files.
	if !f.mu.TryLock() {
		return
	}
	defer f.mu.Unlock()
	if time.Since(f.checked) < f.interval {
		return
	}
	f.checked = time.Now()
	contents, err := f.files.read()
	if err == nil && contents.equal(f.contents) {
		f.failure = ""
		return
	}
	var config *tls.Config
	if err == nil {
		config, err = contents.config()
	}
	if err != nil {
		if f.failure != err.Error() {
			f.failure = err.Error()
			f.log.Error("TLS files do not load; the ones before stay in use", "error", err)
		}
		return
	}
	f.contents, f.failure = contents, ""
	f.config.Store(config)
	leaf := config.Certificates[0].Leaf
	f.log.Info("TLS files reloaded", "serial", leaf.SerialNumber.Text(16), "not_after", leaf.NotAfter)
	if time.Now().After(leaf.NotAfter) {
		f.log.Error("TLS certificate has expired", "not_after", leaf.NotAfter)
	}
}

type tlsContents struct {
	files               TLSFiles
	cert, key, clientCA []byte
	withClientCA        bool
}

func (f TLSFiles) read() (tlsContents, error) {
	c := tlsContents{files: f, withClientCA: f.ClientCA != ""}
	var err error
	if c.cert, err = os.ReadFile(f.Cert); err != nil {
		return c, fmt.Errorf("TLS certificate: %w", err)
	}
	if c.key, err = os.ReadFile(f.Key); err != nil {
		return c, fmt.Errorf("TLS key: %w", err)
	}
	if c.withClientCA {
		if c.clientCA, err = os.ReadFile(f.ClientCA); err != nil {
			return c, fmt.Errorf("TLS client CA: %w", err)
		}
	}
	return c, nil
}

func (c tlsContents) equal(d tlsContents) bool {
	return bytes.Equal(c.cert, d.cert) && bytes.Equal(c.key, d.key) && bytes.Equal(c.clientCA, d.clientCA)
}

func (c tlsContents) config() (*tls.Config, error) {
	// X509KeyPair stops quietly at a chain's torn end.
	if _, err := parseCertificates(c.cert); err != nil {
		return nil, fmt.Errorf("TLS certificate %s: %w", c.files.Cert, err)
	}
	pair, err := tls.X509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate %s and key %s: %w", c.files.Cert, c.files.Key, err)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2"},
	}
	if c.withClientCA {
		authorities, err := parseCertificates(c.clientCA)
		if err != nil {
			return nil, fmt.Errorf("TLS client CA %s: %w", c.files.ClientCA, err)
		}
		config.ClientCAs = x509.NewCertPool()
		for _, authority := range authorities {
			config.ClientCAs.AddCert(authority)
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
		// A ticket carries a verification made earlier past a change of the authorities. Connections are long-lived:
		// full handshakes are rare.
		config.SessionTicketsDisabled = true
	}
	return config, nil
}

// parseCertificates returns a PEM file's certificates, at least one. A block that does not end is an error, where
// x509.CertPool would leave it out: half of a list of authorities must not be taken for the list.
func parseCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		data = rest
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, cert)
	}
	if bytes.Contains(data, []byte("-----BEGIN")) {
		return nil, errors.New("a PEM block is cut off or malformed")
	}
	if len(certs) == 0 {
		return nil, errors.New("no certificate found")
	}
	return certs, nil
}
