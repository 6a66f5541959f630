package bench

import (
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// tenantCount is how many accounts the grants are spread over, here, in pgbench's statement and in what is loaded before.
const tenantCount = 5000

// generator makes grants as a billing system sends them. A grant is a function of the seed and its number alone, so a replay
// needs nothing kept: the same number makes the same request.
type generator struct {
	seed    uint64
	tenants []string
	expiry  []*timestamppb.Timestamp
}

func newGenerator(seed uint64) *generator {
	g := &generator{seed: seed}
	random := rand.NewPCG(seed, 0)
	for range tenantCount {
		g.tenants = append(g.tenants, string(appendRandom([]byte("cus_"), random, 14)))
	}
	nextYear := time.Now().UTC().Year() + 1
	for month := range 12 {
		g.expiry = append(g.expiry, timestamppb.New(time.Date(nextYear, time.Month(month+1), 1, 0, 0, 0, 0, time.UTC)))
	}
	return g
}

var (
	types   = [...]string{"team_access", "priority_support", "api_credits", "sso", "audit_log"}
	regions = [...]string{"eu", "us", "ap"}
	plans   = [...]string{"free", "pro", "scale"}
)

// maker owns requests and fills them anew, so that a caller's loop hardly allocates.
type maker struct {
	generator *generator
	random    rand.PCG
	text      []byte
}

func newRequest() *entitlementv1.GrantEntitlementRequest {
	return &entitlementv1.GrantEntitlementRequest{
		Grant:   &entitlementv1.Grant{Scope: make(map[string]string)},
		Invoice: &entitlementv1.InvoiceEvidence{State: entitlementv1.InvoiceState_INVOICE_STATE_PAID},
		Source:  "stripe",
	}
}

// fill turns the request into the grant of that number.
func (m *maker) fill(request *entitlementv1.GrantEntitlementRequest, number uint64) {
	m.random.Seed(m.generator.seed, number+1)
	draw := m.random.Uint64()
	pick := func(n uint64) uint64 {
		picked := draw % n
		draw /= n
		return picked
	}

	grant := request.Grant
	grant.TenantId = m.generator.tenants[pick(tenantCount)]
	grant.EntitlementType = types[pick(uint64(len(types)))]
	const prefix, invoiceLength = "billing:grant:", len("in_") + 20
	m.text = append(m.text[:0], prefix+"in_"...)
	m.text = appendRandom(m.text, &m.random, 20)
	m.text = append(m.text, ':')
	m.text = append(m.text, grant.EntitlementType...)
	request.IdempotencyKey = string(m.text)
	grant.InvoiceId = request.IdempotencyKey[len(prefix) : len(prefix)+invoiceLength]
	m.text = appendRandom(append(m.text[:0], "evt_"...), &m.random, 14)
	request.EventId = string(m.text)
	request.Invoice.Version = int64(1 + pick(9))

	clear(grant.Scope)
	if pick(2) == 0 {
		grant.Scope["seats.max"] = strconv.Itoa(int(1 + pick(500)))
	}
	if pick(2) == 0 {
		grant.Scope["region"] = regions[pick(uint64(len(regions)))]
	}
	if pick(2) == 0 {
		grant.Scope["plan"] = plans[pick(uint64(len(plans)))]
	}
	grant.Quantity, grant.ExpiresAt = nil, nil
	if pick(2) == 0 {
		quantity := int64(1 + pick(100))
		grant.Quantity = &quantity
	}
	if pick(2) == 0 {
		grant.ExpiresAt = m.generator.expiry[pick(12)]
	}
}

const alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// appendRandom takes ten letters out of each number: 62^10 fits into 64 bits.
func appendRandom(text []byte, random *rand.PCG, length int) []byte {
	var number uint64
	for i := range length {
		if i%10 == 0 {
			number = random.Uint64()
		}
		text = append(text, alphabet[number%uint64(len(alphabet))])
		number /= uint64(len(alphabet))
	}
	return text
}
