-- The core: invoices, operations, entitlements, their ledger, and attempts.
--
-- tenant_id stands first in every primary key and unique constraint and is never updated, so that the tables can be
-- distributed by it. Identifiers are compared as bytes. There are no foreign keys: the combining writer writes related rows in
-- one transaction, and a foreign key would take locks outside its fixed order. Small integers are the numbers of the
-- enums in proto/entitlement/v1.

-- +goose Up

-- +goose StatementBegin
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'grantd_service') THEN
        CREATE ROLE grantd_service NOLOGIN;
    END IF;
EXCEPTION
    -- Another database of the cluster was quicker.
    WHEN duplicate_object OR unique_violation THEN NULL;
END
$$;
-- +goose StatementEnd
-- The sessions of the service take this role, also when the login owns the tables: see the grants at the end.
-- +goose StatementBegin
DO $$
BEGIN
    IF NOT pg_has_role(current_user, 'grantd_service', 'MEMBER') THEN
        EXECUTE format('GRANT grantd_service TO %I', current_user);
    END IF;
END
$$;
-- +goose StatementEnd
-- To see in readiness whether a synchronous standby answers. Where the login may not give it, readiness says "unknown".
-- +goose StatementBegin
DO $$
BEGIN
    GRANT pg_read_all_stats TO grantd_service;
EXCEPTION
    WHEN insufficient_privilege THEN RAISE NOTICE 'grantd_service may not read pg_stat_replication';
END
$$;
-- +goose StatementEnd

-- It is there already: the table that says which of these files ran is in it.
CREATE SCHEMA IF NOT EXISTS grantd;
GRANT USAGE, CREATE ON SCHEMA grantd TO grantd_service;

-- The authority's record of an invoice: the highest version recorded. Never goes back.
CREATE TABLE grantd.invoices (
    tenant_id   text COLLATE "C" NOT NULL,
    invoice_id  text COLLATE "C" NOT NULL,
    state       smallint NOT NULL CHECK (state BETWEEN 1 AND 4),
    version     bigint NOT NULL CHECK (version >= 0),
    recorded_by text COLLATE "C" NOT NULL, -- key of the operation that recorded this version
    recorded_at timestamptz NOT NULL,
    CONSTRAINT invoices_pkey PRIMARY KEY (tenant_id, invoice_id)
);

-- One row per idempotency key that had its effect, or that was told it was there already (an alias, with owner_key set).
-- Rows without owner_key live as long as what they made. Refusals and conflicts never stand here.
CREATE TABLE grantd.operations (
    tenant_id       text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    kind            smallint NOT NULL CHECK (kind BETWEEN 1 AND 4),
    owner_key       text COLLATE "C",
    fingerprint     bytea NOT NULL,
    recipe          smallint NOT NULL,
    invoice_id      text COLLATE "C" NOT NULL,
    entitlement_id  uuid,
    entry_number    bigint,
    invoice_state   smallint,
    invoice_version bigint,
    actor           text COLLATE "C",
    reason          text COLLATE "C",
    attempt_id      uuid NOT NULL,
    event_id        text COLLATE "C" NOT NULL,
    source          text COLLATE "C" NOT NULL,
    caller          text COLLATE "C" NOT NULL,
    trace_id        bytea,
    span_id         bytea,
    applied_at      timestamptz NOT NULL,
    CONSTRAINT operations_pkey PRIMARY KEY (tenant_id, idempotency_key),
    -- An operation is about an entitlement's entry, or records an invoice's state.
    CONSTRAINT operations_effect CHECK (
        (kind = 2) = (entitlement_id IS NULL)
        AND (entitlement_id IS NULL) = (entry_number IS NULL)
        AND (kind = 2) = (invoice_state IS NOT NULL)
        AND (invoice_state IS NULL) = (invoice_version IS NULL)),
    CONSTRAINT operations_not_its_own_alias CHECK (owner_key <> idempotency_key)
);
CREATE INDEX operations_aliases ON grantd.operations (tenant_id, owner_key) WHERE owner_key IS NOT NULL;
-- For the purge alone, which goes by age across tenants. Its condition is written so that no other statement's implies it.
CREATE INDEX operations_alias_age ON grantd.operations (applied_at) WHERE owner_key > '';

