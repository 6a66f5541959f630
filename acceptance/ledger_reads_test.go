package acceptance_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/grantd/grantd/client"
	pb "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// listed reads a list of entitlements page by page.
func (b *bundle) listed(t testing.TB, r *pb.ListEntitlementsRequest, between func()) []*pb.Entitlement {
	t.Helper()
	var all []*pb.Entitlement
	for r.PageToken = ""; ; {
		page, err := b.ListEntitlements(t.Context(), r)
		if err != nil {
			t.Fatalf("list %v: %v", r, err)
		}
		if size := int(r.GetPageSize()); size > 0 && len(page.GetEntitlements()) > size {
			t.Fatalf("list %v: a page of %d", r, len(page.GetEntitlements()))
		}
		all = append(all, page.GetEntitlements()...)
		if r.PageToken = page.GetNextPageToken(); r.PageToken == "" {
			return all
		}
		if between != nil {
			between()
		}
	}
}

// effects names entitlements in a few letters.
func effects(all []*pb.Entitlement) []string {
	names := []string{}
	for _, e := range all {
		names = append(names, e.GetGrant().GetInvoiceId()+"/"+e.GetGrant().GetEntitlementType())
	}
	return names
}

func TestListEntitlements_Filters(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, e := range []effect{{"I2", "sso"}, {"I1", "sso"}, {"I1", "team"}, {"I3", "team"}, {"I2", "team"}} {
		b.want(t, newly, byNothing, grant("t1", fmt.Sprint("K", i), e.invoice, ofType(e.typeName)))
	}
	b.want(t, newly, byNothing, grant("t2", "K", "I1", ofType("sso")))
	b.record(t, newly, byNothing, recording("t1", "refund", "I1", refunded, 2))
	b.turn(t, newly, byNothing, reversal("t1", "CASE", "I3", "team"))

	all := []string{"I2/sso", "I1/sso", "I1/team", "I3/team", "I2/team"}
	for _, test := range []struct {
		filter *pb.ListEntitlementsRequest
		want   []string
	}{
		{&pb.ListEntitlementsRequest{}, all},
		{&pb.ListEntitlementsRequest{EntitlementType: "team"}, []string{"I1/team", "I3/team", "I2/team"}},
		{&pb.ListEntitlementsRequest{InvoiceId: "I1"}, []string{"I1/sso", "I1/team"}},
		{&pb.ListEntitlementsRequest{InvoiceId: "I1", EntitlementType: "team"}, []string{"I1/team"}},
		{&pb.ListEntitlementsRequest{State: active}, []string{"I2/sso", "I2/team"}},
		{&pb.ListEntitlementsRequest{State: reversed}, []string{"I1/sso", "I1/team", "I3/team"}},
		{&pb.ListEntitlementsRequest{State: reversed, EntitlementType: "team"}, []string{"I1/team", "I3/team"}},
		{&pb.ListEntitlementsRequest{State: active, InvoiceId: "I1"}, nil},
		{&pb.ListEntitlementsRequest{State: reversed, InvoiceId: "I1", EntitlementType: "sso"}, []string{"I1/sso"}},
		{&pb.ListEntitlementsRequest{EntitlementType: "SSO"}, nil},
		{&pb.ListEntitlementsRequest{InvoiceId: "I4"}, nil},
	} {
		test.filter.TenantId = "t1"
		if test.want == nil {
			test.want = []string{}
		}
		for _, size := range []int32{0, 1, 2, 5, 1000} {
			test.filter.PageSize = size
			wantSame(t, fmt.Sprintf("%v in pages of %d", test.filter, size), effects(b.listed(t, test.filter, nil)), test.want)
		}
	}
	got := b.listed(t, &pb.ListEntitlementsRequest{TenantId: "t1", InvoiceId: "I1", EntitlementType: "sso"}, nil)
	wantSame(t, "an entitlement in a list", got[0], b.record(t, already, byKey, recording("t1", "refund", "I1", refunded, 2)).GetRecorded().GetReversed()[0])
	wantSame(t, "another tenant's", effects(b.listed(t, &pb.ListEntitlementsRequest{TenantId: "t2"}, nil)), []string{"I1/sso"})
	wantSame(t, "a tenant nobody knows", effects(b.listed(t, &pb.ListEntitlementsRequest{TenantId: "t3"}, nil)), []string{})
}

