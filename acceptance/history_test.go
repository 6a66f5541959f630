package acceptance_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/grantd/grantd/gen/entitlement/v1"
)

// The history test lets callers loose on a small world: few keys, so that grants and recordings meet under one key; few invoices and
// types, so that they meet under one effect; and evidence and records of few versions. Every answer must be one that a service
// would give which does one thing after the other.
const (
	worldKeys     = 8
	worldInvoices = 3
	worldTypes    = 2
	worldVersions = 5
)

// step is one request, by the numbers of its parts.
type step struct {
	tenant                 string
	kind                   pb.OperationKind // UNSPECIFIED: a look-up of the key
	key, invoice, typeName int
	seats                  int
	state                  pb.InvoiceState
	version                int64
}

// reply is what a step was told. The zero reply is none: it may have happened, at any time.
type reply struct {
	outcome pb.Outcome
	by      pb.MatchedBy
	reason  pb.RejectionReason
	// owner is the key of the operation that the answer names, and invoice, type and seats are those of its stored result.
	owner                    string
	invoice, typeName, seats string
	// current is the entitlement's state now, and version its last entry; of a recording, the invoice's.
	current int32
	version int64
}

// world is what a service knows of one tenant. It is a value: a step returns another.
type world struct {
	keys         [worldKeys]knownKey
	entitlements [worldInvoices][worldTypes]heldEntitlement
	invoices     [worldInvoices]knownInvoice
}

type knownKey struct {
	// payload is the step with nothing in it but what is compared; its kind is UNSPECIFIED while the key is free.
	payload step
	// owner is the key whose effect this one stands for, and ownerKind that operation's.
	owner     int
	ownerKind pb.OperationKind
	// invoice and typeName name the entitlement of a grant.
	invoice, typeName int
}

type heldEntitlement struct {
	owner   int
	seats   int // 0: never granted
	state   pb.EntitlementState
	version int64
}

type knownInvoice struct {
	state   pb.InvoiceState // UNSPECIFIED: no record
	version int64
	owner   int
}

const (
	kindGrant  = pb.OperationKind_OPERATION_KIND_GRANT
	kindRecord = pb.OperationKind_OPERATION_KIND_RECORD_INVOICE_STATE
	// kindGlance is the part of an answer that says how an entitlement is now.
	kindGlance = pb.OperationKind(-1)
)

func (s step) payload() step {
	p := step{kind: s.kind, invoice: s.invoice}
	if s.kind == kindGrant {
		p.typeName, p.seats = s.typeName, s.seats
	} else {
		p.state, p.version = s.state, s.version
	}
	return p
}

func keyName(key int) string { return fmt.Sprintf("K%d", key) }

// next is the service in a dozen rules: what the step is told, and the world after it.
func (w world) next(s step) (reply, world) {
	known := w.keys[s.key]
	if s.kind == kindGlance {
		e := &w.entitlements[s.invoice][s.typeName]
		return reply{current: int32(e.state), version: e.version}, w
	}
	if s.kind == 0 {
		if known.payload.kind == 0 {
			return reply{outcome: notApplied}, w
		}
		return w.stored(already, byKey, known), w
	}
	if known.payload.kind != 0 {
		if known.payload == s.payload() {
			return w.stored(already, byKey, known), w
		}
		return w.conflict(byKey, known.owner), w
	}
	bind := knownKey{payload: s.payload(), owner: s.key, ownerKind: s.kind, invoice: s.invoice, typeName: s.typeName}
	if s.kind == kindRecord {
		return w.record(s, bind)
	}

	e := &w.entitlements[s.invoice][s.typeName]
	if e.seats != 0 {
		if e.seats != s.seats {
			return w.conflict(byBusinessKey, e.owner), w
		}
		bind.owner = e.owner
		w.keys[s.key] = bind
		return w.stored(already, byBusinessKey, bind), w
	}
	if s.state != paid {
		return reply{outcome: rejected, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID}, w
	}
	i := &w.invoices[s.invoice]
	if i.state == 0 || s.version > i.version {
		*i = knownInvoice{s.state, s.version, s.key}
	}
	switch i.state {
	case unpaid:
		return reply{outcome: rejected, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_NOT_PAID}, w
	case voided, refunded:
		return reply{outcome: rejected, reason: pb.RejectionReason_REJECTION_REASON_INVOICE_REVERSED}, w
	}
	*e = heldEntitlement{owner: s.key, seats: s.seats, state: pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE, version: 1}
	w.keys[s.key] = bind
	return w.stored(newly, byNothing, bind), w
}

