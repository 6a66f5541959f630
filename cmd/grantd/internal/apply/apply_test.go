package apply_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grantd/grantd/cmd/grantd/internal/apply"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	newly    = "OUTCOME_NEWLY_APPLIED"
	already  = "OUTCOME_ALREADY_APPLIED"
	rejected = "OUTCOME_REJECTED"
	byKey    = "IDEMPOTENCY_KEY"
)

func TestRun_InOrderWithExpectations(t *testing.T) {
	a, conn := setup(t)
	file := grantLine(t, "k1", newly, "") + "\n" + grantLine(t, "k2", newly, "") + grantLine(t, "k1", already, byKey) +
		requestLine(t, "GetOperation", &entitlementv1.GetOperationRequest{TenantId: "t"}, "OUTCOME_NOT_APPLIED", "") +
		grantLine(t, "k3", "", "")
	report := run(t, conn, file, inOrder())
	if got := differences(t, report) + failures(t, report); got != "" || report.Expecting() != 4 {
		t.Errorf("%d expectations, differing:\n%s", report.Expecting(), got)
	}
	if want := []string{"k1", "k2", "k1", "k3"}; !slices.Equal(a.keys, want) || a.lookups != 1 {
		t.Errorf("sent %v and %d look-ups, want %v and one", a.keys, a.lookups, want)
	}
}

func TestRun_ListsEachDifference(t *testing.T) {
	a, conn := setup(t)
	a.answer = func(key string, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
		switch key {
		case "unpaid":
			return &entitlementv1.GrantEntitlementResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_REJECTED,
				Result: &entitlementv1.GrantEntitlementResponse_Rejection{Rejection: &entitlementv1.Rejection{
					Reason: entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID}},
			}, nil
		case "strange":
			return &entitlementv1.GrantEntitlementResponse{Outcome: 99}, nil
		}
		return nil, nil
	}
	file := grantLine(t, "a", newly, "") +
		grantLine(t, "a", newly, "") + // the outcome differs
		grantLine(t, "a", already, "BUSINESS_KEY") + // the detail differs
		grantLine(t, "a", already, "") + // no detail means none
		grantLine(t, "unpaid", rejected, "INVOICE_NOT_PAID") +
		grantLine(t, "unpaid", rejected, "INVOICE_REVERSED") +
		grantLine(t, "strange", newly, "")
	report := run(t, conn, file, inOrder())
	want := `line 2: want OUTCOME_NEWLY_APPLIED, got OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY
line 3: want OUTCOME_ALREADY_APPLIED BUSINESS_KEY, got OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY
line 4: want OUTCOME_ALREADY_APPLIED, got OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY
line 6: want OUTCOME_REJECTED INVOICE_REVERSED, got OUTCOME_REJECTED INVOICE_NOT_PAID
line 7: want OUTCOME_NEWLY_APPLIED, got unknown outcome
`
	if got := differences(t, report); got != want || report.Differing() != 5 {
		t.Errorf("%d differing:\n%swant:\n%s", report.Differing(), got, want)
	}
}

func TestRun_BadLineStopsAndIsNamed(t *testing.T) {
	for name, test := range map[string]struct{ line, want string }{
		"unknown method":        {`{"method": "Grant", "request": {}}`, `line 2: unknown method "Grant"`},
		"batch":                 {`{"method": "BatchGrantEntitlements", "request": {}}`, "line 2: BatchGrantEntitlements has many answers"},
		"no request":            {`{"method": "GrantEntitlement"}`, `line 2: no "request"`},
		"unknown request field": {`{"method": "GrantEntitlement", "request": {"key": "k"}}`, "line 2: request: "},
		"unknown field":         {`{"method": "GrantEntitlement", "request": {}, "expected": {}}`, "line 2: json: unknown field"},
		"two values":            {`{"method": "GrantEntitlement", "request": {}} {}`, "line 2: more than one JSON value"},
		"not JSON":              {`method`, "line 2: invalid character"},
		"too long":              {strings.Repeat("x", 9<<20), "line 2: bufio.Scanner: token too long"},
	} {
		t.Run(name, func(t *testing.T) {
			a, conn := setup(t)
			file := grantLine(t, "before", "", "") + test.line + "\n" + grantLine(t, "after", "", "")
			report, err := apply.Run(t.Context(), conn, strings.NewReader(file), inOrder())
			if err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Fatalf("error %v, want %q", err, test.want)
			}
			if report == nil || !slices.Equal(a.keys, []string{"before"}) {
				t.Errorf("sent %v, want the line before alone", a.keys)
			}
		})
	}
}