// A list that is read while others are granted and reversed shows everything that stood at its start, once, in the same order.
func TestListEntitlements_PagesSurviveChanges(t *testing.T) {
	t.Parallel()
	one := setup(t)
	two := serveOn(t, one.url, one.url)
	var before []string
	for i := range 23 {
		before = append(before, one.want(t, newly, byNothing, grant("t1", fmt.Sprint("K", i), fmt.Sprint("INV-", i))).GetEntitlement().GetEntitlementId())
	}
	changes := 0
	var got []string
	for _, e := range one.listed(t, &pb.ListEntitlementsRequest{TenantId: "t1", EntitlementType: "team_access", PageSize: 5}, func() {
		changes++
		two.want(t, newly, byNothing, grant("t1", fmt.Sprint("more", changes), fmt.Sprint("MORE-", changes)))
		one.record(t, newly, byNothing, recording("t1", fmt.Sprint("refund", changes), fmt.Sprint("INV-", changes), refunded, 2))
	}) {
		got = append(got, e.GetEntitlementId())
	}
	if changes < 4 || len(got) < len(before) {
		t.Fatalf("%d of %d seen, with %d changes", len(got), len(before), changes)
	}
	wantSame(t, "what stood at the start", got[:len(before)], before)
	if slices.Sort(got); len(slices.Compact(got)) != len(got) {
		t.Errorf("something is listed twice")
	}
	// The filter is by the state as it is when the page is read, and another replica goes on where one stopped.
	first, err := one.ListEntitlements(t.Context(), &pb.ListEntitlementsRequest{TenantId: "t1", State: active, PageSize: 5})
	if err != nil {
		t.Fatal(err)
	}
	second, err := two.ListEntitlements(t.Context(), &pb.ListEntitlementsRequest{TenantId: "t1", State: active, PageSize: 500, PageToken: first.GetNextPageToken()})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(first.GetEntitlements()) + len(second.GetEntitlements()); n != 23 {
		t.Errorf("%d are active, want 23", n)
	}
}

// A token is good for the list that gave it, and for no other.
func TestPageToken_OnlyForItsOwnList(t *testing.T) {
	t.Parallel()
	b, elsewhere := setup(t), setup(t)
	elsewhere.exec(t, `UPDATE page_token_secret SET secret = 'another database has another one'`)
	elsewhere = serveOn(t, elsewhere.url, elsewhere.url)
	for i := range 3 {
		for _, tenant := range []string{"t1", "t2"} {
			b.want(t, newly, byNothing, grant(tenant, fmt.Sprint("K", i), fmt.Sprint("INV-", i), func(r *pb.GrantEntitlementRequest) { r.EventId = "evt" }))
		}
	}
	list := func(b *bundle, r *pb.ListEntitlementsRequest) error {
		_, err := b.ListEntitlements(t.Context(), r)
		return err
	}
	page, err := b.ListEntitlements(t.Context(), &pb.ListEntitlementsRequest{TenantId: "t1", PageSize: 1})
	if err != nil || page.GetNextPageToken() == "" {
		t.Fatalf("the first page: %v %v", page, err)
	}
	token := page.GetNextPageToken()
	keys, err := b.ListOperations(t.Context(), &pb.ListOperationsRequest{
		TenantId: "t1", PageSize: 1, Filter: &pb.ListOperationsRequest_EventId{EventId: "evt"}})
	if err != nil || keys.GetNextPageToken() == "" {
		t.Fatalf("the first page of keys: %v %v", keys, err)
	}
	if err := list(b, &pb.ListEntitlementsRequest{TenantId: "t1", PageToken: token, PageSize: 7}); err != nil {
		t.Errorf("with another page size: %v", err)
	}

	for name, r := range map[string]*pb.ListEntitlementsRequest{
		"another tenant":    {TenantId: "t2", PageToken: token},
		"another type":      {TenantId: "t1", PageToken: token, EntitlementType: "team_access"},
		"another invoice":   {TenantId: "t1", PageToken: token, InvoiceId: "INV-1"},
		"another state":     {TenantId: "t1", PageToken: token, State: active},
		"another RPC":       {TenantId: "t1", PageToken: keys.GetNextPageToken()},
		"nonsense":          {TenantId: "t1", PageToken: "nonsense"},
		"a bare place":      {TenantId: "t1", PageToken: page.GetEntitlements()[0].GetEntitlementId()},
		"cut off":           {TenantId: "t1", PageToken: token[:len(token)-2]},
		"with more":         {TenantId: "t1", PageToken: token + "AA"},
		"with a line break": {TenantId: "t1", PageToken: token + "\n"},
		"with padding":      {TenantId: "t1", PageToken: token + "="},
	} {
		wantViolations(t, name, list(b, r), "page_token")
	}
	for i := range token {
		other := byte('A')
		if token[i] == other {
			other = 'B'
		}
		tampered := token[:i] + string(other) + token[i+1:]
		wantViolations(t, tampered, list(b, &pb.ListEntitlementsRequest{TenantId: "t1", PageToken: tampered}), "page_token")
	}
	wantViolations(t, "of another database", list(elsewhere, &pb.ListEntitlementsRequest{TenantId: "t1", PageToken: token}), "page_token")

	for name, r := range map[string]*pb.ListOperationsRequest{
		"another tenant": {TenantId: "t2", Filter: &pb.ListOperationsRequest_EventId{EventId: "evt"}, PageToken: keys.GetNextPageToken()},
		"another event":  {TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{EventId: "evt2"}, PageToken: keys.GetNextPageToken()},
		"another filter": {TenantId: "t1", Filter: &pb.ListOperationsRequest_InvoiceId{InvoiceId: "evt"}, PageToken: keys.GetNextPageToken()},
		"another RPC":    {TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{EventId: "evt"}, PageToken: token},
	} {
		_, err := b.ListOperations(t.Context(), r)
		wantViolations(t, name, err, "page_token")
	}
}