-- One row per effect, for ever: the business rule is the unique constraint, which looks at neither state nor age. Of a row
-- only state, version and changed_at ever change: they say what the last entry says.
CREATE TABLE grantd.entitlements (
    tenant_id         text COLLATE "C" NOT NULL,
    entitlement_id    uuid NOT NULL,
    invoice_id        text COLLATE "C" NOT NULL,
    entitlement_type  text COLLATE "C" NOT NULL,
    operation_version bigint NOT NULL CHECK (operation_version >= 0),
    scope             jsonb NOT NULL,
    quantity          bigint CHECK (quantity >= 1),
    starts_at         timestamptz,
    expires_at        timestamptz,
    fingerprint       bytea NOT NULL,
    recipe            smallint NOT NULL,
    operation_key     text COLLATE "C" NOT NULL,
    granted_at        timestamptz NOT NULL,
    ends_at           timestamptz, -- expires_at, or what the catalogue's default validity made of it when it was granted
    state             smallint NOT NULL CHECK (state BETWEEN 1 AND 2),
    version           bigint NOT NULL CHECK (version >= 1),
    changed_at        timestamptz NOT NULL,
    CONSTRAINT entitlements_pkey PRIMARY KEY (tenant_id, entitlement_id),
    CONSTRAINT entitlements_business_key UNIQUE (tenant_id, invoice_id, entitlement_type, operation_version)
);
-- No type is empty. The condition keeps this index from statements that look for a business key and do not repeat it: without
-- statistics, the planner may take it there for as good as the constraint's.
CREATE INDEX entitlements_by_type ON grantd.entitlements (tenant_id, entitlement_type, entitlement_id)
    WHERE entitlement_type <> '';

-- The ledger. Append only: the service's role may neither update nor delete.
CREATE TABLE grantd.entries (
    tenant_id       text COLLATE "C" NOT NULL,
    entitlement_id  uuid NOT NULL,
    entry_number    bigint NOT NULL CHECK (entry_number >= 1),
    kind            smallint NOT NULL CHECK (kind BETWEEN 1 AND 3),
    operation_key   text COLLATE "C" NOT NULL,
    invoice_version bigint NOT NULL,
    actor           text COLLATE "C" NOT NULL,
    reason          text COLLATE "C" NOT NULL,
    at              timestamptz NOT NULL,
    CONSTRAINT entries_pkey PRIMARY KEY (tenant_id, entitlement_id, entry_number),
    CONSTRAINT entries_granted_first CHECK ((kind = 1) = (entry_number = 1))
);

-- One row per arrival that the database answered. Partitioned by day in UTC; the service makes and drops the partitions.
CREATE TABLE grantd.attempts (
    tenant_id        text COLLATE "C" NOT NULL,
    at               timestamptz NOT NULL,
    attempt_id       uuid NOT NULL,
    idempotency_key  text COLLATE "C" NOT NULL,
    kind             smallint NOT NULL,
    outcome          smallint NOT NULL,
    matched_by       smallint NOT NULL,
    reason           smallint NOT NULL,
    differing_fields text[],
    invoice_id       text COLLATE "C" NOT NULL,
    entitlement_type text COLLATE "C" NOT NULL,
    operation_version bigint NOT NULL,
    event_id         text COLLATE "C" NOT NULL,
    source           text COLLATE "C" NOT NULL,
    caller           text COLLATE "C" NOT NULL,
    trace_id         bytea,
    span_id          bytea,
    CONSTRAINT attempts_pkey PRIMARY KEY (tenant_id, at, attempt_id)
) PARTITION BY RANGE (at);
-- A winner's attempt is found through its operation, which names it: a new grant does not pay for these two.
CREATE INDEX attempts_by_key ON grantd.attempts (tenant_id, idempotency_key) WHERE outcome <> 1;
CREATE INDEX attempts_by_invoice ON grantd.attempts (tenant_id, invoice_id) WHERE outcome <> 1;
CREATE INDEX attempts_by_event ON grantd.attempts (tenant_id, event_id) WHERE event_id <> '';

GRANT SELECT, INSERT, UPDATE ON grantd.invoices TO grantd_service;
GRANT SELECT, INSERT ON grantd.operations TO grantd_service;
GRANT SELECT, INSERT, UPDATE (state, version, changed_at) ON grantd.entitlements TO grantd_service;
GRANT SELECT, INSERT ON grantd.entries TO grantd_service;
ALTER TABLE grantd.attempts OWNER TO grantd_service;

-- The service may remove aliases and nothing else of operations: an owner stays as long as what it made.
-- +goose StatementBegin
CREATE FUNCTION grantd.purge_aliases(before timestamptz, at_most integer) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER SET search_path = grantd, pg_temp AS $$
    WITH purged AS (
        DELETE FROM operations o
         USING (SELECT tenant_id, idempotency_key FROM operations
                 WHERE owner_key > '' AND applied_at < before
                 ORDER BY applied_at LIMIT at_most) AS old
         -- Without a word of owner_key here: it would offer the index by age for each single row.
         WHERE o.tenant_id = old.tenant_id AND o.idempotency_key = old.idempotency_key
        RETURNING 1)
    SELECT count(*) FROM purged
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION grantd.purge_aliases(timestamptz, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION grantd.purge_aliases(timestamptz, integer) TO grantd_service;
