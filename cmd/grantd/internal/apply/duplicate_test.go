package apply_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

func fileOf(t *testing.T, n int) string {
	t.Helper()
	var file strings.Builder
	for i := range n {
		file.WriteString(grantLine(t, fmt.Sprint("k", i), newly, ""))
	}
	return file.String()
}

func TestDuplicate_ShareIsChosenBySeed(t *testing.T) {
	file := fileOf(t, 2000)
	arrivals := func(seed uint64) []string {
		a, conn := setup(t)
		options := inOrder()
		options.Duplicate, options.Seed = 0.2, seed
		report := run(t, conn, file, options)
		if got := differences(t, report); got != "" {
			t.Errorf("differing:\n%s", got)
		}
		return a.keys
	}
	first := arrivals(1)
	if again := len(first) - 2000; again < 300 || again > 500 {
		t.Errorf("%d of 2000 lines were sent again, want about 400", again)
	}
	if !slices.Equal(first, arrivals(1)) {
		t.Error("the same seed sent another sequence")
	}
	if slices.Equal(first, arrivals(2)) {
		t.Error("another seed sent the same sequence")
	}

	seen, interleaved := make(map[string]int), 0
	for i, key := range first {
		if seen[key]++; seen[key] == 2 && i < len(first)-100 {
			interleaved++
		}
		if seen[key] > 2 {
			t.Errorf("%s was sent %d times", key, seen[key])
		}
	}
	if interleaved == 0 {
		t.Error("every second arrival came at the end")
	}
}

func TestDuplicate_OnlyWrites(t *testing.T) {
	a, conn := setup(t)
	options := inOrder()
	options.Duplicate = 1
	file := requestLine(t, "GetOperation", &entitlementv1.GetOperationRequest{TenantId: "t"}, "", "") + grantLine(t, "k", newly, "")
	run(t, conn, file, options)
	if a.lookups != 1 || len(a.keys) != 2 {
		t.Errorf("%d look-ups and %d grants, want 1 and 2", a.lookups, len(a.keys))
	}
}

func TestDuplicate_SecondEffectIsFound(t *testing.T) {
	for _, batch := range []int{1, 4} {
		a, conn := setup(t)
		a.answer = func(key string, _ int) (*entitlementv1.GrantEntitlementResponse, error) {
			if key == "k3" {
				return &entitlementv1.GrantEntitlementResponse{Outcome: entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED}, nil
			}
			return nil, nil
		}
		options := inOrder()
		options.Duplicate, options.Batch = 1, batch
		report := run(t, conn, fileOf(t, 10), options)
		want := "line 4, sent again: want OUTCOME_ALREADY_APPLIED IDEMPOTENCY_KEY, got OUTCOME_NEWLY_APPLIED\n"
		if got := differences(t, report); got != want {
			t.Errorf("batches of %d, differing:\n%swant:\n%s", batch, got, want)
		}
		var text strings.Builder
		if err := report.Write(&text); err != nil {
			t.Fatal(err)
		}
		for _, row := range []string{"total - 10 10", newly + " - 10 1", already + " " + byKey + " 0 9"} {
			if !strings.Contains(strings.Join(strings.Fields(text.String()), " "), row) {
				t.Errorf("batches of %d: the table lacks %q:\n%s", batch, row, text.String())
			}
		}
	}
}

// A refusal leaves the key free. If its second arrival came later, a line in between could have changed the state, and the
// second arrival would take the effect that a later line of the file expects for itself.
func TestDuplicate_RefusalIsRepeatedAtOnce(t *testing.T) {
	a, conn := setup(t)
	a.answer = func(key string, arrival int) (*entitlementv1.GrantEntitlementResponse, error) {
		if key == "k" && arrival <= 2 {
			return &entitlementv1.GrantEntitlementResponse{
				Outcome: entitlementv1.Outcome_OUTCOME_REJECTED,
				Result: &entitlementv1.GrantEntitlementResponse_Rejection{Rejection: &entitlementv1.Rejection{
					Reason: entitlementv1.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID}},
			}, nil
		}
		return nil, nil
	}
	options := inOrder()
	options.Duplicate = 1
	file := grantLine(t, "k", rejected, "INVOICE_NOT_PAID") + grantLine(t, "other", newly, "") + grantLine(t, "k", newly, "")
	report := run(t, conn, file, options)
	if got := differences(t, report); got != "" {
		t.Errorf("differing:\n%s", got)
	}
	if want := []string{"k", "k", "other", "k"}; len(a.keys) != 6 || !slices.Equal(a.keys[:4], want) {
		t.Errorf("sent %v, want %v first", a.keys, want)
	}
}
