package client_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

func requests(keys ...string) []*entitlementv1.GrantEntitlementRequest {
	var reqs []*entitlementv1.GrantEntitlementRequest
	for _, key := range keys {
		reqs = append(reqs, request(key))
	}
	return reqs
}

func unanswered(delay time.Duration) *entitlementv1.GrantEntitlementResponse {
	return &entitlementv1.GrantEntitlementResponse{
		Outcome: entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE,
		Result: &entitlementv1.GrantEntitlementResponse_Failure{Failure: &entitlementv1.RetryableFailure{
			Reason: "COMMIT_UNKNOWN", RetryDelay: durationpb.New(delay),
		}},
	}
}

// keysSent is what each arrival of a batch held.
func keysSent(s *server) [][]string {
	var sent [][]string
	for _, a := range s.seen() {
		var keys []string
		for _, r := range a.requests {
			keys = append(keys, r.GetIdempotencyKey())
		}
		sent = append(sent, keys)
	}
	return sent
}

// batches answers the items of each arrival of a batch by their keys.
func batches(answer func(arrival int, key string) *entitlementv1.GrantEntitlementResponse) *server {
	return &server{batch: func(arrival int, reqs []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
		resp := &entitlementv1.BatchGrantEntitlementsResponse{}
		for _, r := range reqs {
			resp.Responses = append(resp.Responses, answer(arrival, r.GetIdempotencyKey()))
		}
		return resp, nil
	}}
}

func TestGrantBatch_SendsOnlyUnansweredItemsAgain(t *testing.T) {
	invalid := rejection(entitlementv1.RejectionReason_REJECTION_REASON_INVALID_REQUEST, "malformed")
	invalid.GetRejection().Violations = []*entitlementv1.FieldViolation{{Field: "grant.tenant_id", Description: "required"}}
	const asked = 300 * time.Millisecond
	s := batches(func(arrival int, key string) *entitlementv1.GrantEntitlementResponse {
		switch {
		case key == "bad":
			return invalid
		case key == "late" && arrival <= 2, key == "later" && arrival == 1:
			return unanswered(asked)
		}
		answer := applied()
		answer.GetEntitlement().EntitlementId = key
		return answer
	})
	results, err := setup(t, s).GrantBatch(within(t, 20*time.Second), requests("a", "late", "bad", "later", "b"))

	if diff := cmp.Diff([][]string{{"a", "late", "bad", "later", "b"}, {"late", "later"}, {"late"}}, keysSent(s)); diff != "" {
		t.Errorf("keys sent (-want +got):\n%s", diff)
	}
	seen := s.seen()
	if waited := seen[1].at.Sub(seen[0].at); waited < asked {
		t.Errorf("sent again after %v, asked for %v", waited, asked)
	}
	for i, want := range []string{"a", "late", "", "later", "b"} {
		if got := results[i].Response.GetEntitlement().GetEntitlementId(); got != want {
			t.Errorf("item %d got the entitlement %q, want %q", i, got, want)
		}
		if (results[i].Err == nil) != (want != "") {
			t.Errorf("item %d: %v", i, results[i].Err)
		}
	}
	var rejected *client.RejectedError
	if !errors.As(err, &rejected) || rejected.Key != "bad" {
		t.Fatalf("error %v, want the RejectedError of the item", err)
	}
	const want = `1 of 5 not granted, the first: item 2: grantd: key "bad": rejected: INVALID_REQUEST: malformed; grant.tenant_id: required`
	if err.Error() != want {
		t.Errorf("text %q\nwant %q", err, want)
	}
}

func TestGrantBatch_RetriesUsedUp(t *testing.T) {
	s := batches(func(_ int, key string) *entitlementv1.GrantEntitlementResponse {
		if key == "stuck" {
			return unanswered(time.Millisecond)
		}
		return applied()
	})
	results, err := setup(t, s).GrantBatch(within(t, 20*time.Second), requests("a", "stuck"))
	if results[0].Err != nil || results[0].Response == nil {
		t.Errorf("the item that was granted: %+v", results[0])
	}
	var retryable *client.RetryableError
	if !errors.As(results[1].Err, &retryable) || retryable.Key != "stuck" || retryable.Reason != "COMMIT_UNKNOWN" || retryable.Delay != time.Millisecond {
		t.Errorf("the item that was not: %+v", results[1])
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("error %v, want one that wraps the item's", err)
	}
	if diff := cmp.Diff([][]string{{"a", "stuck"}, {"stuck"}, {"stuck"}, {"stuck"}, {"stuck"}}, keysSent(s)); diff != "" {
		t.Errorf("keys sent (-want +got):\n%s", diff)
	}
}

// The first answers stand, whatever becomes of the later calls.
func TestGrantBatch_LaterCallFails(t *testing.T) {
	first := batches(func(_ int, key string) *entitlementv1.GrantEntitlementResponse {
		if key == "a" {
			return applied()
		}
		return unanswered(time.Millisecond)
	})
	answer := first.batch
	s := &server{batch: func(arrival int, reqs []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
		if arrival == 1 {
			return answer(arrival, reqs)
		}
		return nil, refused(codes.ResourceExhausted, "QUEUE_FULL", time.Hour)
	}}
	results, err := setup(t, s).GrantBatch(within(t, 20*time.Second), requests("a", "stuck"))
	if results[0].Err != nil || results[0].Response == nil {
		t.Errorf("the item that was granted: %+v", results[0])
	}
	var retryable *client.RetryableError
	if err == nil || !errors.As(results[1].Err, &retryable) || retryable.Key != "stuck" || retryable.Reason != "QUEUE_FULL" {
		t.Errorf("the item that was not: %+v", results[1])
	}
}

func TestGrantBatch_CallFails(t *testing.T) {
	for name, tc := range map[string]struct {
		batch func(int, []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error)
		want  codes.Code
	}{
		"refused": {func(int, []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
			return nil, status.Error(codes.InvalidArgument, "too many")
		}, codes.InvalidArgument},
		"answers missing": {func(int, []*entitlementv1.GrantEntitlementRequest) (*entitlementv1.BatchGrantEntitlementsResponse, error) {
			return &entitlementv1.BatchGrantEntitlementsResponse{Responses: []*entitlementv1.GrantEntitlementResponse{applied()}}, nil
		}, codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			results, err := setup(t, &server{batch: tc.batch}).GrantBatch(t.Context(), requests("a", "b"))
			if status.Code(err) != tc.want || !strings.Contains(err.Error(), "2 of 2 not granted") {
				t.Errorf("error %v, want %v", err, tc.want)
			}
			for i, key := range []string{"a", "b"} {
				if status.Code(results[i].Err) != tc.want || !strings.Contains(results[i].Err.Error(), key) || results[i].Response != nil {
					t.Errorf("item %d: %+v", i, results[i])
				}
			}
		})
	}
}

func TestGrantBatch_EmptyMakesNoCall(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // any call would fail
	if results, err := setup(t, &server{}).GrantBatch(ctx, nil); len(results) != 0 || err != nil {
		t.Errorf("%v, %v", results, err)
	}
}
