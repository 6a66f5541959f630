package server

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/grantd/grantd/store"
)

// HTTP is what the HTTP port shows.
type HTTP struct {
	// Ready is asked by /readyz, with two seconds' time.
	Ready func(context.Context) (store.Readiness, error)
	// Stopping reports that the server was told to stop: /readyz then says no without asking.
	Stopping func() bool
	// Metrics answers /metrics.
	Metrics http.Handler
}

// readyAnswer is /readyz's body.
type readyAnswer struct {
	Ready               bool   `json:"ready"`
	Reason              string `json:"reason,omitempty"`
	Writable            bool   `json:"writable"`
	SynchronousStandbys int    `json:"synchronous_standbys"`
	Warning             string `json:"warning,omitempty"`
}

// Handler returns the routes: /livez is 200 while the process answers, /readyz 200 while a writable primary does and 503
// with a reason else, /metrics as given.
func (h HTTP) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		_, _ = w.Write([]byte("ok\n"))
	})
	mux.HandleFunc("GET /readyz", h.readyz)
	mux.Handle("GET /metrics", h.Metrics)
	return mux
}

func (h HTTP) readyz(w http.ResponseWriter, r *http.Request) {
	answer := h.ready(r.Context())
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !answer.Ready {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func (h HTTP) ready(ctx context.Context) readyAnswer {
	if h.Stopping() {
		return readyAnswer{Reason: "the server is shutting down"}
	}
	var readiness store.Readiness
	err := askReady(ctx, func(ctx context.Context) (err error) {
		readiness, err = h.Ready(ctx)
		return err
	})
	if err != nil {
		// Who may ask here need not know what the database is called; health logs the whole error.
		return readyAnswer{Reason: "the database does not answer"}
	}
	answer := readyAnswer{
		Ready: readiness.Writable, Writable: readiness.Writable, SynchronousStandbys: readiness.SynchronousStandbys,
	}
	switch {
	case !readiness.Writable:
		answer.Reason = "no writable primary answers"
	case readiness.SynchronousStandbys == 0:
		answer.Warning = "no synchronous standby answers: what is acknowledged is lost with the primary"
	case readiness.SynchronousStandbys < 0:
		answer.Warning = "the database role may not see whether a synchronous standby answers: grant it pg_read_all_stats"
	}
	return answer
}
