package outbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/grantd/grantd/store"
)

// settlement is what came of recording results.
type settlement struct {
	// recorded are on record, but for the lost ones among them; refused are those that the database would not take, each by itself;
	// failed are those about which it gave no answer. err says why there are refused or failed ones.
	recorded, refused, failed []store.DeliveryResult
	lost                      []*store.Delivery
	err                       error
}

// settle records what came of the attempts that have ended, and returns how long to wait if nothing else happens. What cannot be
// recorded is tried again, until its lease has run out and somebody else has it.
func (w *worker) settle(ctx context.Context) time.Duration {
	if w.settling || len(w.unsettled) == 0 {
		return idlePoll
	}
	now := time.Now()
	if wait := w.settleFrom.Sub(now); wait > 0 && (w.failing || w.room() > 0) {
		return wait
	}
	w.settleFrom = now.Add(settleEvery)
	results := w.unsettled
	w.settling, w.unsettled = true, nil
	go func() {
		// A result that is here must be recorded, also when the process is told to stop.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
		defer cancel()
		w.settlements <- w.record(ctx, results)
	}()
	return idlePoll
}

// record settles results together. Where the database refuses one of them, the others must not share its fate: it settles the halves, and
// their halves.
func (w *worker) record(ctx context.Context, results []store.DeliveryResult) settlement {
	lost, err := w.recordTogether(ctx, results)
	switch {
	case err == nil:
		return settlement{recorded: results, lost: lost}
	case !isRefusal(err):
		return settlement{failed: results, err: err}
	case len(results) == 1:
		return settlement{refused: results, err: err}
	}
	a, b := w.record(ctx, results[:len(results)/2]), w.record(ctx, results[len(results)/2:])
	return settlement{
		recorded: slices.Concat(a.recorded, b.recorded), refused: slices.Concat(a.refused, b.refused), failed: slices.Concat(a.failed, b.failed),
		lost: slices.Concat(a.lost, b.lost), err: errors.Join(a.err, b.err),
	}
}

func (w *worker) recordTogether(ctx context.Context, results []store.DeliveryResult) (lost []*store.Delivery, err error) {
	defer caught(w.log, "a settlement", "", &err)
	return w.config.Store.Settle(ctx, results)
}

// isRefusal says of an error that the database answered: it is there, and will say the same again.
func isRefusal(err error) bool {
	var failure *store.Failure
	return !errors.As(err, &failure) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

func (w *worker) settled(s settlement) {
	w.settling = false
	ctx := context.Background()
	for _, d := range s.lost {
		if slices.ContainsFunc(s.recorded, func(r store.DeliveryResult) bool { return r.Delivery == d && r.Error == reasonUnsent }) {
			// Nobody was called: there is nothing to be lost.
			continue
		}
		w.meters.resultLost(w.label, causeLate, 1)
		w.log.WarnContext(originContext(ctx, d), "a result came after its lease had run out, and was dropped", "delivery_key", d.Key, "attempt", d.Attempts)
	}
	done, again := s.recorded, s.failed
	for _, r := range s.refused {
		// Where everything is refused, it may be for the set-up, and somebody mends it.
		if len(s.recorded) == 0 && time.Now().Before(*r.Delivery.LeaseUntil) {
			again = append(again, r)
			continue
		}
		w.meters.resultLost(w.label, causeRefused, 1)
		w.log.ErrorContext(originContext(ctx, r.Delivery), "the database refuses a result, which is dropped: its lease runs out",
			"tenant_id", r.Delivery.TenantID, "delivery_key", r.Delivery.Key, "attempt", r.Delivery.Attempts, "error", s.err)
		done = append(done, r)
	}
	w.held -= len(done)
	w.unsettled = append(again, w.unsettled...)
	if slices.ContainsFunc(done, func(r store.DeliveryResult) bool { return r.Pauses }) {
		w.breaker.recorded()
	}
	if len(again) > 0 {
		w.settleFrom = time.Now().Add(w.stumbled(ctx, "results of deliveries cannot be recorded", s.err))
		return
	}
	w.failing = false
	w.stir()
}
