-- The way out: a delivery for each entry and destination, the attempts at it, what operators did, and who was told by mail.

-- +goose Up

-- One row per entry and destination, made with the entry. Its id is the beginning of the delivery key, which is derived and so not
-- kept. Settled rows are removed after their retention; nothing is made anew for an entry that is there.
CREATE TABLE grantd.deliveries (
    tenant_id      text COLLATE "C" NOT NULL,
    entitlement_id uuid NOT NULL,
    entry_number   bigint NOT NULL CHECK (entry_number >= 1),
    destination    text COLLATE "C" NOT NULL,
    delivery_id    uuid NOT NULL,
    state          smallint NOT NULL DEFAULT 1 CHECK (state BETWEEN 1 AND 6),
    attempts       bigint NOT NULL DEFAULT 0,
    poison         bigint NOT NULL DEFAULT 0,
    due_at         timestamptz NOT NULL, -- PENDING: of the next attempt; SENDING: the end of the lease; UNKNOWN: of the next look-up
    lease_token    uuid,                 -- of the latest claim; kept by UNKNOWN, so that a late result of that very call still counts
    last_error     text NOT NULL DEFAULT '',
    created_at     timestamptz NOT NULL,
    settled_at     timestamptz,
    body           bytea,                -- written once
    content_type   text NOT NULL DEFAULT '',
    CONSTRAINT deliveries_pkey PRIMARY KEY (tenant_id, entitlement_id, entry_number, destination),
    CONSTRAINT deliveries_id UNIQUE (tenant_id, delivery_id),
    -- DELIVERED and DISCARDED are final.
    CONSTRAINT deliveries_settled CHECK ((state IN (4, 6)) = (settled_at IS NOT NULL))
) WITH (
    -- A queue: what was delivered leaves its place in the index of the due behind, and claims must not wade through that.
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1
);
-- These are not led by the tenant: workers go by destination, across tenants. None of them guards anything. The condition on infinity
-- keeps the index of the due from statements that look for one key.
CREATE INDEX deliveries_due ON grantd.deliveries (destination, due_at) WHERE state IN (1, 2) AND due_at > '-infinity';
CREATE INDEX deliveries_stuck_at ON grantd.deliveries (destination, state, due_at) WHERE state IN (3, 5);
CREATE INDEX deliveries_settled_age ON grantd.deliveries (settled_at) WHERE settled_at IS NOT NULL;
-- What waits for an operator is little among much.
CREATE INDEX deliveries_stuck ON grantd.deliveries (tenant_id, state, entitlement_id, entry_number, destination) WHERE state IN (3, 5);

-- One row per call, written before it is made.
CREATE TABLE grantd.delivery_attempts (
    tenant_id      text COLLATE "C" NOT NULL,
    delivery_id    uuid NOT NULL,
    attempt_number bigint NOT NULL,
    worker         text NOT NULL,
    started_at     timestamptz NOT NULL,
    ended_at       timestamptz,
    outcome        smallint NOT NULL DEFAULT 0,
    status_code    integer NOT NULL DEFAULT 0,
    error          text NOT NULL DEFAULT '',
    note           text NOT NULL DEFAULT '',
    CONSTRAINT delivery_attempts_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number)
) WITH (fillfactor = 80);

-- What operators did, for ever. Each kind of action is possible once after each attempt.
CREATE TABLE grantd.operator_actions (
    tenant_id   text COLLATE "C" NOT NULL,
    delivery_id uuid NOT NULL,
    attempts    bigint NOT NULL,
    kind        smallint NOT NULL,
    from_state  smallint NOT NULL,
    to_state    smallint NOT NULL,
    actor       text COLLATE "C" NOT NULL,
    reason      text COLLATE "C" NOT NULL,
    caller      text COLLATE "C" NOT NULL,
    at          timestamptz NOT NULL,
    CONSTRAINT operator_actions_pkey PRIMARY KEY (tenant_id, delivery_id, attempts, kind)
);

-- Who is to be told, and who was: two facts, both for ever and both append-only. The key says that nobody is told twice of one entry.
CREATE TABLE grantd.notifications (
    tenant_id      text COLLATE "C" NOT NULL,
    entitlement_id uuid NOT NULL,
    entry_number   bigint NOT NULL,
    template       text COLLATE "C" NOT NULL,
    recipient      text COLLATE "C" NOT NULL,
    locale         text COLLATE "C" NOT NULL,
    destination    text COLLATE "C" NOT NULL,
    requested_at   timestamptz NOT NULL,
    CONSTRAINT notifications_pkey PRIMARY KEY (tenant_id, entitlement_id, entry_number, template, recipient)
);
CREATE TABLE grantd.notifications_sent (
    tenant_id      text COLLATE "C" NOT NULL,
    entitlement_id uuid NOT NULL,
    entry_number   bigint NOT NULL,
    template       text COLLATE "C" NOT NULL,
    recipient      text COLLATE "C" NOT NULL,
    sent_at        timestamptz NOT NULL,
    CONSTRAINT notifications_sent_pkey PRIMARY KEY (tenant_id, entitlement_id, entry_number, template, recipient)
);

-- The key of a delivery stands, and what it is made of.
GRANT SELECT, INSERT, DELETE, UPDATE (state, attempts, poison, due_at, lease_token, last_error, settled_at, body, content_type)
    ON grantd.deliveries TO grantd_service;
GRANT SELECT, INSERT, DELETE, UPDATE (ended_at, outcome, status_code, error, note) ON grantd.delivery_attempts TO grantd_service;
GRANT SELECT, INSERT ON grantd.operator_actions, grantd.notifications, grantd.notifications_sent TO grantd_service;
