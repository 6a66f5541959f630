-- Every statement names its tenant and a key within it, and must use the index that has both. Where the planner takes a tenant
-- for selective, which is its guess for a new table, an index that matches the tenant alone looks as good, and a busy tenant then
-- costs a scan of all its rows per request. So the planner is told, for good, that tenants are few.

-- +goose Up

ALTER TABLE grantd.invoices ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.operations ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.entitlements ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.entries ALTER COLUMN tenant_id SET (n_distinct = 1);

-- That counts from the next ANALYZE, which needs rows to look at. The tables are new and empty: rows are put in, looked at and
-- truncated away. TRUNCATE in another transaction than CREATE also makes the planner take their size for unknown, not for zero.
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM grantd.invoices) OR EXISTS (SELECT FROM grantd.operations)
        OR EXISTS (SELECT FROM grantd.entitlements) OR EXISTS (SELECT FROM grantd.entries) THEN
        RETURN;
    END IF;
    INSERT INTO grantd.invoices SELECT '-', n, 2, 0, n, now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.operations (tenant_id, idempotency_key, kind, fingerprint, recipe, invoice_id, entitlement_id, entry_number,
           attempt_id, event_id, source, caller, applied_at)
    SELECT '-', n, 1, '', 1, n, gen_random_uuid(), 1, gen_random_uuid(), '', '', '', now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.entitlements (tenant_id, entitlement_id, invoice_id, entitlement_type, operation_version, scope, fingerprint,
           recipe, operation_key, granted_at, state, version, changed_at)
    SELECT '-', gen_random_uuid(), n, n % 10, 0, '{}', '', 1, n, now(), 1, 1, now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.entries SELECT '-', gen_random_uuid(), 1, 1, n, 0, '', '', now() FROM generate_series(1, 500) n;
    ANALYZE grantd.invoices, grantd.operations, grantd.entitlements, grantd.entries;
    TRUNCATE grantd.invoices, grantd.operations, grantd.entitlements, grantd.entries;
END
$$;
-- +goose StatementEnd
