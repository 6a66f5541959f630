package client_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const key = "billing:grant:INV-A:team_access"

// server answers as a test scripts it, over TCP. What grantd itself answers is tested with grantd.
type server struct {
	entitlementv1.UnimplementedEntitlementServiceServer
	// answer is called with the number of the arrival, from 1.
	answer    func(ctx context.Context, arrival int) (*entitlementv1.GrantEntitlementResponse, error)
	operation func() (*entitlementv1.GetOperationResponse, error)
	batch     func(arrival int, reqs []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error)

	addr string

	mu       sync.Mutex
	arrivals []arrival
	sockets  []*net.TCPConn
	kill     func()
}

// arrival is one call as the server saw it.
type arrival struct {
	at       time.Time
	deadline time.Time
	requests []*entitlementv1.GrantEntitlementRequest
	metadata metadata.MD
}

func (s *server) arrived(ctx context.Context, reqs ...*entitlementv1.GrantEntitlementRequest) int {
	a := arrival{at: time.Now(), requests: reqs}
	a.deadline, _ = ctx.Deadline()
	a.metadata, _ = metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arrivals = append(s.arrivals, a)
	return len(s.arrivals)
}

func (s *server) seen() []arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]arrival(nil), s.arrivals...)
}

func (s *server) GrantEntitlement(ctx context.Context, req *entitlementv1.GrantEntitlementRequest) (*entitlementv1.GrantEntitlementResponse, error) {
	return s.answer(ctx, s.arrived(ctx, req))
}

func (s *server) BatchGrantEntitlements(ctx context.Context, req *entitlementv1.BatchGrantEntitlementsRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
	return s.batch(s.arrived(ctx, req.GetRequests()...), req.GetRequests())
}

func (s *server) GetOperation(ctx context.Context, _ *entitlementv1.GetOperationRequest) (*entitlementv1.GetOperationResponse, error) {
	s.arrived(ctx)
	return s.operation()
}

func (s *server) GetEntitlement(ctx context.Context, _ *entitlementv1.GetEntitlementRequest) (*entitlementv1.GetEntitlementResponse, error) {
	s.arrived(ctx)
	return nil, status.Error(codes.NotFound, "no such entitlement")
}

// listen takes the server's address. Connections are noted, so that reset can cut them.
func (s *server) listen(t *testing.T) net.Listener {
	t.Helper()
	lis, err := net.Listen("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	s.addr = lis.Addr().String()
	return noting{lis, s}
}

type noting struct {
	net.Listener
	s *server
}

func (l noting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.s.mu.Lock()
		l.s.sockets = append(l.s.sockets, c.(*net.TCPConn))
		l.s.mu.Unlock()
	}
	return c, err
}

func (s *server) start(t *testing.T) {
	t.Helper()
	g := grpc.NewServer()
	entitlementv1.RegisterEntitlementServiceServer(g, s)
	lis := s.listen(t)
	go g.Serve(lis)
	s.kill = func() {
		lis.Close()
		s.reset()
		g.Stop()
	}
	t.Cleanup(g.Stop)
}

// reset cuts every connection as a power cut would, in the middle of its calls.
func (s *server) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.sockets {
		c.SetLinger(0)
		c.Close()
	}
	s.sockets = nil
}

func setup(t *testing.T, s *server, opts ...grpc.DialOption) *client.Client {
	t.Helper()
	if s.addr == "" {
		s.addr = "127.0.0.1:0"
		s.start(t)
	}
	c, err := client.New(s.addr, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// within bounds a test that would otherwise wait for the policy's own limit.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func request(key string) *entitlementv1.GrantEntitlementRequest {
	return &entitlementv1.GrantEntitlementRequest{
		IdempotencyKey: key,
		Grant: &entitlementv1.Grant{
			TenantId: "acme", InvoiceId: "INV-A", EntitlementType: "team_access", Quantity: proto.Int64(10),
			Scope: map[string]string{"seats": "10", "region": "eu"},
		},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID, Version: 1},
	}
}

func applied() *entitlementv1.GrantEntitlementResponse {
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED,
		Result:  &entitlementv1.GrantEntitlementResponse_Entitlement{Entitlement: &entitlementv1.Entitlement{EntitlementId: "e1"}},
	}
}

// refused is a status as grantd sends it.
func refused(code codes.Code, reason string, delay time.Duration) error {
	return withDetails(code, reason,
		&errdetails.ErrorInfo{Reason: reason, Domain: "entitlement.v1"},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
}

func withDetails(code codes.Code, message string, details ...protoadapt.MessageV1) error {
	s, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

func pushback(ctx context.Context, ms string) {
	if err := grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", ms)); err != nil {
		panic(err)
	}
}

// sameRequests checks that every arrival carried the request, whole.
func sameRequests(t *testing.T, s *server, want *entitlementv1.GrantEntitlementRequest, arrivals int) {
	t.Helper()
	seen := s.seen()
	if len(seen) != arrivals {
		t.Errorf("%d arrivals, want %d", len(seen), arrivals)
	}
	for i, a := range seen {
		if diff := cmp.Diff(want, a.requests[0], protocmp.Transform()); diff != "" {
			t.Errorf("arrival %d (-sent +arrived):\n%s", i+1, diff)
		}
	}
}
