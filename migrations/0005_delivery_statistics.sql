-- The planner is told of the tables of deliveries what 0002 told it of the core's: tenants are few, and an index that has the whole key
-- is the one to use. In a migration of its own, since a TRUNCATE beside its CREATE would leave the tables' size known, as zero.

-- +goose Up

ALTER TABLE grantd.deliveries ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.delivery_attempts ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.operator_actions ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.notifications ALTER COLUMN tenant_id SET (n_distinct = 1);
ALTER TABLE grantd.notifications_sent ALTER COLUMN tenant_id SET (n_distinct = 1);

-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM grantd.deliveries) THEN
        RETURN;
    END IF;
    INSERT INTO grantd.deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, due_at, created_at, settled_at)
    SELECT '-', gen_random_uuid(), 1, 'd' || n % 3, gen_random_uuid(), 1 + n % 6, now() + n * interval '1 second', now(),
           CASE WHEN n % 6 IN (3, 5) THEN now() + n * interval '1 second' END
      FROM generate_series(1, 1000) n;
    INSERT INTO grantd.delivery_attempts (tenant_id, delivery_id, attempt_number, worker, started_at)
    SELECT '-', gen_random_uuid(), 1, '', now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.operator_actions SELECT '-', gen_random_uuid(), 1, 1, 5, 1, '', '', '', now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.notifications SELECT '-', gen_random_uuid(), 1, 't', n, 'en', 'd', now() FROM generate_series(1, 500) n;
    INSERT INTO grantd.notifications_sent SELECT '-', gen_random_uuid(), 1, 't', n, now() FROM generate_series(1, 500) n;
    ANALYZE grantd.deliveries, grantd.delivery_attempts, grantd.operator_actions, grantd.notifications, grantd.notifications_sent;
    TRUNCATE grantd.deliveries, grantd.delivery_attempts, grantd.operator_actions, grantd.notifications, grantd.notifications_sent;
END
$$;
-- +goose StatementEnd
