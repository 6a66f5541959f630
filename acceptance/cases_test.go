package acceptance_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// Two customers number their requests from 1. Their keys are theirs alone: neither is told of the other's operation, and nothing of
// it can be seen.
func TestKeys_BelongToTheirTenant(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.want(t, newly, byNothing, grant("A", "1", "INV-SECRET", seats("4711")))
	b.want(t, newly, byNothing, grant("B", "1", "INV-1", seats("99")))

	looked := byName("B", "1", full)
	looked.Grant = grant("B", "1", "INV-SECRET").GetGrant()
	seen := []proto.Message{
		b.operation(t, byName("B", "1", full)),
		b.operation(t, looked),
		b.operation(t, byEffect("B", "INV-SECRET", "team_access")),
		b.want(t, conflict, byKey, grant("B", "1", "INV-2")),
	}
	_, err := b.GetEntitlement(t.Context(), &pb.GetEntitlementRequest{
		TenantId: "B", Name: &pb.GetEntitlementRequest_EntitlementId{EntitlementId: a.GetEntitlement().GetEntitlementId()},
	})
	wantCode(t, "A's entitlement by its id", err, codes.NotFound)
	seen = append(seen, status.Convert(err).Proto())
	for _, m := range seen {
		text := protojson.Format(m)
		for _, secret := range []string{a.GetEntitlement().GetEntitlementId(), a.GetOperation().GetAttemptId(), a.GetOperation().GetFingerprint(), "4711"} {
			if strings.Contains(text, secret) {
				t.Errorf("B sees %s of A in %s", secret, text)
			}
		}
	}
	b.wantWhole(t)
}

// Wherever names are joined by a separator, a name that holds the separator makes two requests one.
func TestKeys_NoSeparatorCollides(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, separator := range []string{"|", ":", "/", "~", "."} {
		for _, pair := range [][2]*pb.GrantEntitlementRequest{
			{grant("a"+separator+"b", "K"+separator, "c"), grant("a", "K"+separator, "b"+separator+"c")},
			{grant("t1", "K1"+separator, "a"+separator+"b", ofType("c")), grant("t1", "K2"+separator, "a", ofType("b"+separator+"c"))},
			{
				grant("t2", "K1"+separator, "x"+separator, func(r *pb.GrantEntitlementRequest) {
					r.Grant.Scope = map[string]string{"a": "1" + separator + "b" + separator + "2"}
				}),
				grant("t2", "K2"+separator, "x"+separator+separator, func(r *pb.GrantEntitlementRequest) {
					r.Grant.Scope = map[string]string{"a": "1", "b": "2"}
				}),
			},
		} {
			var fingerprints, ids []string
			for _, r := range pair {
				r.IdempotencyKey = strings.ReplaceAll(r.GetIdempotencyKey(), "|", "=")
				resp := b.want(t, newly, byNothing, r)
				fingerprints = append(fingerprints, resp.GetOperation().GetFingerprint())
				ids = append(ids, resp.GetEntitlement().GetEntitlementId())
			}
			if fingerprints[0] == fingerprints[1] || ids[0] == ids[1] {
				t.Errorf("with %q: %v %v are one", separator, pair[0], pair[1])
			}
			for _, r := range pair {
				b.want(t, already, byKey, r)
			}
		}
	}
	b.wantWhole(t)
}

// The event overtakes the payment: the refusal must not use up the key, or the customer who then pays gets nothing.
func TestKeys_RefusalDoesNotConsumeTheKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.wantRejected(t, pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID, grant("t1", "K", "INV-1", evidence(unpaid, 1)))
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1", evidence(paid, 2)))
	// An old event that arrives after it is told what is so.
	b.want(t, already, byKey, grant("t1", "K", "INV-1", evidence(unpaid, 1)))
	wantSame(t, "the attempts", b.attempts(t, "t1", "K"), []string{"4 0 1", "1 0 0", "2 1 0"})
	b.wantWhole(t)
}

