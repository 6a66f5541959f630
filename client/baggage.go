package client

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/grpc/metadata"
)

const (
	keyMember     = "entitlement.idempotency_key"
	baggageHeader = "baggage"
	// W3C's limits of what a receiver must take. Beyond them receivers drop members, or all of them.
	maxBaggageMembers = 64
	maxBaggageBytes   = 8192
)

// withKey returns a context that carries the key to whatever makes spans or headers from it. Nothing that is wrong with the
// baggage fails a call: the request's field is the authority, and the server sets the member from it.
func withKey(ctx context.Context, key string) context.Context {
	if key == "" {
		return ctx
	}
	ctx = baggage.ContextWithBaggage(ctx, setKey(baggage.FromContext(ctx), key))

	md, _ := metadata.FromOutgoingContext(ctx)
	if md == nil {
		md = metadata.MD{}
	}
	carrier := propagation.MapCarrier{}
	otel.GetTextMapPropagator().Inject(ctx, carrier)
	for name, value := range carrier {
		md.Set(name, value)
	}
	// Without a propagator for baggage, the key goes alone: what else is in the context was not meant to leave the process. A
	// header that the application wrote itself is kept.
	if header, err := baggage.Parse(strings.Join(md.Get(baggageHeader), ",")); err == nil {
		if header = setKey(header, key); header.Len() > 0 {
			md.Set(baggageHeader, header.String())
		} else {
			md.Delete(baggageHeader)
		}
	}
	return metadata.NewOutgoingContext(ctx, md)
}

// setKey sets the member. Where it does not fit, the application's own members stay, and the key of another call, if it is
// among them, goes.
func setKey(bag baggage.Baggage, key string) baggage.Baggage {
	member, err := baggage.NewMemberRaw(keyMember, key)
	if err == nil {
		with, err := bag.SetMember(member)
		if err == nil && with.Len() <= maxBaggageMembers && len(with.String()) <= maxBaggageBytes {
			return with
		}
	}
	return bag.DeleteMember(keyMember)
}
