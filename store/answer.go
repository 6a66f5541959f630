package store

import (
	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Answer is what one arrival is told. Retryable failures are not answers but errors of type *Failure.
type Answer struct {
	Outcome   entitlementv1.Outcome
	MatchedBy entitlementv1.MatchedBy

	// Operation is the winner, for NEWLY_APPLIED and ALREADY_APPLIED.
	Operation *Operation
	// Entitlement is the stored result of an operation on an entitlement, for NEWLY_APPLIED and ALREADY_APPLIED.
	Entitlement *Entitlement
	// Recorded and Reversed are the stored result of RECORD_INVOICE_STATE: what it recorded, and each entitlement that it took
	// back, as of that entry.
	Recorded InvoiceVersion
	Reversed []*Entitlement
	// CurrentState and CurrentVersion are the entitlement's now.
	CurrentState   entitlementv1.EntitlementState
	CurrentVersion int64
	// CurrentInvoice is the invoice's record now, for every answer to RECORD_INVOICE_STATE that looked at it.
	CurrentInvoice InvoiceVersion

	Conflict  *Conflict
	Rejection *Rejection
}

// Conflict says how a payload differs from the one that its key, or its business key, was used for.
type Conflict struct {
	Differences []Difference
	Stored      *Operation
}

// Rejection is a precondition that failed.
type Rejection struct {
	Reason  entitlementv1.RejectionReason
	Message string
	Retry   entitlementv1.RetryAdvice
}

// Winner is the operation of an earlier attempt that this one met; nil where this one won, or met none.
func (a *Answer) Winner() *Operation {
	switch a.Outcome {
	case entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED:
		return a.Operation
	case entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD:
		return a.Conflict.Stored
	default:
		return nil
	}
}

// fields lists the paths that differ, for the attempt's row.
func (c *Conflict) fields() []string {
	if c == nil {
		return nil
	}
	names := make([]string, len(c.Differences))
	for i := range c.Differences {
		names[i] = c.Differences[i].Field
	}
	return names
}

func rejected(reason entitlementv1.RejectionReason, retry entitlementv1.RetryAdvice, message string) Answer {
	return Answer{
		Outcome:   entitlementv1.Outcome_OUTCOME_REJECTED,
		Rejection: &Rejection{Reason: reason, Message: message, Retry: retry},
	}
}

func conflicting(by entitlementv1.MatchedBy, d []Difference, stored *Operation) Answer {
	return Answer{
		Outcome:   entitlementv1.Outcome_OUTCOME_CONFLICTING_PAYLOAD,
		MatchedBy: by,
		Conflict:  &Conflict{Differences: d, Stored: stored},
	}
}
