package pgtest

import (
	"net"
	"net/url"
	"testing"
)

// BehindSilentHost returns the database's URL with another host first, whose kernel takes connections and from which nobody answers, as
// from a machine that is lost.
func BehindSilentHost(t testing.TB, database string) string {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	u.Host = silent.Addr().String() + "," + u.Host
	return u.String()
}
