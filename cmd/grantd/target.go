package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/alecthomas/kong"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// target is the server that a command calls.
type target struct {
	Addr              string `help:"Server, host:port. Loopback is called in plaintext unless --ca, --cert or --cert-key is given, all else with TLS." default:"${addr}" env:"GRANTD_ADDR"`
	CA                string `name:"ca" help:"PEM file of the authority that signed the server's certificate; without it, the system's." type:"path" env:"GRANTD_CA"`
	Cert              string `help:"PEM file of the certificate that tells the server who calls." type:"path" env:"GRANTD_CERT"`
	CertKey           string `help:"PEM file of its private key." type:"path" env:"GRANTD_CERT_KEY"`
	InsecurePlaintext bool   `help:"Call a server that is not on loopback in plaintext." env:"GRANTD_INSECURE_PLAINTEXT"`
}

// environmentTarget is what the environment says where no flag does. What it says wrongly says nothing.
func environmentTarget(env []string) (t target) {
	if parser, err := kong.New(&t, kong.Resolvers(environment(env)), kong.Vars{"addr": defaultAddr}); err == nil {
		if _, err = parser.Parse(nil); err == nil {
			return t
		}
	}
	return target{}
}

// defaultAddr is the default of --addr.
const defaultAddr = "127.0.0.1:50051"

// connectTimeout bounds the wait for a server that is only just starting.
const connectTimeout = 5 * time.Second

// dial returns once the server accepts the connection, so that a wrong address is one error and not one for each call.
func (t *target) dial(ctx context.Context, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	transport, err := t.credentials()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("passthrough:///"+t.Addr, append(options, grpc.WithTransportCredentials(transport))...)
	if err != nil {
		return nil, err
	}
	if ready(ctx, conn) {
		return conn, nil
	}
	if err := refusal(conn); err != nil {
		return nil, errors.Join(fmt.Errorf("no server answers at %s: %w", t.Addr, err), conn.Close())
	}
	return conn, nil
}

// refusal is why there is no connection, nil when there is one after all. gRPC tells it to calls alone.
func refusal(conn *grpc.ClientConn) error {
	// The caller's time may be over.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err == nil || conn.GetState() == connectivity.Ready {
		return nil
	}
	return errors.New(status.Convert(err).Message())
}

func ready(ctx context.Context, conn *grpc.ClientConn) bool {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	for {
		conn.Connect()
		state := conn.GetState()
		if state == connectivity.Ready {
			return true
		}
		if !conn.WaitForStateChange(ctx, state) {
			return false
		}
	}
}

func (t *target) credentials() (credentials.TransportCredentials, error) {
	host, _, err := net.SplitHostPort(t.Addr)
	if err != nil {
		return nil, fmt.Errorf("--addr: %w", err)
	}
	withTLS := t.CA != "" || t.Cert != "" || t.CertKey != ""
	switch {
	case t.InsecurePlaintext && withTLS:
		return nil, errors.New("--insecure-plaintext contradicts --ca, --cert and --cert-key")
	case t.InsecurePlaintext, !withTLS && isLoopback(host):
		return insecure.NewCredentials(), nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--ca: %s holds no certificate", t.CA)
		}
	}
	if t.Cert != "" || t.CertKey != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.CertKey)
		if err != nil {
			return nil, fmt.Errorf("--cert and --cert-key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
