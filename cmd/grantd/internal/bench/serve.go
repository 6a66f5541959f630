package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

const (
	startTimeout = 30 * time.Second
	stopTimeout  = 20 * time.Second
)

// service is a grantd server in a process of its own, so that its garbage collector and its scheduler are not the load's.
type service struct {
	cmd    *exec.Cmd
	addr   string
	log    *tail
	exited chan struct{}
}

// startService returns when the server is healthy. Of OTEL_* and GRANTD_* it has those of environment alone.
func startService(ctx context.Context, command []string, database string, environment ...string) (*service, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	args := append(slices.Clone(command[1:]), "--database-url", database, "--grpc-addr", addr, "--http-addr", "127.0.0.1:0")
	s := &service{cmd: exec.Command(command[0], args...), addr: addr, log: new(tail), exited: make(chan struct{})}
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	// The defaults are measured.
	s.cmd.Env = append(slices.DeleteFunc(os.Environ(), func(entry string) bool {
		return strings.HasPrefix(entry, "OTEL_") || strings.HasPrefix(entry, "GRANTD_")
	}), environment...)
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		s.cmd.Wait() // how it ended is in its log
		close(s.exited)
	}()
	if err := s.waitHealthy(ctx); err != nil {
		s.stop()
		return nil, fmt.Errorf("server: %w\n%s", err, s.log)
	}
	return s, nil
}

func (s *service) waitHealthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		conn.ResetConnectBackoff()
		answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		if err == nil && answer.GetStatus() == healthpb.HealthCheckResponse_SERVING {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-s.exited:
			return errors.New("it ended at once")
		case <-ticker.C:
		}
	}
}

// stop asks the server to end, and ends it.
func (s *service) stop() {
	s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.exited:
	case <-time.After(stopTimeout):
		s.cmd.Process.Kill()
		<-s.exited
	}
}

func freeAddr() (string, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if extra := len(t.text) - tailBytes; extra > 0 {
		t.text = append(t.text[:0], t.text[extra:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.text))
}