func TestValidation_LedgerReads(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, test := range map[string]struct {
		request any
		fields  []string
	}{
		"list, no tenant":       {&pb.ListEntitlementsRequest{}, []string{"tenant_id"}},
		"list, type":            {&pb.ListEntitlementsRequest{TenantId: "t1", EntitlementType: "a b"}, []string{"entitlement_type"}},
		"list, invoice":         {&pb.ListEntitlementsRequest{TenantId: "t1", InvoiceId: "é"}, []string{"invoice_id"}},
		"list, unknown state":   {&pb.ListEntitlementsRequest{TenantId: "t1", State: 3}, []string{"state"}},
		"list, negative size":   {&pb.ListEntitlementsRequest{TenantId: "t1", PageSize: -1}, []string{"page_size"}},
		"list, large size":      {&pb.ListEntitlementsRequest{TenantId: "t1", PageSize: 1001}, []string{"page_size"}},
		"check, nothing":        {&pb.CheckEntitlementRequest{}, []string{"tenant_id", "entitlement_type"}},
		"check, finer time":     {&pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "x", At: &timestamppb.Timestamp{Nanos: 1}}, []string{"at"}},
		"check, no such time":   {&pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "x", At: &timestamppb.Timestamp{Seconds: 253402300800}}, []string{"at"}},
		"operations, no filter": {&pb.ListOperationsRequest{TenantId: "t1"}, []string{"filter"}},
		"operations, empty event": {&pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{}},
			[]string{"event_id"}},
		"operations, empty invoice": {&pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_InvoiceId{}},
			[]string{"invoice_id"}},
		"operations, empty type": {&pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EntitlementType{}},
			[]string{"entitlement_type"}},
		"operations, long event": {&pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{EventId: strings.Repeat("x", 201)}},
			[]string{"event_id"}},
		"operations, size": {&pb.ListOperationsRequest{TenantId: "t1", PageSize: 1001, Filter: &pb.ListOperationsRequest_EventId{EventId: "e"}},
			[]string{"page_size"}},
	} {
		var err error
		switch r := test.request.(type) {
		case *pb.ListEntitlementsRequest:
			_, err = b.ListEntitlements(t.Context(), r)
		case *pb.CheckEntitlementRequest:
			_, err = b.CheckEntitlement(t.Context(), r)
		case *pb.ListOperationsRequest:
			_, err = b.ListOperations(t.Context(), r)
		}
		wantViolations(t, name, err, test.fields...)
	}
}

