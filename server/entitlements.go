package server

import (
	"context"
	"errors"
	"log/slog"

	"google.golang.org/protobuf/types/known/timestamppb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
	"github.com/grantd/grantd/store"
)

// GetEntitlement implements the contract.
func (s *EntitlementService) GetEntitlement(ctx context.Context, r *entitlementv1.GetEntitlementRequest) (*entitlementv1.GetEntitlementResponse, error) {
	if v := validateGetEntitlementRequest(r); !v.none() {
		return nil, invalid(v)
	}
	e, err := s.store.Entitlement(ctx, r.GetTenantId(), targetIn(r.GetEntitlementId(), r.GetBusinessKey()))
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	return &entitlementv1.GetEntitlementResponse{Entitlement: entitlementOut(e)}, nil
}

// ListEntitlements implements the contract.
func (s *EntitlementService) ListEntitlements(ctx context.Context, r *entitlementv1.ListEntitlementsRequest) (*entitlementv1.ListEntitlementsResponse, error) {
	if v := validateListEntitlementsRequest(r); !v.none() {
		return nil, invalid(v)
	}
	filter := store.EntitlementFilter{
		TenantID: r.GetTenantId(), EntitlementType: r.GetEntitlementType(), InvoiceID: r.GetInvoiceId(), State: r.GetState(),
	}
	found, next, err := s.store.Entitlements(ctx, filter, pageIn(r))
	if err != nil {
		return nil, listStatus(ctx, err, s.log)
	}
	return &entitlementv1.ListEntitlementsResponse{Entitlements: entitlementsOut(found), NextPageToken: next}, nil
}

// CheckEntitlement implements the contract.
func (s *EntitlementService) CheckEntitlement(ctx context.Context, r *entitlementv1.CheckEntitlementRequest) (*entitlementv1.CheckEntitlementResponse, error) {
	if v := validateCheckEntitlementRequest(r); !v.none() {
		return nil, invalid(v)
	}
	j, err := s.store.Check(ctx, r.GetTenantId(), r.GetEntitlementType(), timeIn(r.GetAt()))
	if err != nil {
		return nil, statusOf(ctx, err, s.log)
	}
	return &entitlementv1.CheckEntitlementResponse{
		Held: len(j.HeldBy) > 0, Entitlements: entitlementsOut(j.HeldBy), AbsenceReason: j.Absence, At: timestamppb.New(j.At),
	}, nil
}

// paged is a request for a page of a list.
type paged interface {
	GetPageSize() int32
	GetPageToken() string
}

func pageIn(r paged) store.Page {
	return store.Page{Size: int(r.GetPageSize()), Token: r.GetPageToken()}
}

// listStatus is statusOf for lists, whose page token only the store can judge.
func listStatus(ctx context.Context, err error, log *slog.Logger) error {
	if errors.Is(err, store.ErrPageToken) {
		var v violations
		v.add("page_token", rulePageToken)
		return invalid(v)
	}
	return statusOf(ctx, err, log)
}
