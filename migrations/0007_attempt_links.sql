-- What leads from one attempt of an event to the other: each later attempt names the winner's trace, and how often gRPC had tried the call
-- before. NULL, which takes no room, stands for "is the winner, or knows none" and for "not before".
--
-- An operation says whether its trace was sampled, so that deliveries continue the trace as its caller decided; NULL where it was not.

-- +goose Up

-- The writes queue behind the locks that are waited for here. Where a long statement holds them, this fails, and is run again.
SET LOCAL lock_timeout = '5s';
ALTER TABLE grantd.operations ADD COLUMN trace_sampled boolean;
-- The service owns attempts and their partitions.
SET LOCAL ROLE grantd_service;
ALTER TABLE grantd.attempts ADD COLUMN winner_trace_id bytea, ADD COLUMN previous_tries integer;
RESET ROLE;

CREATE TYPE grantd.operation_row_2 AS (
    tenant_id       text COLLATE "C",
    idempotency_key text COLLATE "C",
    kind            smallint,
    owner_key       text COLLATE "C",
    fingerprint     bytea,
    recipe          smallint,
    invoice_id      text COLLATE "C",
    entitlement_id  uuid,
    entry_number    bigint,
    invoice_state   smallint,
    invoice_version bigint,
    actor           text COLLATE "C",
    reason          text COLLATE "C",
    attempt_id      uuid,
    event_id        text COLLATE "C",
    source          text COLLATE "C",
    caller          text COLLATE "C",
    trace_id        bytea,
    span_id         bytea,
    applied_at      timestamptz,
    trace_sampled   boolean
);
CREATE TYPE grantd.attempt_row_2 AS (
    tenant_id         text COLLATE "C",
    at                timestamptz,
    attempt_id        uuid,
    idempotency_key   text COLLATE "C",
    kind              smallint,
    outcome           smallint,
    matched_by        smallint,
    reason            smallint,
    differing_fields  text[],
    invoice_id        text COLLATE "C",
    entitlement_type  text COLLATE "C",
    operation_version bigint,
    event_id          text COLLATE "C",
    source            text COLLATE "C",
    caller            text COLLATE "C",
    trace_id          bytea,
    span_id           bytea,
    winner_trace_id   bytea,
    previous_tries    integer
);