// A product asks whether a tenant holds a type. The start counts, the end does not.
func TestCheckEntitlement_Windows(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Date(2031, 5, 6, 7, 8, 9, 123456000, time.UTC)
	const us = time.Microsecond
	type window struct {
		starts, ends time.Duration // from at; 0 for none
		reversed     bool
	}
	const (
		none       = pb.AbsenceReason_ABSENCE_REASON_UNSPECIFIED
		neverGiven = pb.AbsenceReason_ABSENCE_REASON_NEVER_GRANTED
		takenBack  = pb.AbsenceReason_ABSENCE_REASON_REVERSED
		expired    = pb.AbsenceReason_ABSENCE_REASON_EXPIRED
		notStarted = pb.AbsenceReason_ABSENCE_REASON_NOT_STARTED
	)
	for i, test := range []struct {
		windows []window
		want    pb.AbsenceReason
		by      []int
	}{
		{nil, neverGiven, nil},
		{[]window{{}}, none, []int{0}},
		{[]window{{reversed: true}}, takenBack, nil},
		{[]window{{ends: us}}, none, []int{0}},
		{[]window{{starts: -us}}, none, []int{0}},
		{[]window{{starts: -us, ends: us}}, none, []int{0}},
		{[]window{{ends: -us}}, expired, nil},
		{[]window{{starts: us}}, notStarted, nil},
		{[]window{{starts: us, ends: 2 * us}}, notStarted, nil},
		{[]window{{starts: -2 * us, ends: -us}}, expired, nil},
		{[]window{{starts: us, reversed: true}}, takenBack, nil},
		{[]window{{ends: -us, reversed: true}}, takenBack, nil},
		{[]window{{}, {}, {}}, none, []int{0, 1, 2}},
		{[]window{{reversed: true}, {ends: -us}, {starts: us}}, notStarted, nil},
		{[]window{{starts: us}, {ends: -us}, {reversed: true}}, notStarted, nil},
		{[]window{{ends: -us}, {reversed: true}}, expired, nil},
		{[]window{{reversed: true}, {ends: -us}}, expired, nil},
		{[]window{{reversed: true}, {starts: us}, {ends: us}, {ends: -us}}, none, []int{2}},
		{[]window{{starts: -us}, {reversed: true}, {ends: us}}, none, []int{0, 2}},
	} {
		tenant := fmt.Sprint("t", i)
		var granted []string
		for n, w := range test.windows {
			invoice := fmt.Sprint("INV-", n)
			e := b.want(t, newly, byNothing, grant(tenant, invoice, invoice, func(r *pb.GrantEntitlementRequest) {
				if w.starts != 0 {
					r.Grant.StartsAt = timestamppb.New(at.Add(w.starts))
				}
				if w.ends != 0 {
					r.Grant.ExpiresAt = timestamppb.New(at.Add(w.ends))
				}
			})).GetEntitlement()
			granted = append(granted, e.GetEntitlementId())
			if w.reversed {
				b.turn(t, newly, byNothing, reversal(tenant, "CASE-"+invoice, invoice, "team_access"))
			}
		}
		got := b.check(t, tenant, "team_access", &at)
		var want []string
		for _, n := range test.by {
			want = append(want, granted[n])
		}
		var by []string
		for _, e := range got.GetEntitlements() {
			by = append(by, e.GetEntitlementId())
		}
		if got.GetHeld() != (test.by != nil) || got.GetAbsenceReason() != test.want || !slices.Equal(by, want) || !got.GetAt().AsTime().Equal(at) {
			t.Errorf("%d: %+v: %v, want %v by %v", i, test.windows, got, test.want, test.by)
		}
		if other := b.check(t, tenant, "Team_access", &at); other.GetHeld() || other.GetAbsenceReason() != neverGiven {
			t.Errorf("another type: %v", other)
		}
	}

	// The bounds themselves: the start is in, the end is out.
	b.want(t, newly, byNothing, grant("bounds", "K", "INV-1", func(r *pb.GrantEntitlementRequest) {
		r.Grant.StartsAt, r.Grant.ExpiresAt = timestamppb.New(at), timestamppb.New(at.Add(time.Hour))
	}))
	for moment, want := range map[time.Time]pb.AbsenceReason{
		at.Add(-us): notStarted, at: none, at.Add(time.Hour - us): none, at.Add(time.Hour): expired,
		time.Unix(-62135596800, 0): notStarted, time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC): expired,
	} {
		if got := b.check(t, "bounds", "team_access", &moment); got.GetAbsenceReason() != want || got.GetHeld() != (want == none) {
			t.Errorf("at %v: %v, want %v", moment, got, want)
		}
	}
}

func (b *bundle) check(t testing.TB, tenant, typeName string, at *time.Time) *pb.CheckEntitlementResponse {
	t.Helper()
	r := &pb.CheckEntitlementRequest{TenantId: tenant, EntitlementType: typeName}
	if at != nil {
		r.At = timestamppb.New(*at)
	}
	resp, err := b.CheckEntitlement(t.Context(), r)
	if err != nil {
		t.Fatalf("check %v: %v", r, err)
	}
	return resp
}