// Retention takes aliases and attempts, each alone and both together. What was granted stays granted, and no answer turns into a
// second grant or an internal error.
func TestRetention_NeverReopensTheEffect(t *testing.T) {
	t.Parallel()
	aliases := func(t *testing.T, b *bundle) {
		// Of a replica that keeps aliases for an hour, two hours from now.
		brief := serveOn(t, b.url, b.url, func(s *settings) { s.store.AliasRetention = time.Hour })
		if err := brief.store.Maintain(t.Context(), time.Now().Add(2*time.Hour)); err != nil {
			t.Fatal(err)
		}
		if n := value[int](t, b, `SELECT count(*) FROM operations WHERE owner_key IS NOT NULL`); n != 0 {
			t.Fatalf("%d aliases are left", n)
		}
	}
	attempts := func(t *testing.T, b *bundle) {
		// What removes today's also looks after the days from then on, so those from today on come second.
		for _, at := range []time.Time{time.Now().Add(32 * 24 * time.Hour), time.Now()} {
			if err := b.store.Maintain(t.Context(), at); err != nil {
				t.Fatal(err)
			}
		}
		if n := value[int](t, b, `SELECT count(*) FROM attempts`); n != 0 {
			t.Fatalf("%d attempts are left", n)
		}
	}
	for name, purges := range map[string][]func(*testing.T, *bundle){
		"aliases": {aliases}, "attempts": {attempts}, "both": {attempts, aliases},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			first := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
			b.want(t, already, byBusinessKey, grant("t1", "alias", "INV-1"))
			b.want(t, conflict, byBusinessKey, grant("t1", "other", "INV-1", seats("11")))
			for _, purge := range purges {
				purge(t, b)
			}

			same := b.want(t, already, byKey, grant("t1", "K", "INV-1"))
			wantSame(t, "the result under the key", same.GetEntitlement(), first.GetEntitlement())
			wantSame(t, "the operation", same.GetOperation(), first.GetOperation())
			for _, key := range []string{"alias", "fresh"} {
				by := byBusinessKey
				if key == "alias" && name == "attempts" {
					by = byKey
				}
				again := b.want(t, already, by, grant("t1", key, "INV-1"))
				wantSame(t, "the result under "+key, again.GetEntitlement(), first.GetEntitlement())
			}
			b.want(t, conflict, byKey, grant("t1", "K", "INV-1", seats("11")))
			b.want(t, conflict, byBusinessKey, grant("t1", "fresher", "INV-1", seats("11")))
			found := b.operation(t, byName("t1", "alias", full))
			wantSame(t, "the look-up", found.GetEntitlement(), first.GetEntitlement())
			if n := value[int](t, b, `SELECT count(*) FROM entitlements`); n != 1 {
				t.Errorf("%d entitlements", n)
			}
		})
	}
}

// Names that look alike are refused where they could be confused, and stay apart where they cannot. Nothing is folded, trimmed or
// normalised.
func TestNames_LookAlikesStayApart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, lookAlike := range map[string]string{
		"precomposed A with ring": "\u00c5", "the Angstrom sign": "\u212b", "A and a combining ring": "A\u030a",
		"composed e acute": "\u00e9", "decomposed e acute": "e\u0301", "Cyrillic a": "\u0430", "zero-width space": "a\u200b",
		"no-break space": "a\u00a0", "full-width A": "\uff21",
	} {
		for field, r := range map[string]*pb.GrantEntitlementRequest{
			"idempotency_key":        grant("t1", lookAlike, "INV-1"),
			"grant.tenant_id":        grant(lookAlike, "K", "INV-1"),
			"grant.invoice_id":       grant("t1", "K", lookAlike),
			"grant.entitlement_type": grant("t1", "K", "INV-1", ofType(lookAlike)),
		} {
			_, err := b.GrantEntitlement(t.Context(), r)
			wantViolations(t, name, err, field)
		}
	}
	if got := b.written(t); len(got) != 0 {
		t.Errorf("refused names were written: %v", got)
	}

	for i, pair := range [][2]*pb.GrantEntitlementRequest{
		{grant("t1", "K1", "INV-a"), grant("t1", "K2", "inv-A")},
		{grant("t1", "k1", "INV-k"), grant("t1", "K1-", "INV-K")},
		{grant("TENANT", "K", "INV-1"), grant("tenant", "K", "INV-1")},
		{grant("t1", "K3", "INV-3", ofType("sso")), grant("t1", "K4", "INV-3", ofType("SSO"))},
	} {
		for _, r := range pair {
			if resp := b.want(t, newly, byNothing, r); resp.GetEntitlement().GetGrant().GetInvoiceId() != r.GetGrant().GetInvoiceId() {
				t.Errorf("pair %d: %v", i, resp)
			}
		}
	}
	// In values, where no key is made of them, both forms are kept as they came, and differ.
	label := func(s string) func(*pb.GrantEntitlementRequest) {
		return func(r *pb.GrantEntitlementRequest) { r.Grant.Scope["label"] = s }
	}
	b.want(t, newly, byNothing, grant("t1", "K5", "INV-5", label("\u00e9")))
	b.want(t, conflict, byKey, grant("t1", "K5", "INV-5", label("e\u0301")))
	b.wantWhole(t)
}

