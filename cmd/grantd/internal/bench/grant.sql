, request AS MATERIALIZED (
    SELECT *, E'billing\072grant\072' || invoice_id || E'\072team_access' AS idempotency_key,
           gen_random_uuid() AS entitlement_id, gen_random_uuid() AS attempt_id, clock_timestamp() AS at,
           sha256(convert_to(tenant_id || invoice_id, 'UTF8')) AS fingerprint
      FROM drawn
), invoice AS (
    INSERT INTO grantd.invoices (tenant_id, invoice_id, state, version, recorded_by, recorded_at)
    SELECT tenant_id, invoice_id, 2, 5, idempotency_key, at FROM request
    ON CONFLICT DO NOTHING
), operation AS (
    INSERT INTO grantd.operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
           attempt_id, event_id, source, caller, applied_at)
    SELECT tenant_id, idempotency_key, 1, fingerprint, 1, invoice_id, entitlement_id, 1,
           attempt_id, event_id, 'stripe', '', at FROM request
    ON CONFLICT DO NOTHING
), entitlement AS (
    INSERT INTO grantd.entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, quantity,
           expires_at, fingerprint, recipe, operation_key, granted_at, ends_at, state, version, changed_at)
    SELECT tenant_id, entitlement_id, invoice_id, 'team_access', 0, '{"region": "eu", "seats.max": "166"}', 3,
           NULL, fingerprint, 1, idempotency_key, at, NULL, 1, 1, at FROM request
    ON CONFLICT DO NOTHING
), entry AS (
    INSERT INTO grantd.entries (tenant_id, entitlement_id, entry_number, kind, operation_key, invoice_version, actor, reason, at)
    SELECT tenant_id, entitlement_id, 1, 1, idempotency_key, 5, '', '', at FROM request
)
INSERT INTO grantd.attempts (tenant_id, at, attempt_id, idempotency_key, kind, outcome, matched_by, reason, invoice_id,
       entitlement_type, operation_version, event_id, source, caller)
SELECT tenant_id, at, attempt_id, idempotency_key, 1, 1, 0, 0, invoice_id,
       'team_access', 0, event_id, 'stripe', '' FROM request
