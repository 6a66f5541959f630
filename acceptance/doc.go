// Package acceptance holds the tests of the whole: a client, the gRPC server, the store and a real PostgreSQL, as they run in
// production. They are the authority for what callers may rely on; how each part keeps its promise is tested beside that part.
//
// GRANTD_SOAK=1 makes the tests that look for races run for minutes instead of seconds.
package acceptance
