-- What support's look-ups need beside the core: operations by invoice, and the secret that page tokens are signed with.

-- +goose Up

-- Grants are found through their entitlements, by the business key: a new grant does not pay for this index.
CREATE INDEX operations_by_invoice ON grantd.operations (tenant_id, invoice_id, idempotency_key) WHERE kind <> 1 OR owner_key > '';

-- One secret for all replicas: a token of one is good at another, and nobody outside can make one.
CREATE TABLE grantd.page_token_secret (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    secret   bytea NOT NULL
);
INSERT INTO grantd.page_token_secret (secret)
SELECT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
GRANT SELECT ON grantd.page_token_secret TO grantd_service;