// Without a moment, it is now, by the database's clock. Of many that hold, the oldest hundred are named.
func TestCheckEntitlement_NowAndMany(t *testing.T) {
	t.Parallel()
	b := setup(t)
	before := value[time.Time](t, b, `SELECT clock_timestamp()`)
	batch := &pb.BatchGrantEntitlementsRequest{}
	for i := range 105 {
		batch.Requests = append(batch.Requests, grant("t1", fmt.Sprint("K", i), fmt.Sprint("INV-", i), func(r *pb.GrantEntitlementRequest) {
			r.Grant.StartsAt, r.Grant.ExpiresAt = timestamppb.New(before.Add(-time.Hour)), timestamppb.New(before.Add(time.Hour))
		}))
	}
	answers, err := b.BatchGrantEntitlements(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, r := range answers.GetResponses() {
		ids = append(ids, r.GetEntitlement().GetEntitlementId())
	}
	slices.Sort(ids)
	got := b.check(t, "t1", "team_access", nil)
	if at := got.GetAt().AsTime(); at.Before(before) || at.After(before.Add(time.Minute)) {
		t.Errorf("judged at %v, want now, after %v", at, before)
	}
	var by []string
	for _, e := range got.GetEntitlements() {
		by = append(by, e.GetEntitlementId())
	}
	wantSame(t, "the oldest hundred", by, ids[:100])

	for version, state := range map[int64]pb.InvoiceState{2: refunded, 3: paid} {
		b.record(t, newly, byNothing, recording("t2", fmt.Sprint("R", version), fmt.Sprint("INV-", version), state, version))
	}
	if got := b.check(t, "t2", "team_access", nil); got.GetHeld() || got.GetAbsenceReason() != pb.AbsenceReason_ABSENCE_REASON_NEVER_GRANTED {
		t.Errorf("a tenant with invoices and no entitlement: %v", got)
	}
}

// Where a grant does not say when it ends, the catalogue does, from the start that the grant names or from when it was granted. A later
// edit changes nothing.
func TestCheckEntitlement_DefaultValidity(t *testing.T) {
	t.Parallel()
	catalog := func(validity time.Duration) func(*settings) {
		return func(s *settings) {
			s.store.Catalog = &store.Catalog{Types: map[string]store.CatalogType{"team_access": {DefaultValidity: validity}}}
		}
	}
	b := setup(t, catalog(24*time.Hour))
	start := time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)
	for tenant, test := range map[string]struct {
		change func(*pb.Grant)
		end    func(*pb.Entitlement) time.Time
	}{
		"no-window":  {func(*pb.Grant) {}, func(e *pb.Entitlement) time.Time { return e.GetGrantedAt().AsTime().Add(24 * time.Hour) }},
		"start-only": {func(g *pb.Grant) { g.StartsAt = timestamppb.New(start) }, func(*pb.Entitlement) time.Time { return start.Add(24 * time.Hour) }},
		"own-end": {func(g *pb.Grant) {
			g.StartsAt, g.ExpiresAt = timestamppb.New(start), timestamppb.New(start.Add(time.Minute))
		},
			func(*pb.Entitlement) time.Time { return start.Add(time.Minute) }},
	} {
		e := b.want(t, newly, byNothing, grant(tenant, "K", "INV-1", func(r *pb.GrantEntitlementRequest) { test.change(r.Grant) })).GetEntitlement()
		end := test.end(e)
		if !e.GetEndsAt().AsTime().Equal(end) {
			t.Errorf("%s: ends at %v, want %v", tenant, e.GetEndsAt().AsTime(), end)
		}
		later := serveOn(t, b.url, b.url, catalog(time.Hour))
		for _, b := range []*bundle{b, later} {
			last, over := end.Add(-time.Microsecond), end
			if got := b.check(t, tenant, "team_access", &last); !got.GetHeld() {
				t.Errorf("%s, just before the end: %v", tenant, got)
			}
			if got := b.check(t, tenant, "team_access", &over); got.GetAbsenceReason() != pb.AbsenceReason_ABSENCE_REASON_EXPIRED {
				t.Errorf("%s, at the end: %v", tenant, got)
			}
		}
		wantSame(t, "a replay under another catalogue", later.want(t, already, byKey, grant(tenant, "K", "INV-1", func(r *pb.GrantEntitlementRequest) {
			test.change(r.Grant)
		})).GetEntitlement(), e)
	}
}

// found lists keys page by page, each with the operation that it stands for and what its last attempt was told.
func (b *bundle) found(t testing.TB, r *pb.ListOperationsRequest) []string {
	t.Helper()
	lines := []string{}
	for r.PageToken = ""; ; {
		page, err := b.ListOperations(t.Context(), r)
		if err != nil {
			t.Fatalf("list %v: %v", r, err)
		}
		for _, l := range page.GetOperations() {
			line := l.GetIdempotencyKey() + ":"
			if op := l.GetOperation(); op != nil {
				line += " " + nameOf(op)
			}
			if a := l.GetLastAttempt(); a != nil {
				if a.GetIdempotencyKey() != l.GetIdempotencyKey() {
					t.Errorf("%s: its last attempt came under %s", line, a.GetIdempotencyKey())
				}
				line += ", " + short(a.GetOutcome()) + " to " + a.GetEventId()
			}
			lines = append(lines, line)
		}
		if r.PageToken = page.GetNextPageToken(); r.PageToken == "" {
			return lines
		}
	}
}

