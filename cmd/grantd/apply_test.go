package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// grantsAll answers every grant as new.
type grantsAll struct {
	entitlementv1.UnimplementedEntitlementServiceServer
}

func (grantsAll) GrantEntitlement(context.Context, *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED}, nil
}

func (grantsAll) BatchGrantEntitlements(_ context.Context, r *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	response := &entitlementv1.BatchGrantEntitlementsResponse{}
	for range r.GetRequests() {
		response.Responses = append(response.Responses,
			&entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED})
	}
	return response, nil
}

func serveGrantsAll(t *testing.T) target {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	entitlementv1.RegisterEntitlementServiceServer(server, grantsAll{})
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return target{Addr: listener.Addr().String()}
}

func writeLines(t *testing.T, lines ...string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(name, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

const (
	lineAsExpected = `{"method": "GrantEntitlement", "request": {"idempotencyKey": "a"}, "expect": {"outcome": "OUTCOME_NEWLY_APPLIED"}}`
	lineOtherwise  = `{"method": "GrantEntitlement", "request": {"idempotencyKey": "a"}, "expect": {"outcome": "OUTCOME_ALREADY_APPLIED", "detail": "IDEMPOTENCY_KEY"}}`
	lineUnchecked  = `{"method": "GrantEntitlement", "request": {"idempotencyKey": "a"}}`
)

func TestApply(t *testing.T) {
	server := serveGrantsAll(t)
	for name, test := range map[string]struct {
		lines   []string
		command applyCmd
		want    []string // in standard output
		err     string   // "" for success
	}{
		"check succeeds": {
			lines: []string{lineAsExpected, lineUnchecked}, command: applyCmd{Check: true},
			want: []string{"OUTCOME_NEWLY_APPLIED  -       2", "total                  -       2", "2 requests in ", "2 calls: p50 ", "answers as expected: all 1\n"},
		},
		"check lists what differs": {
			lines: []string{lineAsExpected, lineOtherwise}, command: applyCmd{Check: true},
			want: []string{"line 2: want OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY, got OUTCOME_NEWLY_APPLIED\n"},
			err:  "answers not as expected: 1",
		},
		"check in a batch": {
			lines: []string{lineAsExpected, lineOtherwise}, command: applyCmd{Check: true, Batch: 10},
			want: []string{"line 2: want ", "1 calls: "}, err: "answers not as expected: 1",
		},
		"check with nothing to check": {
			lines: []string{lineUnchecked}, command: applyCmd{Check: true}, err: `--check: no line has an "expect"`,
		},
		"without check nothing differs": {lines: []string{lineOtherwise}, want: []string{"OUTCOME_NEWLY_APPLIED"}},
		"failed calls fail the command": {
			lines: []string{`{"method": "GetOperation", "request": {}}`}, want: []string{"line 1: UNIMPLEMENTED"}, err: "requests without an answer: 1",
		},
		"a bad line is named, and what was sent is reported": {
			lines: []string{lineUnchecked, `{"method": "Pay"}`}, want: []string{"OUTCOME_NEWLY_APPLIED"}, err: `line 2: unknown method "Pay"`,
		},
		"duplicates are counted apart": {
			lines: []string{lineUnchecked, lineUnchecked}, command: applyCmd{Duplicate: 1},
			want: []string{"OUTCOME_NEWLY_APPLIED  -       2      2\n"},
		},
		"concurrency": {command: applyCmd{Concurrency: -1}, err: "--concurrency must not be negative"},
		"batch":       {command: applyCmd{Batch: 1001}, err: "--batch must be between 1 and 1000"},
		"duplicate":   {command: applyCmd{Duplicate: 1.5}, err: "--duplicate must be between 0 and 1"},
	} {
		t.Run(name, func(t *testing.T) {
			command := test.command
			command.File, command.Target, command.Timeout = writeLines(t, test.lines...), server, 30*time.Second
			command.Batch = max(command.Batch, 1)
			var stdout, stderr bytes.Buffer
			err := command.run(t.Context(), stdio{stdout: &stdout, stderr: &stderr})
			if test.err == "" && err != nil || test.err != "" && (err == nil || err.Error() != test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			for _, want := range test.want {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("standard output lacks %q:\n%s", want, stdout.String())
				}
			}
			if stderr.Len() != 0 {
				t.Errorf("standard error is no terminal, and has %q", stderr.String())
			}
		})
	}
}

func TestTarget_Refusals(t *testing.T) {
	noCertificate := writeLines(t, "no certificate")
	for name, test := range map[string]struct {
		target target
		want   string
	}{
		"no port":               {target{Addr: "127.0.0.1"}, "--addr: "},
		"plaintext and TLS":     {target{Addr: "127.0.0.1:1", InsecurePlaintext: true, CA: "x"}, "--insecure-plaintext contradicts"},
		"no certificate":        {target{Addr: "127.0.0.1:1", CA: noCertificate}, "--ca: "},
		"certificate, no key":   {target{Addr: "127.0.0.1:1", Cert: noCertificate}, "--cert and --cert-key: "},
		"authority is not read": {target{Addr: "127.0.0.1:1", CA: filepath.Join(t.TempDir(), "none")}, "open "},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := test.target.dial(t.Context())
			if err == nil {
				conn.Close()
			}
			if err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// Whoever has the wrong certificate or address is helped by the reason alone.
func TestTarget_TellsWhyNoServerAnswers(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(nil)
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	other := target{Addr: "localhost:" + port, CA: ca}
	conn, err := other.dial(t.Context())
	if err == nil {
		conn.Close()
	}
	if err == nil || !strings.HasPrefix(err.Error(), "no server answers at localhost:") || !strings.Contains(err.Error(), "not localhost") {
		t.Errorf("error %v", err)
	}
}

func TestTarget_TLSUnlessLoopback(t *testing.T) {
	for _, test := range []struct {
		target target
		want   string
	}{
		{target{Addr: "127.0.0.1:50051"}, "insecure"},
		{target{Addr: "[::1]:50051"}, "insecure"},
		{target{Addr: "localhost:50051"}, "insecure"},
		{target{Addr: "10.0.0.7:50051"}, "tls"},
		{target{Addr: "grantd.example:50051"}, "tls"},
		{target{Addr: "grantd.example:50051", InsecurePlaintext: true}, "insecure"},
	} {
		credentials, err := test.target.credentials()
		if err != nil {
			t.Fatal(err)
		}
		if got := credentials.Info().SecurityProtocol; got != test.want {
			t.Errorf("%+v is called with %s, want %s", test.target, got, test.want)
		}
	}
}
