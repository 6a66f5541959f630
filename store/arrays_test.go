package store

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// The codec is held against PostgreSQL itself: what is sent as an array is what the server counts, compares and sends back.
func TestArrays_RoundTrip(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), pgtest.NewEmpty(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	registerArrays(conn.TypeMap())

	long := make([]string, 3000)
	for i := range long {
		long[i] = "\u00e9"
	}
	roundTrip(t, conn, "text", []string{}, []string{"a"}, []string{"", "a,b", `"{}\`, "NULL", "\u00e9\U0001f600"}, long)
	roundTrip(t, conn, "bytea", [][]byte{}, [][]byte{{}, {0}, {0xff, 0, '\\'}})
	roundTrip(t, conn, "smallint", []int16{}, []int16{0, 1, -1, 32767, -32768})
	roundTrip(t, conn, "bigint", []int64{}, []int64{0, -1, 9007199254740993, 1<<63 - 1, -1 << 63})
	roundTrip(t, conn, "uuid", [][16]byte{}, [][16]byte{{}, {1, 2, 15: 0xff}})
	at := func(s string) *time.Time {
		v, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			t.Fatal(err)
		}
		return ptr(v.Local())
	}
	roundTrip(t, conn, "timestamptz", []*time.Time{}, []*time.Time{nil}, []*time.Time{
		at("2026-03-01T12:00:00.000001Z"), nil, at("2000-01-01T00:00:00Z"), at("1999-12-31T23:59:59.999999Z"), at("1970-01-01T00:00:00Z"),
		at("0001-01-01T00:00:00Z"), at("9999-12-31T23:59:59.999999Z"), nil,
	})
}

func roundTrip[T any](t *testing.T, conn *pgx.Conn, typ string, columns ...[]T) {
	t.Helper()
	for _, column := range columns {
		var back []T
		var length, nulls int
		// array_dims tells an empty array from one of another shape.
		var dims *string
		if err := conn.QueryRow(t.Context(), `SELECT $1::`+typ+`[], cardinality($1), array_dims($1),
			(SELECT count(*) FROM unnest($1) v WHERE v IS NULL)`, column).Scan(&back, &length, &dims, &nulls); err != nil {
			t.Errorf("%s of %d: %v", typ, len(column), err)
			continue
		}
		if length != len(column) || (dims == nil) != (len(column) == 0) {
			t.Errorf("%s of %d: the server counts %d", typ, len(column), length)
		}
		wantNulls := 0
		for _, v := range column {
			if p, ok := any(v).(*time.Time); ok && p == nil {
				wantNulls++
			}
		}
		if nulls != wantNulls {
			t.Errorf("%s of %d: the server counts %d NULLs, want %d", typ, len(column), nulls, wantNulls)
		}
		if !reflect.DeepEqual(back, column) {
			t.Errorf("%s: sent %v, got %v", typ, column, back)
		}
	}
}