// A scope that is absent, empty or in another order is the same scope; a quantity that is not set is not a number.
func TestFingerprint_WhatIsEqual(t *testing.T) {
	t.Parallel()
	b := setup(t)
	scope := func(entries map[string]string) func(*pb.GrantEntitlementRequest) {
		return func(r *pb.GrantEntitlementRequest) { r.Grant.Scope = entries }
	}
	b.want(t, newly, byNothing, grant("t1", "K1", "INV-1", scope(nil)))
	b.want(t, already, byKey, grant("t1", "K1", "INV-1", scope(map[string]string{})))
	b.want(t, conflict, byKey, grant("t1", "K1", "INV-1", scope(map[string]string{"a": ""})))

	// Maps are written in a random order by nature; each of these is another order on the wire, sooner or later.
	entries := map[string]string{}
	for i := range 20 {
		entries[fmt.Sprintf("k%d", i)] = fmt.Sprint(i)
	}
	b.want(t, newly, byNothing, grant("t1", "K2", "INV-2", scope(entries)))
	for range 10 {
		b.want(t, already, byKey, grant("t1", "K2", "INV-2", scope(entries)))
	}

	quantity := func(n int64) func(*pb.GrantEntitlementRequest) {
		return func(r *pb.GrantEntitlementRequest) { r.Grant.Quantity = &n }
	}
	b.want(t, newly, byNothing, grant("t1", "K3", "INV-3"))
	_, err := b.GrantEntitlement(t.Context(), grant("t1", "K3", "INV-3", quantity(0)))
	wantViolations(t, "quantity 0", err, "grant.quantity")
	got := b.want(t, conflict, byKey, grant("t1", "K3", "INV-3", quantity(1)))
	wantSame(t, "the difference", got.GetConflict().GetDifferences(), []*pb.Difference{{Field: "quantity", Submitted: pointer("1")}})
	b.wantWhole(t)
}

// 2^53 + 1 is the first number that a double cannot hold. Somewhere between proto, JSON and PostgreSQL it turns into 2^53, and
// two purchases are one.
func TestFingerprint_LargeNumbersStayExact(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const large = 9007199254740993
	quantity := func(n int64) func(*pb.GrantEntitlementRequest) {
		return func(r *pb.GrantEntitlementRequest) { r.Grant.Quantity = &n }
	}
	first := b.want(t, newly, byNothing, grant("t1", "K", "INV-1", quantity(large), evidence(paid, large)))
	got := b.want(t, conflict, byKey, grant("t1", "K", "INV-1", quantity(large-1)))
	wantSame(t, "the difference", got.GetConflict().GetDifferences(),
		[]*pb.Difference{{Field: "quantity", Stored: pointer("9007199254740993"), Submitted: pointer("9007199254740992")}})

	replay := b.want(t, already, byKey, grant("t1", "K", "INV-1", quantity(large)))
	found := b.operation(t, byName("t1", "K", full))
	now, err := b.GetEntitlement(t.Context(), &pb.GetEntitlementRequest{
		TenantId: "t1", Name: &pb.GetEntitlementRequest_EntitlementId{EntitlementId: first.GetEntitlement().GetEntitlementId()},
	})
	if err != nil {
		t.Fatal(err)
	}
	listed, err := b.ListEntitlements(t.Context(), &pb.ListEntitlementsRequest{TenantId: "t1"})
	if err != nil {
		t.Fatal(err)
	}
	for what, m := range map[string]proto.Message{
		"the answer": first, "the replay": replay, "the look-up": found, "the entitlement": now, "the list": listed,
	} {
		if text := protojson.Format(m); !strings.Contains(strings.ReplaceAll(text, " ", ""), `"quantity":"9007199254740993"`) {
			t.Errorf("%s has another quantity: %s", what, text)
		}
	}
	wantSame(t, "the record", b.invoice(t, "t1", "INV-1"), "PAID 9007199254740993")
	if v := found.GetEntries()[0].GetInvoiceVersion(); v != large {
		t.Errorf("the entry's invoice version is %d", v)
	}
}

// A newer caller sends a field, or a state, that this server does not know. It must be told, and the key must stay free for the
// request without it.
func TestValidation_UnknownFieldDoesNotConsumeTheKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := grant("t1", "K", "INV-1")
	unknownField(r.Grant)
	_, err := b.GrantEntitlement(t.Context(), r)
	wantViolations(t, "an unknown field", err, "grant.15")
	_, err = b.GrantEntitlement(t.Context(), grant("t1", "K", "INV-1", evidence(99, 1)))
	wantViolations(t, "an unknown state", err, "invoice.state")
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.wantWhole(t)
}