// Support has the webhook's id, or the invoice, or the type, and finds every key that came with it: winners, aliases, refunds, and what
// was only ever refused.
func TestListOperations(t *testing.T) {
	t.Parallel()
	b := setup(t)
	events := 0
	event := func() string { events++; return fmt.Sprint("evt_", events) }
	give := func(outcome pb.Outcome, by pb.MatchedBy, r *pb.GrantEntitlementRequest) *pb.GrantEntitlementResponse {
		r.EventId = event()
		return b.want(t, outcome, by, r)
	}
	give(rejected, byNothing, grant("t1", "refused", "INV-1", evidence(unpaid, 1)))              // 1
	id := give(newly, byNothing, grant("t1", "K1", "INV-1")).GetEntitlement().GetEntitlementId() // 2
	give(already, byBusinessKey, grant("t1", "K2", "INV-1"))                                     // 3
	give(conflict, byBusinessKey, grant("t1", "KC", "INV-1", seats("11")))                       // 4
	refund := recording("t1", "refund", "INV-1", refunded, 2)                                    // 5
	refund.EventId = event()                                                                     //
	b.record(t, newly, byNothing, refund)                                                        //
	refund.IdempotencyKey, refund.EventId = "refund-2", event()                                  // 6
	b.record(t, already, byBusinessKey, refund)                                                  //
	stale := recording("t1", "stale", "INV-1", paid, 1)                                          // 7
	stale.EventId = event()                                                                      //
	b.record(t, rejected, byNothing, stale)                                                      //
	turned := reversal("t1", "CASE-1", "", "", byID(id))                                         // 8
	turned.EventId = event()                                                                     //
	b.turn(t, already, byBusinessKey, turned)                                                    //
	back := reinstatement("t1", "CASE-2", "INV-1", "team_access")                                // 9
	back.EventId = event()                                                                       //
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, back)                 //
	lost := reversal("t1", "CASE-3", "INV-9", "sso")                                             // 10
	lost.EventId = event()                                                                       //
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, lost)                      //
	give(newly, byNothing, grant("t1", "K3", "INV-2", ofType("sso")))                            // 11
	took := reversal("t1", "CASE-4", "INV-2", "sso")                                             // 12
	took.EventId = event()                                                                       //
	b.turn(t, newly, byNothing, took)                                                            //
	give(already, byKey, grant("t1", "K3", "INV-2", ofType("sso")))                              // 13
	b.want(t, newly, byNothing, grant("t2", "foreign", "INV-1", func(r *pb.GrantEntitlementRequest) { r.EventId = "evt_2" }))

	byEvent := func(e string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EventId{EventId: e}}
	}
	byInvoice := func(i string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_InvoiceId{InvoiceId: i}}
	}
	byType := func(e string) *pb.ListOperationsRequest {
		return &pb.ListOperationsRequest{TenantId: "t1", Filter: &pb.ListOperationsRequest_EntitlementType{EntitlementType: e}}
	}
	for _, test := range []struct {
		request *pb.ListOperationsRequest
		want    []string
	}{
		{byEvent("evt_1"), []string{"refused:, REJECTED to evt_1"}},
		{byEvent("evt_2"), []string{"K1: K1 GRANT, NEWLY_APPLIED to evt_2"}},
		{byEvent("evt_3"), []string{"K2: K1 GRANT, ALREADY_APPLIED to evt_3"}},
		{byEvent("evt_4"), []string{"KC:, CONFLICTING_PAYLOAD to evt_4"}},
		{byEvent("evt_5"), []string{"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5"}},
		{byEvent("evt_8"), []string{"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8"}},
		{byEvent("evt_11"), []string{"K3: K3 GRANT, ALREADY_APPLIED to evt_13"}},
		{byEvent("evt_99"), []string{}},
		{byInvoice("INV-1"), []string{
			"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8",
			"CASE-2:, REJECTED to evt_9",
			"K1: K1 GRANT, NEWLY_APPLIED to evt_2",
			"K2: K1 GRANT, ALREADY_APPLIED to evt_3",
			"KC:, CONFLICTING_PAYLOAD to evt_4",
			"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5",
			"refund-2: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_6",
			"refused:, REJECTED to evt_1",
			"stale:, REJECTED to evt_7",
		}},
		{byInvoice("INV-2"), []string{"CASE-4: CASE-4 REVERSE, NEWLY_APPLIED to evt_12", "K3: K3 GRANT, ALREADY_APPLIED to evt_13"}},
		{byInvoice("INV-9"), []string{"CASE-3:, REJECTED to evt_10"}},
		{byInvoice("inv-1"), []string{}},
		{byType("team_access"), []string{
			"CASE-1: refund RECORD_INVOICE_STATE, ALREADY_APPLIED to evt_8",
			"CASE-2:, REJECTED to evt_9",
			"K1: K1 GRANT, NEWLY_APPLIED to evt_2",
			"K2: K1 GRANT, ALREADY_APPLIED to evt_3",
			"KC:, CONFLICTING_PAYLOAD to evt_4",
			"refund: refund RECORD_INVOICE_STATE, NEWLY_APPLIED to evt_5",
			"refused:, REJECTED to evt_1",
		}},
		{byType("sso"), []string{
			"CASE-3:, REJECTED to evt_10", "CASE-4: CASE-4 REVERSE, NEWLY_APPLIED to evt_12", "K3: K3 GRANT, ALREADY_APPLIED to evt_13",
		}},
	} {
		for _, size := range []int32{0, 1, 2} {
			test.request.PageSize = size
			wantSame(t, fmt.Sprintf("%v in pages of %d", test.request, size), b.found(t, test.request), test.want)
		}
	}
	foreign := byEvent("evt_2")
	foreign.TenantId = "t2"
	wantSame(t, "another tenant's event of the same name", b.found(t, foreign), []string{"foreign: foreign GRANT, NEWLY_APPLIED to evt_2"})

	// Without attempts the operations are still found, what was refused is not.
	b.purgeAttempts(t)
	wantSame(t, "the invoice after the purge", b.found(t, byInvoice("INV-1")), []string{
		"CASE-1: refund RECORD_INVOICE_STATE", "K1: K1 GRANT", "K2: K1 GRANT", "refund: refund RECORD_INVOICE_STATE", "refund-2: refund RECORD_INVOICE_STATE",
	})
	got := b.found(t, byType("sso"))
	wantSame(t, "the type after the purge", got, []string{"CASE-4: CASE-4 REVERSE", "K3: K3 GRANT"})
	wantSame(t, "the event after the purge", b.found(t, byEvent("evt_2")), []string{})
}

