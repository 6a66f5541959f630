package acceptance_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

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
