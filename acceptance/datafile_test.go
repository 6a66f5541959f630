package acceptance_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// dataLine is one request as a billing system sends it, with the answer that it must get in the order of the file.
type dataLine struct {
	number  int
	request *pb.GrantEntitlementRequest
	expect  string
}

// readDataFile reads the invoice-paid events of a billing system: replays, events delivered late, twice and under two keys, keys used
// for something else, and invoices that are paid only later.
func readDataFile(t testing.TB) []dataLine {
	t.Helper()
	file, err := os.Open("testdata/invoice-paid.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	var lines []dataLine
	scanner := bufio.NewScanner(unzipped)
	for scanner.Scan() {
		var raw struct {
			Method  string
			Request json.RawMessage
			Expect  struct{ Outcome, Detail string }
		}
		if err := json.Unmarshal(scanner.Bytes(), &raw); err != nil {
			t.Fatal(err)
		}
		if raw.Method != "GrantEntitlement" || raw.Expect.Outcome == "" {
			t.Fatalf("line %d: %s", len(lines)+1, scanner.Text())
		}
		line := dataLine{number: len(lines) + 1, request: &pb.GrantEntitlementRequest{}}
		if err := protojson.Unmarshal(raw.Request, line.request); err != nil {
			t.Fatalf("line %d: %v", line.number, err)
		}
		if raw.Expect.Detail == "" {
			raw.Expect.Detail = "UNSPECIFIED"
		}
		line.expect = strings.TrimPrefix(raw.Expect.Outcome, "OUTCOME_") + " " + raw.Expect.Detail
		lines = append(lines, line)
	}
	if err := scanner.Err(); err != nil {
		t.Fatal(err)
	}
	if len(lines) != 3067 {
		t.Fatalf("%d lines", len(lines))
	}
	return lines
}

const dataFileEntitlements = 2191

// wantDataFileApplied checks what the database holds after all lines, in whatever order they came.
func (b *bundle) wantDataFileApplied(t testing.TB) {
	t.Helper()
	for what, test := range map[string]struct {
		sql  string
		want int
	}{
		"entitlements":               {`SELECT count(*) FROM entitlements`, dataFileEntitlements},
		"operations that own one":    {`SELECT count(*) FROM operations WHERE owner_key IS NULL`, dataFileEntitlements},
		"keys with two operations":   {`SELECT count(*) - count(DISTINCT (tenant_id, idempotency_key)) FROM operations`, 0},
		"business keys":              {`SELECT count(DISTINCT (tenant_id, invoice_id, entitlement_type, operation_version)) FROM entitlements`, dataFileEntitlements},
		"ledger entries":             {`SELECT count(*) FROM entries`, dataFileEntitlements},
		"attempts that granted":      {`SELECT count(*) FROM attempts WHERE outcome = 1`, dataFileEntitlements},
		"attempts":                   {`SELECT count(*) FROM attempts`, 3067},
		"attempts without an answer": {`SELECT count(*) FROM attempts WHERE outcome NOT BETWEEN 1 AND 4`, 0},
	} {
		if got := value[int](t, b, test.sql); got != test.want {
			t.Errorf("%d %s, want %d", got, what, test.want)
		}
	}
	b.wantWhole(t)
}

// One by one, each line gets exactly the answer that it must.
func TestDataFile_InOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	wrong := 0
	for _, line := range readDataFile(t) {
		resp, err := b.GrantEntitlement(t.Context(), line.request)
		if err != nil {
			t.Fatalf("line %d: %v", line.number, err)
		}
		wantShape(t, resp)
		if got := answers([]*pb.GrantEntitlementResponse{resp})[0]; got != line.expect {
			t.Errorf("line %d: %s, want %s", line.number, got, line.expect)
			if wrong++; wrong > 10 {
				t.FailNow()
			}
		}
	}
	b.wantDataFileApplied(t)
}

// In batches, position decides: the same answers.
func TestDataFile_InBatches(t *testing.T) {
	t.Parallel()
	b := setup(t)
	lines := readDataFile(t)
	for len(lines) > 0 {
		n := min(1000, len(lines))
		var requests []*pb.GrantEntitlementRequest
		var want []string
		for _, line := range lines[:n] {
			requests = append(requests, line.request)
			want = append(want, line.expect)
		}
		wantSame(t, fmt.Sprintf("the answers from line %d on", lines[0].number), answers(b.batch(t, requests...)), want)
		lines = lines[n:]
	}
	b.wantDataFileApplied(t)
}

// Delivered in any order by many workers at once, other events win here and there, but what is granted in the end is the same: as
// many entitlements, one operation for each key, none granted twice.
func TestDataFile_Shuffled(t *testing.T) {
	t.Parallel()
	lines := readDataFile(t)
	seeds := 3
	if soak {
		seeds = 100
	}
	for range seeds {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			b := setup(t)
			shuffled := append([]dataLine(nil), lines...)
			rand.New(rand.NewPCG(seed, 0)).Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
			work := make(chan dataLine)
			var workers sync.WaitGroup
			for range 16 {
				workers.Go(func() {
					for line := range work {
						resp, err := b.GrantEntitlement(t.Context(), line.request)
						if err != nil {
							t.Errorf("line %d: %v", line.number, err)
							continue
						}
						wantShape(t, resp)
						if resp.GetOutcome() == rejected && line.request.GetInvoice().GetState() == paid {
							t.Errorf("line %d: %s", line.number, told(resp))
						}
					}
				})
			}
			for _, line := range shuffled {
				work <- line
			}
			close(work)
			workers.Wait()
			b.wantDataFileApplied(t)
		})
	}
}
