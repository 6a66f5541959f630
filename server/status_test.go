package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// checkInvalidStatus checks what every INVALID_ARGUMENT keeps, and returns its violations.
func checkInvalidStatus(t *testing.T, v violations) []*errdetails.BadRequest_FieldViolation {
	t.Helper()
	s := status.Convert(invalid(v))
	if s.Code() != codes.InvalidArgument || len(s.Details()) != 1 {
		t.Fatalf("%v with %d details, want INVALID_ARGUMENT with 1", s.Code(), len(s.Details()))
	}
	if size := proto.Size(s.Proto()); size > 4096 {
		t.Errorf("the status takes %d bytes, want at most 4096", size)
	}
	if strings.ContainsFunc(s.Message(), func(r rune) bool { return r < ' ' || r > '~' }) {
		t.Errorf("the message is not plain ASCII: %q", s.Message())
	}
	bad, ok := s.Details()[0].(*errdetails.BadRequest)
	if !ok || len(bad.GetFieldViolations()) == 0 {
		t.Fatalf("the detail is %v, want a BadRequest with violations", s.Details()[0])
	}
	return bad.GetFieldViolations()
}

func TestInvalid_TellsEveryViolation(t *testing.T) {
	r := validGrantRequest()
	r.Grant.TenantId, r.Grant.Quantity = "", proto.Int64(0)
	v := validateGrantRequest(r)
	want := []*errdetails.BadRequest_FieldViolation{
		{Field: "grant.tenant_id", Description: ruleIdentifier},
		{Field: "grant.quantity", Description: ruleQuantity},
	}
	if diff := cmp.Diff(want, checkInvalidStatus(t, v), protocmp.Transform()); diff != "" {
		t.Errorf("violations (-want +got):\n%s", diff)
	}
	if got, want := status.Convert(invalid(v)).Message(), "grant.tenant_id: "+ruleIdentifier+" (and 1 more)"; got != want {
		t.Errorf("the message is %q, want %q", got, want)
	}
}

// A caller sent a scope of 200 KB. Every entry broke a rule, the violations filled a header past what the proxy in front allowed, and
// the caller got the proxy's 502 instead of the answer.
func TestInvalid_HugeScopeFitsIntoAHeader(t *testing.T) {
	scope := func(entries int, key, value func(int) string) map[string]string {
		m := map[string]string{}
		for i := range entries {
			m[key(i)] = value(i)
		}
		return m
	}
	short := func(int) string { return "v" }
	long := func(bytes int) func(int) string {
		return func(int) string { return strings.Repeat("v", bytes) }
	}
	for name, c := range map[string]struct {
		scope map[string]string
		// broken is how many rules the scope breaks; cut, whether some cannot be listed.
		broken int
		cut    bool
	}{
		"one value":          {scope(1, func(int) string { return "label" }, long(200_000)), 2, false},
		"32 values":          {scope(32, func(i int) string { return fmt.Sprintf("k%d", i) }, long(6_250)), 33, false},
		"one key":            {scope(1, func(int) string { return strings.Repeat("\U0010ffff", 50_000) }, short), 2, false},
		"20,000 legal keys":  {scope(20_000, func(i int) string { return fmt.Sprintf("key%06d", i) }, short), 2, false},
		"20,000 bad keys":    {scope(20_000, func(i int) string { return fmt.Sprintf("KEY%06d", i) }, short), 20_002, true},
		"32 keys that swell": {scope(32, func(i int) string { return fmt.Sprintf("\x00%02d", i) + strings.Repeat("\x00", 6_000) }, long(257)), 65, true},
		"100 bytes of \\xff": {scope(100, func(i int) string { return fmt.Sprintf("%02d", i) + strings.Repeat("\xff", 2_000) }, short), 102, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := validGrantRequest()
			r.Grant.Scope = c.scope
			v := validateGrantRequest(r)
			if got := len(v.kept) + v.omitted; got != c.broken {
				t.Errorf("%d violations, want %d", got, c.broken)
			}
			listed := checkInvalidStatus(t, v)
			switch {
			case !c.cut:
				if len(listed) != c.broken {
					t.Errorf("%d violations are listed, want all %d", len(listed), c.broken)
				}
			case len(listed) < 8:
				t.Errorf("only %d violations are listed, though there is room for more", len(listed))
			default:
				last := listed[len(listed)-1]
				want := fmt.Sprintf("%d more violations are not listed.", c.broken-(len(listed)-1))
				if last.GetField() != "" || last.GetDescription() != want {
					t.Errorf("the last violation is %v, want %q without a field", last, want)
				}
			}
			if again := validateGrantRequest(r); !cmp.Equal(v, again, cmp.AllowUnexported(violations{}, violation{})) {
				t.Error("the same request is told something else the second time")
			}
		})
	}
}

