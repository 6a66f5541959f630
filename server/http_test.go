package server_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/grantd/grantd/server"
	"github.com/grantd/grantd/store"
)

func TestHTTP(t *testing.T) {
	var readiness store.Readiness
	var failure error
	var stopping bool
	handler := server.HTTP{
		Ready: func(ctx context.Context) (store.Readiness, error) {
			if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > 2*time.Second {
				t.Error("the question is not bounded to two seconds")
			}
			return readiness, failure
		},
		Stopping: func() bool { return stopping },
		Metrics:  http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("metrics\n")) }),
	}.Handler()
	for _, c := range []struct {
		name, request string
		readiness     store.Readiness
		failure       error
		stopping      bool
		code          int
		body          string
	}{
		{"alive", "GET /livez", store.Readiness{}, errors.New("down"), true, 200, "ok\n"},
		{"ready", "GET /readyz", store.Readiness{Writable: true, SynchronousStandbys: 1}, nil, false, 200,
			`{"ready":true,"writable":true,"synchronous_standbys":1}` + "\n"},
		{"no standby", "GET /readyz", store.Readiness{Writable: true}, nil, false, 200,
			`{"ready":true,"writable":true,"synchronous_standbys":0,"warning":"no synchronous standby answers: what is acknowledged is lost with the primary"}` + "\n"},
		{"standbys unseen", "GET /readyz", store.Readiness{Writable: true, SynchronousStandbys: -1}, nil, false, 200,
			`{"ready":true,"writable":true,"synchronous_standbys":-1,"warning":"the database role may not see whether a synchronous standby answers: grant it pg_read_all_stats"}` + "\n"},
		{"standby only", "GET /readyz", store.Readiness{}, nil, false, 503,
			`{"ready":false,"reason":"no writable primary answers","writable":false,"synchronous_standbys":0}` + "\n"},
		{"down", "GET /readyz", store.Readiness{Writable: true}, errors.New("connection refused"), false, 503,
			`{"ready":false,"reason":"the database does not answer","writable":false,"synchronous_standbys":0}` + "\n"},
		{"stopping", "GET /readyz", store.Readiness{Writable: true}, nil, true, 503,
			`{"ready":false,"reason":"the server is shutting down","writable":false,"synchronous_standbys":0}` + "\n"},
		{"metrics", "GET /metrics", store.Readiness{}, nil, false, 200, "metrics\n"},
		{"elsewhere", "GET /", store.Readiness{}, nil, false, 404, "404 page not found\n"},
		{"writing", "POST /readyz", store.Readiness{}, nil, false, 405, "Method Not Allowed\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			readiness, failure, stopping = c.readiness, c.failure, c.stopping
			method, path, _ := strings.Cut(c.request, " ")
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, httptest.NewRequest(method, path, nil))
			if recorder.Code != c.code || recorder.Body.String() != c.body {
				t.Errorf("%d %s, want %d %s", recorder.Code, recorder.Body, c.code, c.body)
			}
		})
	}
}