func TestRun_StatusIsCountedAndListed(t *testing.T) {
	a, conn := setup(t)
	a.answer = func(key string, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
		st, err := status.New(codes.InvalidArgument, "malformed").WithDetails(&errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "grant.tenant_id"}}})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	file := grantLine(t, "a", "INVALID_ARGUMENT", "grant.tenant_id") + grantLine(t, "b", newly, "") + grantLine(t, "c", "", "")

	report := run(t, conn, file, inOrder())
	want := "line 2: want OUTCOME_NEWLY_APPLIED, got INVALID_ARGUMENT grant.tenant_id: malformed\n"
	if got := differences(t, report); got != want {
		t.Errorf("differing:\n%swant:\n%s", got, want)
	}
	if got, want := failures(t, report), "line 3: INVALID_ARGUMENT grant.tenant_id: malformed\n"; got != want {
		t.Errorf("failed:\n%swant:\n%s", got, want)
	}

	unchecked := inOrder()
	unchecked.Check = false
	report = run(t, conn, file, unchecked)
	if report.Failed() != 3 || report.Differing() != 0 {
		t.Errorf("unchecked: %d failed and %d differ, want 3 and 0", report.Failed(), report.Differing())
	}
	var text strings.Builder
	if err := report.Write(&text); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), "INVALID_ARGUMENT  grant.tenant_id  3\n") {
		t.Errorf("the table lacks the statuses:\n%s", text.String())
	}
}

func TestRun_ConcurrentSendsEachLineOnce(t *testing.T) {
	a, conn := setup(t)
	var file strings.Builder
	for i := range 500 {
		file.WriteString(grantLine(t, fmt.Sprint("k", i), newly, ""))
	}
	options := inOrder()
	options.Concurrency = 8
	report := run(t, conn, file.String(), options)
	slices.Sort(a.keys)
	if len(a.keys) != 500 || len(slices.Compact(a.keys)) != 500 || report.Differing() != 0 || report.Expecting() != 500 {
		t.Errorf("%d arrivals; %s", len(a.keys), differences(t, report))
	}
}

func TestRun_BatchGroupsNeighbours(t *testing.T) {
	a, conn := setup(t)
	var file strings.Builder
	for i := range 25 {
		if i == 14 {
			// Another method keeps its place: the batch before it is sent first.
			file.WriteString(requestLine(t, "GetOperation", &entitlementv1.GetOperationRequest{TenantId: "t"}, "OUTCOME_NOT_APPLIED", ""))
		}
		file.WriteString(grantLine(t, fmt.Sprint("k", i), newly, ""))
	}
	file.WriteString(grantLine(t, "k3", newly, ""))
	options := inOrder()
	options.Batch = 10
	report := run(t, conn, file.String(), options)
	if want := []int{10, 4, 10, 2}; !slices.Equal(a.calls, want) || a.lookups != 1 {
		t.Errorf("calls of %v and %d look-ups, want %v and one", a.calls, a.lookups, want)
	}
	if got, want := differences(t, report), "line 27: want OUTCOME_NEWLY_APPLIED, got OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY\n"; got != want {
		t.Errorf("differing:\n%swant:\n%s", got, want)
	}
}

func TestRun_BatchStaysBelowOneMebibyte(t *testing.T) {
	a, conn := setup(t)
	var file strings.Builder
	for i := range 5 {
		file.WriteString(grantLine(t, strings.Repeat("x", 300<<10)+fmt.Sprint(i), newly, ""))
	}
	options := inOrder()
	options.Batch = apply.MaxBatch
	run(t, conn, file.String(), options)
	if want := []int{3, 2}; !slices.Equal(a.calls, want) {
		t.Errorf("calls of %v, want %v", a.calls, want)
	}
}

func TestRun_RetryableBatchItemIsSentAgain(t *testing.T) {
	a, conn := setup(t)
	a.answer = func(key string, arrival int) (*entitlementv1.GrantEntitlementResponse, error) {
		if key == "late" && arrival < 3 || key == "never" {
			return &entitlementv1.GrantEntitlementResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
				Result: &entitlementv1.GrantEntitlementResponse_Failure{
					Failure: &entitlementv1.RetryableFailure{Reason: "COMMIT_UNKNOWN"}},
			}, nil
		}
		return nil, nil
	}
	options := inOrder()
	options.Batch = 10
	report := run(t, conn, grantLine(t, "a", newly, "")+grantLine(t, "late", newly, "")+grantLine(t, "never", newly, ""), options)
	if want := []int{3, 2, 2, 1, 1}; !slices.Equal(a.calls, want) {
		t.Errorf("calls of %v, want %v", a.calls, want)
	}
	want := "line 3: want OUTCOME_NEWLY_APPLIED, got OUTCOME_RETRYABLE_FAILURE COMMIT_UNKNOWN\n"
	if got := differences(t, report); got != want {
		t.Errorf("differing:\n%swant:\n%s", got, want)
	}
}