// Fifty workers take the same event off a queue that gave each of them a copy, and half of them have an old price list. One of
// them grants; the others are told by whom, and every key that was told ALREADY is bound for good.
func TestConcurrency_FiftyKeysOneEffect(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const callers = 50
	request := func(i int) *pb.GrantEntitlementRequest {
		return grant("t1", fmt.Sprintf("K%d", i), "INV-1", seats([]string{"10", "20"}[i%2]))
	}
	responses := make([]*pb.GrantEntitlementResponse, callers)
	errs := make([]error, callers)
	var begin, done sync.WaitGroup
	begin.Add(1)
	for i := range callers {
		done.Go(func() {
			begin.Wait()
			responses[i], errs[i] = b.GrantEntitlement(t.Context(), request(i))
		})
	}
	begin.Done()
	done.Wait()

	winner := -1
	for i, err := range errs {
		if err != nil {
			t.Fatalf("caller %d: %v", i, err)
		}
		wantShape(t, responses[i])
		if responses[i].GetOutcome() == newly {
			if winner >= 0 {
				t.Fatalf("both %d and %d granted", winner, i)
			}
			winner = i
		}
	}
	if winner < 0 {
		t.Fatal("nobody granted")
	}
	won := responses[winner]
	for i, resp := range responses {
		outcome, operation := already, resp.GetOperation()
		if i%2 != winner%2 {
			outcome, operation = conflict, resp.GetConflict().GetStoredOperation()
		}
		if i == winner {
			outcome = newly
		} else if resp.GetMatchedBy() != byBusinessKey {
			t.Errorf("caller %d: %s", i, told(resp))
		}
		if resp.GetOutcome() != outcome {
			t.Errorf("caller %d: %s, want %v", i, told(resp), outcome)
		}
		wantSame(t, "the operation that is named", operation, won.GetOperation())
		found := b.operation(t, byName("t1", request(i).GetIdempotencyKey(), full))
		if outcome == conflict {
			if found.GetOutcome() != notApplied {
				t.Errorf("a key that met a conflict was bound: %v", found)
			}
			continue
		}
		wantSame(t, "the result", resp.GetEntitlement(), won.GetEntitlement())
		wantSame(t, "the operation that the key stands for", found.GetOperation(), won.GetOperation())
	}
	b.wantWhole(t)
}

// Proxies commonly allow 8 KB of headers, and a status with its details travels in one. A status that is larger turns into an
// opaque error at the caller, who then does not know that nothing can come of a retry.
func TestHeaders_TypedAnswersFitAnEightKilobyteLimit(t *testing.T) {
	t.Parallel()
	b := setup(t, func(s *settings) { s.dial = []grpc.DialOption{grpc.WithMaxHeaderListSize(8 << 10)} })
	proxied := pb.NewEntitlementServiceClient(dial(t, serveProxy(t, b.addr, 8<<10)))
	b.want(t, newly, byNothing, grant("t1", "K", "INV-1", largestScope('a')))
	for way, client := range map[string]pb.EntitlementServiceClient{"the client's own limit": b, "a proxy": proxied} {
		t.Run(way, func(t *testing.T) {
			resp, err := client.GrantEntitlement(t.Context(), grant("t1", "K", "INV-1", largestScope('b')))
			if err != nil || resp.GetOutcome() != conflict || len(resp.GetConflict().GetDifferences()) != 64 {
				t.Errorf("the largest conflict: %v %v", resp, err)
			}

			scope := func(r *pb.GrantEntitlementRequest) {
				r.Grant.Scope = make(map[string]string)
				for i := range 2000 {
					r.Grant.Scope[fmt.Sprintf("Ünlawful %d %s", i, strings.Repeat("é", 40))] = "\x00"
				}
			}
			r := grant("t1", "K2", "INV-2", scope)
			if n := proto.Size(r); n < 200_000 {
				t.Fatalf("a scope of %d bytes is not the case that this test is for", n)
			}
			_, err = client.GrantEntitlement(t.Context(), r)
			wantCode(t, "an illegal scope of 200 KB", err, codes.InvalidArgument)
			violations := violationsOf(err)
			if n := len(violations); n < 3 {
				t.Fatalf("%d violations arrived: %v", n, err)
			}
			last := violations[len(violations)-1]
			if last.GetField() != "" || last.GetDescription() != fmt.Sprintf("%d more violations are not listed.", 2*2000+2-(len(violations)-1)) {
				t.Errorf("the rest is not counted: %v", last)
			}
		})
	}
}

// serveProxy passes HTTP/2 on to addr, and takes no more than a number of bytes of headers from either side.
func serveProxy(t testing.TB, addr string, maxHeaderBytes int) string {
	t.Helper()
	var plain http.Protocols
	plain.SetUnencryptedHTTP2(true)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: addr})
	proxy.Transport = &http.Transport{Protocols: &plain, MaxResponseHeaderBytes: int64(maxHeaderBytes)}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: proxy, Protocols: &plain, MaxHeaderBytes: maxHeaderBytes}
	go s.Serve(lis)
	t.Cleanup(func() { s.Close() })
	return lis.Addr().String()
}