func TestViolations_Within(t *testing.T) {
	var v violations
	for i := range 100 {
		v.add(fmt.Sprintf("field%02d", i), strings.Repeat("r", 84))
	}
	if len(v.kept) != maxKeptViolations || v.omitted != 100-maxKeptViolations {
		t.Fatalf("%d kept and %d omitted", len(v.kept), v.omitted)
	}
	// Each takes 7 + 84 + 8 bytes, and 64 are set aside.
	for bytes, want := range map[int]struct {
		listed int
		last   string
	}{
		64 + 99:            {1, "99 more violations are not listed."},
		64 + 5*99:          {5, "95 more violations are not listed."},
		64 + 5*99 + 98:     {5, "95 more violations are not listed."},
		1 << 20:            {64, "36 more violations are not listed."},
		itemViolationBytes: {9, "91 more violations are not listed."},
	} {
		got := v.within(bytes)
		if len(got) != want.listed+1 || got[len(got)-1] != (violation{rule: want.last}) {
			t.Errorf("%d bytes: %d listed, the last is %v; want %v", bytes, len(got)-1, got[len(got)-1], want)
		}
		item := &entitlementv1.Rejection{}
		for _, one := range got {
			item.Violations = append(item.Violations, &entitlementv1.FieldViolation{Field: one.field, Description: one.rule})
		}
		if size := proto.Size(item); size > bytes {
			t.Errorf("%d bytes: takes %d", bytes, size)
		}
	}
	few := violations{kept: v.kept[:3]}
	if got := few.within(64 + 3*99); len(got) != 3 {
		t.Errorf("three that fit: %d listed", len(got))
	}
	if got := few.within(64 + 2*99); len(got) != 3 || got[2].rule != "1 more violation is not listed." {
		t.Errorf("two of three fit: %v", got)
	}
}

func TestRetryable(t *testing.T) {
	typed := &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
		Result: &entitlementv1.GrantEntitlementResponse_Failure{Failure: &entitlementv1.RetryableFailure{
			Reason: store.ReasonQueueFull, RetryDelay: durationpb.New(150 * time.Millisecond),
		}},
	}
	for name, c := range map[string]struct {
		failure *store.Failure
		typed   proto.Message
		code    codes.Code
		details []any
	}{
		"overload, of a write": {
			&store.Failure{Reason: store.ReasonQueueFull, RetryDelay: 150 * time.Millisecond, Overload: true}, typed,
			codes.ResourceExhausted,
			[]any{
				&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Domain: "entitlement.v1"},
				&errdetails.RetryInfo{RetryDelay: durationpb.New(150 * time.Millisecond)},
				typed,
			},
		},
		"no database, in a read": {
			&store.Failure{Reason: store.ReasonReadOnly, RetryDelay: time.Second}, nil,
			codes.Unavailable,
			[]any{
				&errdetails.ErrorInfo{Reason: "READ_ONLY", Domain: "entitlement.v1"},
				&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Second)},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := status.Convert(retryable(c.failure, c.typed))
			if s.Code() != c.code {
				t.Errorf("the code is %v, want %v", s.Code(), c.code)
			}
			if !strings.Contains(s.Message(), c.failure.Reason) {
				t.Errorf("the message %q does not name the reason", s.Message())
			}
			if diff := cmp.Diff(c.details, s.Details(), protocmp.Transform()); diff != "" {
				t.Errorf("details (-want +got):\n%s", diff)
			}
		})
	}
}

// callStream is the server's side of a call: it keeps the trailer.
type callStream struct {
	grpc.ServerTransportStream
	trailer metadata.MD
}

