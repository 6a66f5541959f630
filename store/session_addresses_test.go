package store

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// A name in the URL can stand for several machines. Where some of them were lost and said nothing, the time for the name was over
// before the next one was asked.
func TestSession_SilentAddressesOfOneName(t *testing.T) {
	cfg, err := pgx.ParseConfig(pgtest.New(t))
	if err != nil {
		t.Fatal(err)
	}
	applySettings(&cfg.Config)
	cfg.LookupFunc = func(_ context.Context, host string) ([]string, error) {
		return []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", host}, nil
	}
	dial := cfg.DialFunc
	cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if strings.HasPrefix(address, "192.0.2.") {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return dial(ctx, network, address)
	}
	s := &session{config: cfg, ended: t.Context(), commitTimeout: time.Second}
	if err := s.connect(time.Second); err != nil {
		t.Fatal(err)
	}
	s.drop()
}