func (w world) record(s step, bind knownKey) (reply, world) {
	i := &w.invoices[s.invoice]
	switch {
	case i.state != 0 && s.version < i.version:
		return reply{outcome: rejected, reason: pb.RejectionReason_REJECTION_REASON_STALE_VERSION, current: int32(i.state), version: i.version}, w
	case i.state != 0 && s.version == i.version && s.state != i.state:
		r := w.conflict(byBusinessKey, i.owner)
		r.current, r.version = int32(i.state), i.version
		return r, w
	case i.state != 0 && s.version == i.version:
		bind.owner = i.owner
		bind.ownerKind = w.keys[i.owner].ownerKind
		w.keys[s.key] = bind
		r := w.stored(already, byBusinessKey, bind)
		r.current, r.version = int32(i.state), i.version
		return r, w
	}
	*i = knownInvoice{s.state, s.version, s.key}
	if s.state == voided || s.state == refunded {
		for t := range w.entitlements[s.invoice] {
			if e := &w.entitlements[s.invoice][t]; e.state == pb.EntitlementState_ENTITLEMENT_STATE_ACTIVE {
				e.state, e.version = pb.EntitlementState_ENTITLEMENT_STATE_REVERSED, e.version+1
			}
		}
	}
	w.keys[s.key] = bind
	return reply{outcome: newly, owner: keyName(s.key), current: int32(s.state), version: s.version}, w
}

func (w world) conflict(by pb.MatchedBy, owner int) reply {
	return reply{outcome: conflict, by: by, owner: keyName(owner)}
}

// stored is the result that a key stands for.
func (w world) stored(outcome pb.Outcome, by pb.MatchedBy, known knownKey) reply {
	r := reply{outcome: outcome, by: by, owner: keyName(known.owner)}
	if known.payload.kind == kindGrant {
		e := w.entitlements[known.invoice][known.typeName]
		r.invoice, r.typeName, r.seats = invoiceName(known.invoice), typeName(known.typeName), fmt.Sprint(e.seats)
		r.current, r.version = int32(e.state), e.version
	}
	return r
}

func invoiceName(invoice int) string { return fmt.Sprintf("INV-%d", invoice) }
func typeName(t int) string          { return fmt.Sprintf("type%d", t) }

var worldModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		byTenant := make(map[string][]porcupine.Operation)
		for _, op := range history {
			tenant := op.Input.(step).tenant
			byTenant[tenant] = append(byTenant[tenant], op)
		}
		var parts [][]porcupine.Operation
		for _, part := range byTenant {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return world{} },
	Step: func(state, input, output any) (bool, any) {
		want, after := state.(world).next(input.(step))
		got := output.(reply)
		return got == reply{} || got.matches(input.(step), want), after
	},
	DescribeOperation: func(input, output any) string {
		s := input.(step)
		return fmt.Sprintf("%s %v %s %s %s seats=%d %v %d -> %+v", s.tenant, s.kind, keyName(s.key), invoiceName(s.invoice), typeName(s.typeName), s.seats,
			s.state, s.version, output)
	},
}

// matches leaves out what the answer to a replayed recording says of the present, which only a new look at the record would tell, and
// what that to an alias says, which is a step of its own.
func (r reply) matches(s step, want reply) bool {
	if s.kind == kindRecord && r.by == byKey || r.bindsAlias(s) {
		r.current, r.version, want.current, want.version = 0, 0, 0, 0
	}
	return r == want
}

// bindsAlias says whether a grant bound its key to an earlier one's entitlement. The entitlement's present state was read before the
// binding was committed, and a refund may have come between: the two are steps of their own, in either order.
func (r reply) bindsAlias(s step) bool {
	return s.kind == kindGrant && r.outcome == already && r.by == byBusinessKey
}

