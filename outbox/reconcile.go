package outbox

import (
	"context"
	"time"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

const (
	// askAgain is the pause before the same delivery is asked about again, and askPoll that between two looks for such deliveries.
	askAgain = 30 * time.Second
	askPoll  = 2 * time.Second

	askActor      = "grantd"
	reasonArrived = "the look-up says that it arrived"
	reasonMissing = "the look-up says that it did not arrive"
)

// reconcile asks the destination about deliveries whose fate is unknown, and resolves those that it knows.
func (w *worker) reconcile(ctx context.Context, a asker) {
	ticker := time.NewTicker(askPoll)
	defer ticker.Stop()
	for {
		w.lookUp(ctx, a)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// lookUp asks one by one, and no more where the destination does not want to be called.
func (w *worker) lookUp(ctx context.Context, a asker) {
	if w.breaker.current() == paused {
		return
	}
	unknown, err := w.takeUnknown(ctx)
	if err != nil && ctx.Err() == nil {
		w.log.Warn("deliveries of unknown fate cannot be looked up", "error", err)
	}
	for _, d := range unknown {
		if ctx.Err() != nil || w.breaker.current() == paused {
			return
		}
		w.askAbout(ctx, a, d)
	}
}

func (w *worker) takeUnknown(ctx context.Context) (unknown []*store.Delivery, err error) {
	defer caught(w.log, "a look for deliveries of unknown fate", "", &err)
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	return w.config.Store.TakeUnknown(ctx, w.destination.Name, askAgain, w.destination.Concurrency)
}

func (w *worker) ask(ctx context.Context, a asker, d *store.Delivery) (arrived bool, err error) {
	defer caught(w.log, "a look-up", d.Key, &err)
	ctx, cancel := context.WithTimeout(ctx, w.destination.Deadline)
	defer cancel()
	return a.ask(ctx, d)
}

func (w *worker) askAbout(ctx context.Context, a asker, d *store.Delivery) {
	ctx = originContext(ctx, d)
	arrived, err := w.ask(ctx, a, d)
	if err != nil {
		w.log.WarnContext(ctx, "a look-up gave no answer", "delivery_key", d.Key, "error", sanitise(err.Error()))
		return
	}
	resolution, reason := entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN, reasonMissing
	if arrived {
		resolution, reason = entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED, reasonArrived
	}
	if err := w.resolve(ctx, d, resolution, reason); err != nil {
		w.log.WarnContext(ctx, "what a look-up found cannot be recorded", "delivery_key", d.Key, "error", err)
	}
}

// resolve has a time of its own: an answer that took long must not be lost.
func (w *worker) resolve(ctx context.Context, d *store.Delivery, to entitlementv1.DeliveryResolution, reason string) (err error) {
	defer caught(w.log, "a resolution", d.Key, &err)
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	_, err = w.config.Store.Resolve(ctx, store.DeliveryOrder{
		TenantID: d.TenantID, Delivery: store.DeliveryName{ID: d.ID}, ObservedAttempts: d.Attempts, Actor: askActor, Reason: reason,
	}, to)
	return err
}
