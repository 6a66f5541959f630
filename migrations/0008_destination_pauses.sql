-- Destinations that answered 410 Gone: paused for every replica, also after a restart, until an operator resumes them.

-- +goose Up

-- One row per pause, for ever; the one without resumed_at holds. It belongs to no tenant: a destination is everybody's. Where tables are
-- distributed by tenant, this one is small and the same everywhere.
CREATE TABLE grantd.destination_pauses (
    destination    text COLLATE "C" NOT NULL,
    pause_number   bigint NOT NULL CHECK (pause_number >= 1),
    paused_at      timestamptz NOT NULL,
    -- The attempt that was answered so.
    tenant_id      text COLLATE "C" NOT NULL,
    delivery_id    uuid NOT NULL,
    attempt_number bigint NOT NULL,
    resumed_at     timestamptz,
    actor          text COLLATE "C" NOT NULL DEFAULT '',
    reason         text COLLATE "C" NOT NULL DEFAULT '',
    caller         text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT destination_pauses_pkey PRIMARY KEY (destination, pause_number)
);

GRANT SELECT, INSERT, UPDATE (resumed_at, actor, reason, caller) ON grantd.destination_pauses TO grantd_service;
