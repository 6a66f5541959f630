package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/grantd/grantd/client"
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// deliveriesCmd is `grantd deliveries`.
type deliveriesCmd struct {
	List      deliveriesListCmd      `cmd:"" help:"List a tenant's deliveries."`
	Show      deliveriesShowCmd      `cmd:"" help:"Show a delivery with its attempts and what operators did."`
	Redeliver deliveriesRedeliverCmd `cmd:"" help:"Send a DEAD delivery again, with its key and its body."`
	Discard   deliveriesDiscardCmd   `cmd:"" help:"Give a delivery up for good. Later entries of its entitlement go on."`
	Resolve   deliveriesResolveCmd   `cmd:"" help:"Say what became of an UNKNOWN delivery."`
	Resume    deliveriesResumeCmd    `cmd:"" help:"Call a destination again that was paused since it answered 410 Gone."`
}

// operator is what every command on a tenant's deliveries needs.
type operator struct {
	operatorService `embed:""`
	Tenant          string `required:"" help:"The tenant." env:"GRANTD_DELIVERIES_TENANT"`
}

func (o *operator) followUps(io stdio) *followUps {
	return newFollowUps(io, &o.Target, o.Tenant)
}

// operatorService is how every command here reaches a server, and how it prints what that says.
type operatorService struct {
	Target  target        `embed:""`
	JSON    bool          `name:"json" help:"Print the server's answer as JSON." env:"GRANTD_DELIVERIES_JSON"`
	Timeout time.Duration `help:"Longest time for all of it." default:"30s" env:"GRANTD_DELIVERIES_TIMEOUT"`
}

