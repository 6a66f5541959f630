package outbox

import (
	"crypto/x509"
	"errors"
	"net"
	"os"
)

// readTLSFiles reads the names of PEM files: the authority that signed the server's certificate, and the client's own pair.
func readTLSFiles(f field, ca, cert, key *string) {
	f.fields("ca_file, cert_file and key_file", func(name string, f field) bool {
		switch name {
		case "ca_file":
			*ca = f.text()
		case "cert_file":
			*cert = f.text()
		case "key_file":
			*key = f.text()
		default:
			return false
		}
		return true
	})
	if (*cert == "") != (*key == "") {
		f.refuse("cert_file and key_file go together")
	}
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func readAuthorities(name string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errors.New("the file " + name + " holds no certificate")
	}
	return pool, nil
}