func (s *callStream) Method() string { return "/entitlement.v1.EntitlementService/GrantEntitlement" }

func (s *callStream) SetTrailer(md metadata.MD) error {
	s.trailer = metadata.Join(s.trailer, md)
	return nil
}

func TestPushback(t *testing.T) {
	for delay, want := range map[time.Duration]string{
		-time.Second:            "0",
		0:                       "0",
		time.Nanosecond:         "1",
		150 * time.Millisecond:  "150",
		1500 * time.Microsecond: "2",
		time.Minute:             "60000",
	} {
		stream := &callStream{}
		pushback(grpc.NewContextWithServerTransportStream(t.Context(), stream), &store.Failure{RetryDelay: delay})
		if got := stream.trailer.Get("grpc-retry-pushback-ms"); !cmp.Equal(got, []string{want}) {
			t.Errorf("%v: the trailer says %v, want %s", delay, got, want)
		}
	}
}

func TestStatusOf(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	secret := errors.New(`ERROR: duplicate key (tenant_id)=(acme) in "entitlements" (SQLSTATE 23505)`)

	for name, c := range map[string]struct {
		ctx      context.Context
		err      error
		code     codes.Code
		pushback []string
		logged   bool
	}{
		"nothing":              {t.Context(), nil, codes.OK, nil, false},
		"failure":              {t.Context(), fmt.Errorf("grant: %w", &store.Failure{Reason: store.ReasonContention, RetryDelay: time.Second}), codes.Unavailable, []string{"1000"}, false},
		"overload":             {t.Context(), &store.Failure{Reason: store.ReasonQueueFull, Overload: true}, codes.ResourceExhausted, []string{"0"}, false},
		"not found":            {t.Context(), fmt.Errorf("read: %w", store.ErrNotFound), codes.NotFound, nil, false},
		"caller's limit":       {late, fmt.Errorf("read: %w", late.Err()), codes.DeadlineExceeded, nil, false},
		"caller left":          {canceled, canceled.Err(), codes.Canceled, nil, false},
		"our own limit":        {t.Context(), fmt.Errorf("connect: %w", context.DeadlineExceeded), codes.Unavailable, []string{"1000"}, false},
		"anything else":        {t.Context(), fmt.Errorf("commit: %w", secret), codes.Internal, nil, true},
		"else, and late":       {late, secret, codes.Internal, nil, true},
		"failure, though late": {late, &store.Failure{Reason: store.ReasonCommitUnknown}, codes.Unavailable, []string{"0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var lines bytes.Buffer
			stream := &callStream{}
			ctx := grpc.NewContextWithServerTransportStream(c.ctx, stream)
			s := status.Convert(statusOf(ctx, c.err, slog.New(slog.NewJSONHandler(&lines, nil))))

			if s.Code() != c.code {
				t.Errorf("the code is %v, want %v", s.Code(), c.code)
			}
			if diff := cmp.Diff(c.pushback, stream.trailer.Get("grpc-retry-pushback-ms")); diff != "" {
				t.Errorf("pushback (-want +got):\n%s", diff)
			}
			// A write says in the details what its response would have said.
			typed := func(f *store.Failure) proto.Message { return grantFailureOut(f) }
			details := status.Convert(typedStatus(ctx, c.err, slog.New(slog.DiscardHandler), typed)).Details()
			if _, ok := last(details).(*entitlementv1.GrantEntitlementResponse); ok != (c.pushback != nil) {
				t.Errorf("a write's details: %v", details)
			}
			for _, word := range []string{"SQLSTATE", "acme", "duplicate"} {
				if strings.Contains(s.String(), word) {
					t.Errorf("the status carries the driver's text: %v", s)
				}
			}
			if !c.logged {
				if lines.Len() > 0 {
					t.Errorf("logged: %s", &lines)
				}
				return
			}
			var line struct{ Level, Method, Error string }
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
				t.Fatalf("one line should be logged, is %q: %v", &lines, err)
			}
			if line.Level != "ERROR" || line.Error != c.err.Error() || line.Method != stream.Method() {
				t.Errorf("logged %+v", line)
			}
		})
	}
}

func last(all []any) any {
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}