// call connects and gives call the service.
func (o *operatorService) call(ctx context.Context, call func(context.Context, entitlementv1.OperatorServiceClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	conn, err := o.Target.dial(ctx, grpc.WithDefaultServiceConfig(client.ServiceConfig()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return call(ctx, entitlementv1.NewOperatorServiceClient(conn))
}

// deliveriesListCmd is `grantd deliveries list`.
type deliveriesListCmd struct {
	operator    `embed:""`
	Destination string        `help:"Only to this destination." env:"GRANTD_DELIVERIES_DESTINATION"`
	State       deliveryState `help:"Only in this state: pending, sending, unknown, delivered, dead or discarded." env:"GRANTD_DELIVERIES_STATE"`
	Limit       int           `help:"How many at most." default:"100" env:"GRANTD_DELIVERIES_LIMIT"`
}

// deliveryState is a state of the contract, which people may write in any case and without the enum's prefix. The zero value is every state.
type deliveryState entitlementv1.DeliveryState

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *deliveryState) UnmarshalText(text []byte) error {
	name := strings.TrimPrefix(strings.ToUpper(string(text)), statePrefix)
	value, known := entitlementv1.DeliveryState_value[statePrefix+name]
	if !known && name != "" {
		return errors.New("must be one of pending, sending, unknown, delivered, dead, discarded")
	}
	*s = deliveryState(value)
	return nil
}

// maxPageSize is the contract's.
const maxPageSize = 1000

func (c *deliveriesListCmd) run(ctx context.Context, io stdio) error {
	if c.Limit < 1 {
		return errors.New("--limit must be positive")
	}
	request := &entitlementv1.ListDeliveriesRequest{TenantId: c.Tenant, Destination: c.Destination, State: entitlementv1.DeliveryState(c.State)}
	list := &entitlementv1.ListDeliveriesResponse{}
	err := c.call(ctx, func(ctx context.Context, service entitlementv1.OperatorServiceClient) error {
		statuses := make(map[string]bool)
		for {
			request.PageSize = int32(min(c.Limit-len(list.GetDeliveries()), maxPageSize))
			page, err := service.ListDeliveries(ctx, request)
			if err != nil {
				return err
			}
			list.Deliveries = append(list.Deliveries, page.GetDeliveries()...)
			for _, s := range page.GetDestinations() {
				if !statuses[s.GetDestination()] {
					statuses[s.GetDestination()] = true
					list.Destinations = append(list.Destinations, s)
				}
			}
			request.PageToken, list.NextPageToken = page.GetNextPageToken(), page.GetNextPageToken()
			if list.GetNextPageToken() == "" || len(list.GetDeliveries()) >= c.Limit {
				return nil
			}
		}
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeMessage(io.stdout, list)
	}
	return writeDeliveries(io, c.followUps(io), list)
}

// deliveryName names a delivery on the command line, in the form that tells which name it is.
type deliveryName struct {
	Delivery string `arg:"" help:"The delivery: its id, its key (what the destination got as Idempotency-Key), or ENTITLEMENT/ENTRY/DESTINATION."`
}

const (
	uuidCharacters = 36
	keyCharacters  = 64
)

// request is the request that names the delivery, and nothing more. The server judges the parts.
func (n deliveryName) request(tenant string) (*entitlementv1.GetDeliveryRequest, error) {
	r := &entitlementv1.GetDeliveryRequest{TenantId: tenant}
	parts := strings.Split(n.Delivery, "/")
	switch {
	case len(parts) == 3:
		entry, err := strconv.ParseInt(parts[1], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: the entry must be a number", n.Delivery)
		}
		r.Name = &entitlementv1.GetDeliveryRequest_Reference{Reference: &entitlementv1.DeliveryReference{
			EntitlementId: parts[0], EntryNumber: entry, Destination: parts[2],
		}}
	case len(n.Delivery) == keyCharacters:
		r.Name = &entitlementv1.GetDeliveryRequest_DeliveryKey{DeliveryKey: n.Delivery}
	case len(n.Delivery) == uuidCharacters:
		r.Name = &entitlementv1.GetDeliveryRequest_DeliveryId{DeliveryId: n.Delivery}
	default:
		return nil, fmt.Errorf("%q names no delivery: give its id, its key of 64 digits or ENTITLEMENT/ENTRY/DESTINATION", n.Delivery)
	}
	return r, nil
}

// deliveriesShowCmd is `grantd deliveries show`.
type deliveriesShowCmd struct {
	operator     `embed:""`
	deliveryName `embed:""`
}

func (c *deliveriesShowCmd) run(ctx context.Context, io stdio) error {
	request, err := c.request(c.Tenant)
	if err != nil {
		return err
	}
	var found *entitlementv1.GetDeliveryResponse
	var beside *entitlementv1.ListDeliveriesResponse
	err = c.call(ctx, func(ctx context.Context, service entitlementv1.OperatorServiceClient) (err error) {
		if found, err = service.GetDelivery(ctx, request); err == nil && !c.JSON {
			// Any page has the pauses that hold.
			beside, err = service.ListDeliveries(ctx, &entitlementv1.ListDeliveriesRequest{TenantId: c.Tenant, PageSize: 1})
		}
		return err
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeMessage(io.stdout, found)
	}
	return writeStory(io, c.followUps(io), found.GetStory(), beside.GetDestinations())
}

// order is what the commands that change a delivery have in common.
type order struct {
	operator     `embed:""`
	deliveryName `embed:""`
	statement    `embed:""`
}

// statement is who does something, and why.
type statement struct {
	Actor  string `help:"Who does it." default:"${operator}" env:"GRANTD_DELIVERIES_ACTOR"`
	Reason string `required:"" help:"Why." env:"GRANTD_DELIVERIES_REASON"`
}

// check refuses what would be kept for ever and tells nobody anything.
func (s statement) check() error {
	switch {
	case s.Actor == "":
		return errors.New("--actor is required where the variable USER is not set")
	case s.Actor == actorToSay:
		return errors.New("--actor: say who does it in place of " + actorToSay)
	case s.Reason == reasonToSay:
		return errors.New("--reason: say why in place of " + reasonToSay)
	}
	return nil
}

// operatorOf is user@host, or empty where the environment does not say who the user is.
func operatorOf(env []string) string {
	for _, e := range env {
		if user, ok := strings.CutPrefix(e, "USER="); ok && user != "" {
			host, err := os.Hostname()
			if err != nil {
				host = "localhost"
			}
			return user + "@" + host
		}
	}
	return ""
}

// answered is what the answers to all orders have in common.
type answered interface {
	proto.Message
	GetOutcome() entitlementv1.Outcome
	GetDelivery() *entitlementv1.Delivery
	GetRejection() *entitlementv1.Rejection
}

// send finds the delivery's name, has send make the call, and prints its answer. A rejection is an error.
func (c *order) send(ctx context.Context, io stdio, send func(context.Context, entitlementv1.OperatorServiceClient, *entitlementv1.GetDeliveryRequest) (answered, error)) error {
	if err := c.check(); err != nil {
		return err
	}
	name, err := c.request(c.Tenant)
	if err != nil {
		return err
	}
	var answer answered
	err = c.call(ctx, func(ctx context.Context, service entitlementv1.OperatorServiceClient) (err error) {
		answer, err = send(ctx, service, name)
		return err
	})
	if err != nil {
		return err
	}
	if c.JSON {
		err = writeMessage(io.stdout, answer)
	} else if answer.GetDelivery() != nil {
		err = writeOrder(io, answer)
	}
	if r := answer.GetRejection(); r != nil {
		err = errors.Join(err, fmt.Errorf("%s: %s", plain(r.GetReason(), "REJECTION_REASON_"), r.GetMessage()))
	}
	return err
}

// observation is how often the operator saw a delivery attempted, which keeps a late repeat of an order from sending it once more.
type observation struct {
	ObservedAttempts int64 `help:"Do it only if there were just as many attempts; 0: as there are now. To repeat a command that got no answer, give the number that it printed." default:"0" env:"GRANTD_DELIVERIES_OBSERVED_ATTEMPTS"`
}

// look returns the number of attempts that an order names.
func (o observation) look(ctx context.Context, service entitlementv1.OperatorServiceClient, name *entitlementv1.GetDeliveryRequest, io stdio) (int64, error) {
	if o.ObservedAttempts != 0 {
		return o.ObservedAttempts, nil
	}
	found, err := service.GetDelivery(ctx, name)
	if status.Code(err) == codes.NotFound && name.GetReference() != nil {
		// The order's answer says whether it was removed.
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	attempts := found.GetStory().GetDelivery().GetAttempts()
	fmt.Fprintf(io.stderr, "observed attempts: %d\n", attempts)
	return attempts, nil
}

// deliveriesRedeliverCmd is `grantd deliveries redeliver`.
type deliveriesRedeliverCmd struct {
	order       `embed:""`
	observation `embed:""`
}

func (c *deliveriesRedeliverCmd) run(ctx context.Context, io stdio) error {
	return c.send(ctx, io, func(ctx context.Context, service entitlementv1.OperatorServiceClient, name *entitlementv1.GetDeliveryRequest) (answered, error) {
		observed, err := c.look(ctx, service, name, io)
		if err != nil {
			return nil, err
		}
		r := &entitlementv1.RedeliverDeliveryRequest{TenantId: c.Tenant, ObservedAttempts: observed, Actor: c.Actor, Reason: c.Reason}
		switch n := name.GetName().(type) {
		case *entitlementv1.GetDeliveryRequest_DeliveryId:
			r.Name = &entitlementv1.RedeliverDeliveryRequest_DeliveryId{DeliveryId: n.DeliveryId}
		case *entitlementv1.GetDeliveryRequest_DeliveryKey:
			r.Name = &entitlementv1.RedeliverDeliveryRequest_DeliveryKey{DeliveryKey: n.DeliveryKey}
		case *entitlementv1.GetDeliveryRequest_Reference:
			r.Name = &entitlementv1.RedeliverDeliveryRequest_Reference{Reference: n.Reference}
		}
		return service.RedeliverDelivery(ctx, r)
	})
}

// deliveriesDiscardCmd is `grantd deliveries discard`.
type deliveriesDiscardCmd struct {
	order `embed:""`
}

func (c *deliveriesDiscardCmd) run(ctx context.Context, io stdio) error {
	return c.send(ctx, io, func(ctx context.Context, service entitlementv1.OperatorServiceClient, name *entitlementv1.GetDeliveryRequest) (answered, error) {
		r := &entitlementv1.DiscardDeliveryRequest{TenantId: c.Tenant, Actor: c.Actor, Reason: c.Reason}
		switch n := name.GetName().(type) {
		case *entitlementv1.GetDeliveryRequest_DeliveryId:
			r.Name = &entitlementv1.DiscardDeliveryRequest_DeliveryId{DeliveryId: n.DeliveryId}
		case *entitlementv1.GetDeliveryRequest_DeliveryKey:
			r.Name = &entitlementv1.DiscardDeliveryRequest_DeliveryKey{DeliveryKey: n.DeliveryKey}
		case *entitlementv1.GetDeliveryRequest_Reference:
			r.Name = &entitlementv1.DiscardDeliveryRequest_Reference{Reference: n.Reference}
		}
		return service.DiscardDelivery(ctx, r)
	})
}

// deliveriesResolveCmd is `grantd deliveries resolve`.
type deliveriesResolveCmd struct {
	order       `embed:""`
	observation `embed:""`
	As          string `required:"" enum:"delivered,send-again" help:"What was found out: delivered, or send-again where it had not arrived." env:"GRANTD_DELIVERIES_AS"`
}

func (c *deliveriesResolveCmd) run(ctx context.Context, io stdio) error {
	return c.send(ctx, io, func(ctx context.Context, service entitlementv1.OperatorServiceClient, name *entitlementv1.GetDeliveryRequest) (answered, error) {
		observed, err := c.look(ctx, service, name, io)
		if err != nil {
			return nil, err
		}
		r := &entitlementv1.ResolveDeliveryRequest{
			TenantId: c.Tenant, Resolution: entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_SEND_AGAIN,
			ObservedAttempts: observed, Actor: c.Actor, Reason: c.Reason,
		}
		if c.As == "delivered" {
			r.Resolution = entitlementv1.DeliveryResolution_DELIVERY_RESOLUTION_DELIVERED
		}
		switch n := name.GetName().(type) {
		case *entitlementv1.GetDeliveryRequest_DeliveryId:
			r.Name = &entitlementv1.ResolveDeliveryRequest_DeliveryId{DeliveryId: n.DeliveryId}
		case *entitlementv1.GetDeliveryRequest_DeliveryKey:
			r.Name = &entitlementv1.ResolveDeliveryRequest_DeliveryKey{DeliveryKey: n.DeliveryKey}
		case *entitlementv1.GetDeliveryRequest_Reference:
			r.Name = &entitlementv1.ResolveDeliveryRequest_Reference{Reference: n.Reference}
		}
		return service.ResolveDelivery(ctx, r)
	})
}

// deliveriesResumeCmd is `grantd deliveries resume`.
type deliveriesResumeCmd struct {
	operatorService `embed:""`
	statement       `embed:""`
	Destination     string `arg:"" help:"The destination's name."`
	Pause           int64  `help:"End only the pause of this number, as list shows it; 0: the one that holds. To repeat a command that got no answer, give the number." default:"0" env:"GRANTD_DELIVERIES_PAUSE"`
}

func (c *deliveriesResumeCmd) run(ctx context.Context, io stdio) error {
	if err := c.check(); err != nil {
		return err
	}
	var answer *entitlementv1.ResumeDestinationResponse
	err := c.call(ctx, func(ctx context.Context, service entitlementv1.OperatorServiceClient) (err error) {
		answer, err = service.ResumeDestination(ctx, &entitlementv1.ResumeDestinationRequest{
			Destination: c.Destination, PauseNumber: c.Pause, Actor: c.Actor, Reason: c.Reason,
		})
		return err
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeMessage(io.stdout, answer)
	}
	p := answer.GetPause()
	return fields(io, "outcome", plain(answer.GetOutcome(), "OUTCOME_"), "destination", c.Destination,
		"pause", fmt.Sprint(p.GetPauseNumber()), "paused", moment(p.GetPausedAt()), "resumed", moment(p.GetResumedAt()),
		"actor", p.GetActor(), "caller", p.GetCaller(), "reason", p.GetReason())
}
