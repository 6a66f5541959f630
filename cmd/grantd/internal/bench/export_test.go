package bench

import (
	"context"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

var (
	PgbenchScript       = pgbenchScript
	ParseRate           = parseRate
	ReadTransactionLogs = readTransactionLogs
)

// Request makes the grant of that number.
func Request(seed, number uint64) *entitlementv1.GrantEntitlementRequest {
	m := maker{generator: newGenerator(seed)}
	request := newRequest()
	m.fill(request, number)
	return request
}

// ReadOutcomes counts the outcomes in an encoded response, by name.
func ReadOutcomes(message []byte) (map[string]uint64, error) {
	var o outcomes
	err := o.read(message)
	counts := make(map[string]uint64)
	o.add(counts)
	return counts, err
}

func Preload(ctx context.Context, url string, count int) error {
	return preload(ctx, url, count, func(string, ...any) {})
}

// Receiver is a webhook's receiver.
type Receiver struct{ *receiver }

func StartReceiver() (Receiver, error) {
	r, err := startReceiver()
	return Receiver{r}, err
}

func (r Receiver) URL() string     { return r.url }
func (r Receiver) Distinct() int64 { return r.distinct.Load() }
func (r Receiver) Stop()           { r.stop() }