func TestHistory_IsThatOfOneServiceDoingOneThingAtATime(t *testing.T) {
	t.Parallel()
	one := setup(t)
	replicas := []*bundle{one, serveOn(t, one.url, one.url)}
	rounds := 80
	if soak {
		rounds = 8000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var told, unknown int
	outcomes := map[pb.Outcome]int{}
	for round := range rounds {
		history := playWorld(t, replicas, rand.New(rand.NewPCG(seed, uint64(round))), round)
		for _, op := range history {
			if r := op.Output.(reply); r == (reply{}) {
				unknown++
			} else {
				told++
				outcomes[r.outcome]++
			}
		}
		for _, part := range worldModel.Partition(history) {
			wantOneOrder(t, round, part)
		}
	}
	t.Logf("%d steps: %v, and %d whose caller left", told, outcomes, unknown)
	for _, outcome := range []pb.Outcome{newly, already, conflict, rejected, notApplied} {
		if outcomes[outcome] == 0 {
			t.Errorf("nobody was told %v: the world is too small or too large", outcome)
		}
	}
	if unknown == 0 {
		t.Error("no caller left")
	}
	one.wantWhole(t)
}

// wantOneOrder fails the test where no order of a tenant's steps explains what each of them was told.
func wantOneOrder(t testing.TB, round int, history []porcupine.Operation) {
	t.Helper()
	verdict, info := porcupine.CheckOperationsVerbose(worldModel, history, time.Minute)
	if verdict == porcupine.Ok {
		return
	}
	picture := filepath.Join(t.ArtifactDir(), "history.html")
	if err := porcupine.VisualizePath(worldModel, info, picture); err != nil {
		t.Error(err)
	}
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	var lines []string
	for _, op := range history {
		lines = append(lines, fmt.Sprintf("%3d %9d %9d %s", op.ClientId, op.Call/1000, op.Return/1000, worldModel.DescribeOperation(op.Input, op.Output)))
	}
	t.Fatalf("round %d: %s: no order of these steps explains their answers (caller, microseconds from and to, step):\n%s",
		round, verdict, strings.Join(lines, "\n"))
}

// playWorld runs some callers for some steps each, on tenants of their own.
func playWorld(t testing.TB, replicas []*bundle, random *rand.Rand, round int) []porcupine.Operation {
	const callers, steps = 8, 7
	scripts := make([][]step, callers)
	for c := range scripts {
		for range steps {
			s := step{
				tenant: fmt.Sprintf("t%d-%d", round, random.IntN(2)), key: random.IntN(worldKeys), invoice: random.IntN(worldInvoices),
				typeName: random.IntN(worldTypes), seats: 1 + random.IntN(2), version: int64(random.IntN(worldVersions)), state: paid,
			}
			switch random.IntN(10) {
			case 0, 1:
				s.kind, s.version, s.state = kindRecord, s.version+1, pb.InvoiceState(1+random.IntN(4))
			case 2, 3:
				// a look-up
			case 4:
				s.kind, s.state = kindGrant, unpaid
			default:
				s.kind = kindGrant
			}
			scripts[c] = append(scripts[c], s)
		}
	}
	var mu sync.Mutex
	var history []porcupine.Operation
	began := time.Now()
	var running sync.WaitGroup
	for c, script := range scripts {
		patience := make([]time.Duration, len(script))
		for i := range patience {
			patience[i] = time.Minute
			if random.IntN(8) == 0 {
				patience[i] = time.Duration(1+random.IntN(3000)) * time.Microsecond
			}
		}
		running.Go(func() {
			for i, s := range script {
				ctx, cancel := context.WithTimeout(t.Context(), patience[i])
				op := porcupine.Operation{ClientId: c, Input: s, Call: time.Since(began).Nanoseconds()}
				r, err := replicas[(c+i)%len(replicas)].play(ctx, s)
				op.Return = time.Since(began).Nanoseconds()
				cancel()
				if err != nil {
					if code := status.Code(err); code != codes.DeadlineExceeded {
						t.Errorf("round %d, %+v: %v", round, s, err)
					}
					if s.kind == 0 {
						continue
					}
					// It may happen at any time from now on, or never: which is the same as after everything else.
					op.Return = int64(time.Hour)
					// One caller has one step under way, in the history too.
					op.ClientId = callers + c*steps + i
				}
				op.Output = r
				mu.Lock()
				history = append(history, op)
				if r.bindsAlias(s) {
					glance := op
					glance.ClientId = callers + c*steps + i
					glance.Input = step{tenant: s.tenant, kind: kindGlance, invoice: s.invoice, typeName: s.typeName}
					glance.Output = reply{current: r.current, version: r.version}
					history = append(history, glance)
				}
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return history
}

// play sends a step. The reply is zero where there is none.
func (b *bundle) play(ctx context.Context, s step) (reply, error) {
	switch s.kind {
	case kindGrant:
		resp, err := b.GrantEntitlement(ctx, grant(s.tenant, keyName(s.key), invoiceName(s.invoice), ofType(typeName(s.typeName)),
			seats(fmt.Sprint(s.seats)), evidence(s.state, s.version)))
		if err != nil {
			return reply{}, err
		}
		g := resp.GetEntitlement().GetGrant()
		return reply{
			outcome: resp.GetOutcome(), by: resp.GetMatchedBy(), reason: resp.GetRejection().GetReason(),
			owner:   resp.GetOperation().GetIdempotencyKey() + resp.GetConflict().GetStoredOperation().GetIdempotencyKey(),
			invoice: g.GetInvoiceId(), typeName: g.GetEntitlementType(), seats: g.GetScope()["seats"],
			current: int32(resp.GetCurrentState()), version: resp.GetCurrentVersion(),
		}, nil
	case kindRecord:
		resp, err := b.RecordInvoiceState(ctx, &pb.RecordInvoiceStateRequest{
			IdempotencyKey: keyName(s.key), TenantId: s.tenant, InvoiceId: invoiceName(s.invoice), State: s.state, Version: s.version,
		})
		if err != nil {
			return reply{}, err
		}
		return reply{
			outcome: resp.GetOutcome(), by: resp.GetMatchedBy(), reason: resp.GetRejection().GetReason(),
			owner:   resp.GetOperation().GetIdempotencyKey() + resp.GetConflict().GetStoredOperation().GetIdempotencyKey(),
			current: int32(resp.GetCurrentState()), version: resp.GetCurrentVersion(),
		}, nil
	default:
		resp, err := b.GetOperation(ctx, byName(s.tenant, keyName(s.key), 0))
		if err != nil {
			return reply{}, err
		}
		g := resp.GetEntitlement().GetGrant()
		return reply{
			outcome: resp.GetOutcome(), by: resp.GetMatchedBy(), owner: resp.GetOperation().GetIdempotencyKey(),
			invoice: g.GetInvoiceId(), typeName: g.GetEntitlementType(), seats: g.GetScope()["seats"],
			current: int32(resp.GetCurrentState()), version: resp.GetCurrentVersion(),
		}, nil
	}
}
