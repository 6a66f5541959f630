# Every target is a step of .ci/run, which CI calls without make.

.PHONY: all generate lint breaking test race versions soak fuzz bench bench-deliveries

all: ; @.ci/run

# Rewrites gen/ from proto/.
generate: ; @.ci/run generate

lint: ; @.ci/run lint

# The contract against the last commit of main; GRANTD_BREAKING_BASE names another.
breaking: ; @.ci/run breaking

test: ; @.ci/run test

race: ; @.ci/run race

# The tests on PostgreSQL 14, 16, 17 and 18, fetched with npm; VERSIONS names others.
versions: ; @.ci/run versions

# The tests at their full length (GRANTD_SOAK=1); RUN=regexp picks some.
soak: ; @.ci/run soak

# Every fuzz target for FUZZTIME each (30s).
fuzz: ; @.ci/run fuzz

# grantd beside pgbench on one server; BENCH holds flags of `grantd bench`.
bench: ; @go run ./cmd/grantd bench --compare $(BENCH)

# Deliveries to one fast destination beside grants, on one server; BENCH holds flags of `grantd bench`.
bench-deliveries: ; @go run ./cmd/grantd bench --deliveries $(BENCH)
