-- What is settled leaves the table of what is not, which stays as small as what waits: a claim then updates no index of it, and what was
-- delivered is kept without its body.
--
-- An older replica goes on granting: its deliveries are made as before, and newer replicas send them. It sends none any more, fails to look
-- any up, removes none, and refuses orders: those about a settled one as if that were not there. Nor can it record what comes of the calls
-- that it has under way: when their leases run out, they are made again where the destination deduplicates, and UNKNOWN elsewhere.

-- +goose Up

SET LOCAL lock_timeout = '5s';

-- What there is becomes the table of the settled, which is most of it: nothing but what is not settled is moved.
ALTER TABLE grantd.deliveries RENAME TO settled_deliveries;
ALTER TABLE grantd.settled_deliveries RENAME CONSTRAINT deliveries_pkey TO settled_deliveries_pkey;
ALTER TABLE grantd.settled_deliveries RENAME CONSTRAINT deliveries_id TO settled_deliveries_id;
ALTER TABLE grantd.settled_deliveries RENAME CONSTRAINT deliveries_entry_number_check TO settled_deliveries_entry_number_check;
ALTER INDEX grantd.deliveries_settled_age RENAME TO settled_deliveries_age;

-- The deliveries that are not settled, by state: PENDING, SENDING, UNKNOWN, DEAD. A delivery is made with its entry, which there is once, so
-- that none is made anew when this one has moved to settled_deliveries, nor when it is removed there.
--
-- The latest attempt stands with the delivery, from worker to note; those before it in delivery_attempts.
CREATE TABLE grantd.deliveries (
    tenant_id      text COLLATE "C" NOT NULL,
    entitlement_id uuid NOT NULL,
    entry_number   bigint NOT NULL CHECK (entry_number >= 1),
    destination    text COLLATE "C" NOT NULL,
    delivery_id    uuid NOT NULL,
    state          smallint NOT NULL DEFAULT 1 CHECK (state IN (1, 2, 3, 5)),
    -- What the indexes go by. Neither this nor due_at changes when a lease is given, so that no index is touched.
    stuck          smallint NOT NULL GENERATED ALWAYS AS (CASE WHEN state IN (3, 5) THEN state ELSE 0 END) STORED,
    due_at         timestamptz NOT NULL, -- PENDING: of the next attempt; UNKNOWN: of the next look-up
    leased_until   timestamptz,
    lease          uuid,                 -- token of the latest; kept by UNKNOWN, so that a late result of that very call still counts
    attempts       bigint NOT NULL DEFAULT 0,
    poison         bigint NOT NULL DEFAULT 0,
    last_error     text NOT NULL DEFAULT '',
    created_at     timestamptz NOT NULL,
    worker         text,
    started_at     timestamptz,
    ended_at       timestamptz,
    outcome        smallint NOT NULL DEFAULT 0,
    status_code    integer NOT NULL DEFAULT 0,
    error          text NOT NULL DEFAULT '',
    note           text NOT NULL DEFAULT '',
    -- What is sent beside the body. NULL in rows that were moved here and in those of an older replica; then it is read from the ledger.
    delivery_key   bytea,
    kind           smallint,
    operation_key  text COLLATE "C",
    event_id       text COLLATE "C",
    trace_id       bytea,
    span_id        bytea,
    trace_sampled  boolean,
    content_type   text NOT NULL DEFAULT '',
    body           bytea, -- written once. The last column: what does not change at the end of a row is not logged again
    CONSTRAINT deliveries_lease CHECK ((state = 2) = (leased_until IS NOT NULL))
) WITH (
    -- Room for each row's next version on the same page: without it, the row would move, and all its indexes with it.
    fillfactor = 50,
    -- A queue: what was delivered leaves its place in the index of the due behind, and claims must not wade through that.
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1
);
-- As in 0006: the rows that a grant's statement takes.
CREATE TYPE grantd.delivery_row AS (
    tenant_id      text COLLATE "C",
    entitlement_id uuid,
    entry_number   bigint,
    destination    text COLLATE "C",
    delivery_id    uuid,
    due_at         timestamptz,
    created_at     timestamptz,
    delivery_key   bytea,
    kind           smallint,
    operation_key  text COLLATE "C",
    event_id       text COLLATE "C",
    trace_id       bytea,
    span_id        bytea,
    trace_sampled  boolean,
    content_type   text COLLATE "C",
    body           bytea
);
ALTER TABLE grantd.deliveries ALTER COLUMN tenant_id SET (n_distinct = 1);

ALTER TABLE grantd.settled_deliveries RENAME COLUMN lease_token TO lease;
ALTER TABLE grantd.settled_deliveries
    ADD COLUMN body_bytes bigint, -- a body is kept for as long as it may be sent; some of those settled before this have theirs
    ADD COLUMN worker text, ADD COLUMN started_at timestamptz, ADD COLUMN ended_at timestamptz, ADD COLUMN outcome smallint,
    ADD COLUMN status_code integer, ADD COLUMN error text, ADD COLUMN note text;

-- Nobody can write meanwhile. What is settled, and the attempts at it, may be much more than what is moved, and must not be read for it: the
-- conditions are those of the indexes that there were until now, and each attempt is a probe for a whole key.
SET LOCAL enable_seqscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off;
WITH moved AS (
    DELETE FROM grantd.settled_deliveries WHERE state IN (1, 2) AND due_at > '-infinity' OR state IN (3, 5)
    RETURNING *), taken AS (
    DELETE FROM grantd.delivery_attempts a USING moved m
     WHERE a.tenant_id = m.tenant_id AND a.delivery_id = m.delivery_id AND a.attempt_number = m.attempts)
