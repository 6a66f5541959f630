package outbox

import (
	"context"

	"github.com/grantd/grantd/store"
)

// Ask asks the destination whether the delivery arrived.
func (k *Kind) Ask(ctx context.Context, d *store.Delivery) (arrived bool, err error) {
	return k.sender.(asker).ask(originContext(ctx, d), d)
}