// A look-up answers for every kind of operation, with the whole story: attempts, aliases and the ledger.
func TestGetOperation_EveryKind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	granted := b.want(t, newly, byNothing, grant("t1", "K", "INV-1"))
	b.want(t, newly, byNothing, grant("t1", "K-sso", "INV-1", ofType("sso")))
	gone := b.turn(t, newly, byNothing, reversal("t1", "CASE-1", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reversal("t1", "CASE-1b", "INV-1", "team_access"))
	back := b.turn(t, newly, byNothing, reinstatement("t1", "CASE-2", "INV-1", "team_access"))
	b.turn(t, already, byBusinessKey, reinstatement("t1", "CASE-2b", "INV-1", "team_access"))
	b.turn(t, conflict, byKey, reinstatement("t1", "CASE-2", "INV-1", "team_access", func(r *pb.ReinstateEntitlementRequest) { r.Actor = "carol" }))
	refund := b.record(t, newly, byNothing, recording("t1", "refund", "INV-1", refunded, 2))
	b.record(t, already, byBusinessKey, recording("t1", "refund-b", "INV-1", refunded, 2))

	id := granted.GetEntitlement().GetEntitlementId()
	whole := []string{"1 GRANTED K 1  ", "2 REVERSED CASE-1 1 alice charge disputed", "3 REINSTATED CASE-2 1 bob dispute won", "4 REVERSED refund 2  the invoice is REFUNDED"}
	for _, test := range []struct {
		keys     []string // the owner's first
		result   *pb.Entitlement
		op       *pb.Operation
		attempts []string
		entries  []string
	}{
		{[]string{"K"}, granted.GetEntitlement(), granted.GetOperation(), []string{"K NEWLY_APPLIED"}, whole},
		{[]string{"CASE-1", "CASE-1b"}, gone.GetEntitlement(), gone.GetOperation(),
			[]string{"CASE-1 NEWLY_APPLIED", "CASE-1b ALREADY_APPLIED"}, whole},
		{[]string{"CASE-2", "CASE-2b"}, back.GetEntitlement(), back.GetOperation(),
			[]string{"CASE-2 NEWLY_APPLIED", "CASE-2b ALREADY_APPLIED", "CASE-2 CONFLICTING_PAYLOAD actor"}, whole},
		{[]string{"refund", "refund-b"}, nil, refund.GetOperation(),
			[]string{"refund NEWLY_APPLIED", "refund-b ALREADY_APPLIED"},
			[]string{"4 REVERSED refund 2  the invoice is REFUNDED", "2 REVERSED refund 2  the invoice is REFUNDED"}},
	} {
		for _, key := range test.keys {
			got := b.operation(t, byName("t1", key, full))
			if got.GetOutcome() != already || got.GetMatchedBy() != byKey {
				t.Errorf("%s: %v by %v", key, got.GetOutcome(), got.GetMatchedBy())
			}
			wantSame(t, "the operation of "+key, got.GetOperation(), test.op)
			wantSame(t, "the result of "+key, got.GetEntitlement(), test.result)
			if test.result != nil {
				wantNow(t, key, got, reversed, 4)
				if got.GetRecorded() != nil {
					t.Errorf("%s: recorded %v", key, got.GetRecorded())
				}
			} else {
				wantSame(t, "what "+key+" recorded", got.GetRecorded(), refund.GetRecorded())
			}
			var attempts, aliases, entries []string
			for _, a := range got.GetAttempts() {
				attempts = append(attempts, strings.TrimSpace(a.GetIdempotencyKey()+" "+short(a.GetOutcome())+" "+strings.Join(a.GetDifferingFields(), " ")))
				if a.GetKind() != test.op.GetKind() || a.GetInvoiceId() != "INV-1" || a.GetAttemptId() == "" {
					t.Errorf("an attempt of %s: %v", key, a)
				}
			}
			for _, a := range got.GetAliases() {
				aliases = append(aliases, a.GetIdempotencyKey())
			}
			for _, n := range got.GetEntries() {
				if test.result != nil && n.GetEntitlementId() != id {
					t.Errorf("%s: an entry of another entitlement: %v", key, n)
				}
				entries = append(entries, fmt.Sprintf("%d %s %s %d %s %s", n.GetEntryNumber(), short(n.GetKind()), n.GetIdempotencyKey(), n.GetInvoiceVersion(), n.GetActor(), n.GetReason()))
			}
			wantSame(t, "the attempts of "+key, attempts, test.attempts)
			wantSame(t, "the aliases of "+key, aliases, append([]string(nil), test.keys[1:]...))
			wantSame(t, "the entries of "+key, entries, test.entries)

			basic := b.operation(t, byName("t1", key, pb.OperationView_OPERATION_VIEW_BASIC))
			got.Attempts, got.Aliases, got.Entries = nil, nil, nil
			wantSame(t, "the basic view of "+key, basic, got)
		}
	}
	// Asked with a grant, the key of another kind is a conflict, as sending it would be.
	other := byName("t1", "CASE-1", full)
	other.Grant = grant("t1", "CASE-1", "INV-1").GetGrant()
	if got := b.operation(t, other); got.GetOutcome() != conflict || !slices.Equal(differing(got.GetConflict()), []string{"kind"}) || len(got.GetEntries()) != 4 {
		t.Errorf("asked with a grant: %v", got)
	}
	// What was refused so far has attempts and nothing else.
	b.turnRefused(t, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, reinstatement("t1", "CASE-9", "INV-1", "team_access"))
	if got := b.operation(t, byName("t1", "CASE-9", full)); got.GetOutcome() != notApplied || len(got.GetAttempts()) != 1 || got.GetEntries() != nil || got.GetEntitlement() != nil {
		t.Errorf("a refused reinstatement: %v", got)
	}
}

