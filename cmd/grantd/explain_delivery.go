package main

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

func (s *story) addDelivery(d *entitlementv1.DeliveryStory, next *followUps, add func(at *timestamppb.Timestamp, what string, details ...string) *happening) {
	v := d.GetDelivery()
	entry := s.entry(v.GetEntitlementId(), v.GetEntryNumber())
	now := "now " + plainState(v.GetState())
	switch {
	case v.GetSettledAt() != nil:
		now += " since " + stored(v.GetSettledAt())
	case v.GetHeldByEntryNumber() != 0:
		now += fmt.Sprintf(", held by entry %d", v.GetHeldByEntryNumber())
	case v.GetNextAttemptAt() != nil:
		now += ", due " + stored(v.GetNextAttemptAt())
	case v.GetLeaseUntil() != nil:
		now += ", lease until " + stored(v.GetLeaseUntil())
	}
	told := add(v.GetCreatedAt(), "delivery to "+v.GetDestination(), entry, now, named("id", v.GetDeliveryId()), named("key", v.GetDeliveryKey()))
	if !s.tellsHolder(v) {
		told.waysOn = waysOn(next, v, s.pause(v.GetDestination()))
	}
	to := "to " + v.GetDestination()
	for _, run := range retried(d) {
		first, a := run[0], run[len(run)-1]
		what, last, failure := fmt.Sprintf("delivery attempt %d: ", a.GetAttemptNumber()), "", "error"
		if len(run) > 1 {
			what = fmt.Sprintf("delivery attempts %d to %d: ", first.GetAttemptNumber(), a.GetAttemptNumber())
			last, failure = "the last at "+stored(a.GetStartedAt()), "its error"
		}
		result, took := "no result is recorded", ""
		if a.GetEndedAt() != nil {
			result = plain(a.GetOutcome(), "DELIVERY_ATTEMPT_OUTCOME_")
			took = "took " + length(a.GetEndedAt().AsTime().Sub(a.GetStartedAt().AsTime()))
		}
		if a.GetStatusCode() != 0 {
			result += fmt.Sprintf(" %d", a.GetStatusCode())
		}
		add(first.GetStartedAt(), what+result, to, entry, last, took, named(failure, a.GetError()), named("note", a.GetNote()), named("worker", a.GetWorker()))
	}
	for _, a := range d.GetActions() {
		add(a.GetAt(), "operator: "+plain(a.GetKind(), "OPERATOR_ACTION_KIND_"), "delivery "+to, entry,
			fmt.Sprintf("%s to %s after %s", plainState(a.GetFromState()), plainState(a.GetToState()), times(a.GetAttempts())),
			named("actor", a.GetActor()), named("caller", a.GetCaller()), named("reason", a.GetReason()))
	}
}

// gone is why a destination is paused, ever.
const gone = "it answered 410 Gone"

// tellsHolder says whether the delivery that holds this one back is in the same story.
func (s *story) tellsHolder(held *entitlementv1.Delivery) bool {
	return slices.ContainsFunc(s.found.GetDeliveries(), func(o *entitlementv1.DeliveryStory) bool {
		d := o.GetDelivery()
		return d.GetEntryNumber() == held.GetHeldByEntryNumber() && d.GetEntitlementId() == held.GetEntitlementId() && d.GetDestination() == held.GetDestination()
	})
}

// wayOn is what a delivery waits for, and the command that goes on from there.
type wayOn struct {
	why     string
	command []string
}

// pause is the one that holds at a destination, nil where none does.
func (s *story) pause(destination string) *entitlementv1.DestinationPause {
	for _, p := range s.found.GetPauses() {
		if p.GetDestination() == destination && p.GetResumedAt() == nil {
			return p
		}
	}
	return nil
}

// waysOn are in the order in which they are gone. What an earlier entry holds back waits for that one alone.
func waysOn(next *followUps, d *entitlementv1.Delivery, pause *entitlementv1.DestinationPause) (all []wayOn) {
	state := d.GetState()
	if d.GetSettledAt() != nil {
		return nil
	}
	if n := d.GetHeldByEntryNumber(); n != 0 {
		holder := fmt.Sprintf("%s/%d/%s", d.GetEntitlementId(), n, d.GetDestination())
		return []wayOn{{fmt.Sprintf("waits until entry %d is settled here; see that with", n), next.show(holder)}}
	}
	if pause != nil {
		why := fmt.Sprintf("destination %s is paused since %s because %s; resume with", d.GetDestination(), stored(pause.GetPausedAt()), gone)
		if state == entitlementv1.DeliveryState_DELIVERY_STATE_PENDING {
			why = "waits: " + why
		}
		all = append(all, wayOn{why, next.resume(d.GetDestination(), flag("pause", fmt.Sprint(pause.GetPauseNumber())))})
	}
	observed := flag("observed-attempts", fmt.Sprint(d.GetAttempts()))
	switch state {
	case entitlementv1.DeliveryState_DELIVERY_STATE_UNKNOWN:
		all = append(all, wayOn{"waits for an operator: ask the receiver whether it has the key, then say delivered or send-again with",
			next.order("resolve", d.GetDeliveryId(), "--as=FINDING", observed)})
	case entitlementv1.DeliveryState_DELIVERY_STATE_DEAD:
		all = append(all, wayOn{"waits for an operator: repair the receiver, then send it again with",
			next.order("redeliver", d.GetDeliveryId(), observed)})
	}
	return all
}

// retried groups a delivery's attempts: retries that failed alike, one after the other and with no operator's order in between, are one.
func retried(d *entitlementv1.DeliveryStory) [][]*entitlementv1.DeliveryAttempt {
	var runs [][]*entitlementv1.DeliveryAttempt
	for _, a := range d.GetAttempts() {
		if n := len(runs) - 1; n >= 0 {
			if before := runs[n][len(runs[n])-1]; alike(before, a) && !slices.ContainsFunc(d.GetActions(), func(o *entitlementv1.OperatorAction) bool {
				at := o.GetAt().AsTime()
				return !at.Before(before.GetStartedAt().AsTime()) && !at.After(a.GetStartedAt().AsTime())
			}) {
				runs[n] = append(runs[n], a)
				continue
			}
		}
		runs = append(runs, []*entitlementv1.DeliveryAttempt{a})
	}
	return runs
}

// alike says whether both are retries with the same result. Errors often differ in a port or an id.
func alike(a, b *entitlementv1.DeliveryAttempt) bool {
	return a.GetOutcome() == entitlementv1.DeliveryAttemptOutcome_DELIVERY_ATTEMPT_OUTCOME_RETRY && b.GetOutcome() == a.GetOutcome() &&
		a.GetStatusCode() == b.GetStatusCode() && a.GetNote() == b.GetNote()
}

func times(attempts int64) string {
	if attempts == 1 {
		return "1 attempt"
	}
	return fmt.Sprintf("%d attempts", attempts)
}
