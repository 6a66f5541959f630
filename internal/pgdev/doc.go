// Package pgdev runs the private PostgreSQL servers of `grantd dev` and of the tests. It is the authority for where
// PostgreSQL's programs are found, under which account they run, and when a server that was started here ends.
//
// Every server listens on 127.0.0.1 only and asks for no password there: whoever can open a local port is its superuser,
// and acts with the rights of its account. So it is for development and for tests, never for data that matter.
//
// It works on Linux and macOS.
package pgdev