// Package client against the server: what had its effect is a nil error, everything else is an error that says what it is.
func TestClient_Ledger(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c, err := client.New("passthrough:///"+b.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	ctx := t.Context()

	if _, err := c.Reverse(ctx, reversal("t1", "CASE-0", "INV-1", "team_access")); !isRejected(err, pb.RejectionReason_REJECTION_REASON_NOT_GRANTED, afterState) {
		t.Errorf("reversing what is not there: %v", err)
	}
	if _, err := c.Grant(ctx, grant("t1", "K", "INV-1")); err != nil {
		t.Errorf("grant: %v", err)
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.Reverse(ctx, reversal("t1", "CASE-1", "INV-1", "team_access")); err != nil || r.GetOutcome() != outcome || r.GetCurrentState() != reversed {
			t.Errorf("reverse: %v %v", r, err)
		}
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.Reinstate(ctx, reinstatement("t1", "CASE-2", "INV-1", "team_access")); err != nil || r.GetOutcome() != outcome || r.GetCurrentState() != active {
			t.Errorf("reinstate: %v %v", r, err)
		}
	}
	if r, err := c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "team_access"}); err != nil || !r.GetHeld() {
		t.Errorf("check: %v %v", r, err)
	}
	for _, outcome := range []pb.Outcome{newly, already} {
		if r, err := c.RecordInvoice(ctx, recording("t1", "refund", "INV-1", refunded, 2)); err != nil || r.GetOutcome() != outcome || r.GetRecorded().GetReversedCount() != 1 {
			t.Errorf("record: %v %v", r, err)
		}
	}
	if r, err := c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1", EntitlementType: "team_access"}); err != nil || r.GetAbsenceReason() != pb.AbsenceReason_ABSENCE_REASON_REVERSED {
		t.Errorf("check: %v %v", r, err)
	}
	if r, err := c.RecordInvoice(ctx, recording("t1", "late", "INV-1", paid, 1)); r != nil || !isRejected(err, pb.RejectionReason_REJECTION_REASON_STALE_VERSION, never) {
		t.Errorf("a stale version: %v %v", r, err)
	}
	if r, err := c.Reinstate(ctx, reinstatement("t1", "CASE-3", "INV-1", "team_access")); r != nil || !isRejected(err, pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED, afterState) {
		t.Errorf("reinstating under a refunded invoice: %v %v", r, err)
	}
	var conflicting *client.ConflictError
	_, err = c.Reverse(ctx, reversal("t1", "CASE-1", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Reason = "fraud" }))
	if !errors.As(err, &conflicting) || conflicting.MatchedBy != byKey || !slices.Equal(differing(conflicting.Conflict), []string{"reason"}) {
		t.Errorf("another reason: %v", err)
	}
	_, err = c.RecordInvoice(ctx, recording("t1", "other", "INV-1", voided, 2))
	if !errors.As(err, &conflicting) || conflicting.MatchedBy != byBusinessKey || !slices.Equal(differing(conflicting.Conflict), []string{"state"}) {
		t.Errorf("another state of the same version: %v", err)
	}
	_, err = c.Reverse(ctx, reversal("t1", "CASE-4", "INV-1", "team_access", func(r *pb.ReverseEntitlementRequest) { r.Actor = "" }))
	wantCode(t, "no actor", err, codes.InvalidArgument)
	_, err = c.Check(ctx, &pb.CheckEntitlementRequest{TenantId: "t1"})
	wantCode(t, "no type", err, codes.InvalidArgument)
}

func isRejected(err error, reason pb.RejectionReason, retry pb.RetryAdvice) bool {
	var r *client.RejectedError
	return errors.As(err, &r) && r.Reason == reason && r.Retry == retry
}
