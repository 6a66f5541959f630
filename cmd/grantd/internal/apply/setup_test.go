package apply_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/grantd/grantd/cmd/grantd/internal/apply"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// authority answers by a script. It is no model of grantd: it knows the keys it has seen, and what a test tells it.
type authority struct {
	entitlementv1.UnimplementedEntitlementServiceServer

	mu      sync.Mutex
	applied map[string]bool
	keys    []string // of every arrival, in order
	calls   []int    // how many requests each call carried
	lookups int
	// answer may speak first: for a key, on its nth arrival from 1.
	answer func(key string, arrival int) (*entitlementv1.GrantEntitlementResponse, error)
}

func (a *authority) decide(r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	key := r.GetIdempotencyKey()
	a.keys = append(a.keys, key)
	if a.answer != nil {
		arrival := 0
		for _, k := range a.keys {
			if k == key {
				arrival++
			}
		}
		if response, err := a.answer(key, arrival); response != nil || err != nil {
			return response, err
		}
	}
	if a.applied[key] {
		return &entitlementv1.GrantEntitlementResponse{
			Outcome:   entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED,
			MatchedBy: entitlementv1.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY,
		}, nil
	}
	a.applied[key] = true
	return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED}, nil
}

func (a *authority) GrantEntitlement(_ context.Context, r *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, 1)
	return a.decide(r)
}

func (a *authority) BatchGrantEntitlements(_ context.Context, r *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, len(r.GetRequests()))
	response := &entitlementv1.BatchGrantEntitlementsResponse{}
	for _, item := range r.GetRequests() {
		answer, err := a.decide(item)
		if err != nil {
			return nil, err
		}
		response.Responses = append(response.Responses, answer)
	}
	return response, nil
}

func (a *authority) GetOperation(context.Context, *entitlementv1.GetOperationRequest) (*entitlementv1.GetOperationResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lookups++
	return &entitlementv1.GetOperationResponse{Outcome: entitlementv1.Outcome_OUTCOME_NOT_APPLIED}, nil
}

func setup(t *testing.T) (*authority, *grpc.ClientConn) {
	t.Helper()
	a := &authority{applied: make(map[string]bool)}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	entitlementv1.RegisterEntitlementServiceServer(server, a)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("passthrough:///authority", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return a, conn
}

// inOrder is what `apply --check` does unless told otherwise.
func inOrder() apply.Options {
	return apply.Options{Concurrency: 1, Batch: 1, Check: true, Timeout: 30 * time.Second}
}

// run fails the test if the file cannot be sent.
func run(t *testing.T, conn *grpc.ClientConn, file string, options apply.Options) *apply.Report {
	t.Helper()
	report, err := apply.Run(t.Context(), conn, strings.NewReader(file), options)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// grantLine expects that outcome, or nothing if it is empty.
func grantLine(t *testing.T, key, outcome, detail string) string {
	t.Helper()
	return requestLine(t, "GrantEntitlement", &entitlementv1.GrantEntitlementRequest{IdempotencyKey: key}, outcome, detail)
}

func requestLine(t *testing.T, method string, request proto.Message, outcome, detail string) string {
	t.Helper()
	text, err := protojson.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	expect := ""
	switch {
	case detail != "":
		expect = fmt.Sprintf(`, "expect": {"outcome": %q, "detail": %q}`, outcome, detail)
	case outcome != "":
		expect = fmt.Sprintf(`, "expect": {"outcome": %q}`, outcome)
	}
	return fmt.Sprintf(`{"method": %q, "request": %s%s}`+"\n", method, text, expect)
}

func differences(t *testing.T, report *apply.Report) string {
	t.Helper()
	var text strings.Builder
	if err := report.WriteDifferences(&text); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

func failures(t *testing.T, report *apply.Report) string {
	t.Helper()
	var text strings.Builder
	if err := report.WriteFailures(&text, 0); err != nil {
		t.Fatal(err)
	}
	return text.String()
}
