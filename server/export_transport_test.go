package server

import (
	"context"
	"crypto/tls"
	"log/slog"
	"time"
)

var (
	CallerOf        = callerOf
	CertificateName = certificateName
)

// NewEagerTLSConfig looks at the files in every handshake.
func NewEagerTLSConfig(files TLSFiles, log *slog.Logger) (*tls.Config, error) {
	return newTLSConfig(files, log, 0)
}

func (h *Health) WatchReadiness(ctx context.Context, ready func(context.Context) error, interval time.Duration, log *slog.Logger) {
	h.watchReadiness(ctx, ready, interval, log)
}