INSERT INTO grantd.deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, state, due_at, leased_until, lease, attempts,
       poison, last_error, created_at, body, content_type, worker, started_at, ended_at, outcome, status_code, error, note)
SELECT m.tenant_id, m.entitlement_id, m.entry_number, m.destination, m.delivery_id, m.state, m.due_at, CASE m.state WHEN 2 THEN m.due_at END,
       m.lease, m.attempts, m.poison, m.last_error, m.created_at, m.body, m.content_type,
       l.worker, l.started_at, l.ended_at, COALESCE(l.outcome, 0), COALESCE(l.status_code, 0), COALESCE(l.error, ''), COALESCE(l.note, '')
  FROM moved m
  LEFT JOIN grantd.delivery_attempts l ON l.tenant_id = m.tenant_id AND l.delivery_id = m.delivery_id AND l.attempt_number = m.attempts;
SET LOCAL enable_seqscan TO DEFAULT;
SET LOCAL enable_hashjoin TO DEFAULT;
SET LOCAL enable_mergejoin TO DEFAULT;
DROP INDEX grantd.deliveries_due, grantd.deliveries_stuck_at, grantd.deliveries_stuck;

-- Not before the rows are there: their indexes are made in half the time then.
ALTER TABLE grantd.deliveries
    ADD CONSTRAINT deliveries_pkey PRIMARY KEY (tenant_id, entitlement_id, entry_number, destination),
    ADD CONSTRAINT deliveries_id UNIQUE (tenant_id, delivery_id);

-- NOT VALID, since looking at what there is would take as long as it is much. It holds: deliveries_settled said so, and what it left is moved.
ALTER TABLE grantd.settled_deliveries DROP COLUMN due_at,
    DROP CONSTRAINT deliveries_settled, DROP CONSTRAINT deliveries_state_check,
    ADD CONSTRAINT settled_deliveries_state CHECK (state IN (4, 6)) NOT VALID,
    ALTER COLUMN state DROP DEFAULT;
ALTER TABLE grantd.settled_deliveries RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold);

-- These are not led by the tenant: workers go by destination, across tenants. None of them guards anything. The conditions on
-- infinity and on what is never empty keep each index from other statements than its own.
CREATE INDEX deliveries_due ON grantd.deliveries (destination, due_at) WHERE stuck = 0 AND due_at > '-infinity';
CREATE INDEX deliveries_stuck_at ON grantd.deliveries (destination, stuck, due_at) WHERE stuck > 0 AND destination > '';
-- What waits for an operator is little among much.
CREATE INDEX deliveries_stuck ON grantd.deliveries (tenant_id, stuck, entitlement_id, entry_number, destination) WHERE stuck > 0 AND tenant_id > '';

-- Rows that are no deliveries: of no tenant, for no destination. The table is empty whenever nothing waits, and plans that are made then, for
-- an empty table, would read all of it for each key once something does. These keep the planner from taking it for that.
INSERT INTO grantd.deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at)
SELECT '', gen_random_uuid(), 1, '-' || n % 3, gen_random_uuid(), '2000-01-01Z'::timestamptz + n * interval '1 second', '2000-01-01Z'
  FROM generate_series(1, 1000) n;
ANALYZE grantd.deliveries;

-- Every delivery that is known, wherever it stands. The condition is one that the planner has no statistics for: it would take all for excluded.
CREATE VIEW grantd.all_deliveries AS
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, state, stuck, due_at, leased_until, lease, attempts, poison, last_error,
       created_at, NULL::timestamptz AS settled_at, octet_length(body)::bigint AS body_bytes, content_type,
       worker, started_at, ended_at, outcome, status_code, error, note
  FROM grantd.deliveries WHERE tenant_id || '' <> ''
UNION ALL
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, state, 0::smallint, settled_at, NULL::timestamptz, lease, attempts, poison, last_error,
       created_at, settled_at, COALESCE(body_bytes, octet_length(body)), content_type,
       worker, started_at, ended_at, outcome, status_code, error, note
  FROM grantd.settled_deliveries;

-- Every attempt at them.
CREATE VIEW grantd.all_delivery_attempts AS
SELECT tenant_id, delivery_id, attempt_number, worker, started_at, ended_at, outcome, status_code, error, note
  FROM grantd.delivery_attempts
UNION ALL
SELECT tenant_id, delivery_id, attempts, worker, started_at, ended_at, outcome, status_code, error, note
  FROM grantd.deliveries WHERE worker IS NOT NULL
UNION ALL
SELECT tenant_id, delivery_id, attempts, worker, started_at, ended_at, outcome, status_code, error, note
  FROM grantd.settled_deliveries WHERE worker IS NOT NULL;

REVOKE ALL ON grantd.settled_deliveries FROM grantd_service;
GRANT SELECT, INSERT, DELETE, UPDATE (ended_at, outcome, status_code, error, note) ON grantd.settled_deliveries TO grantd_service;
GRANT SELECT, INSERT, DELETE,
    UPDATE (state, due_at, leased_until, lease, attempts, poison, last_error, body, content_type,
            worker, started_at, ended_at, outcome, status_code, error, note)
    ON grantd.deliveries TO grantd_service;
GRANT SELECT ON grantd.all_deliveries, grantd.all_delivery_attempts TO grantd_service;
