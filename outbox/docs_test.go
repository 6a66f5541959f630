package outbox_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/grantd/grantd/internal/pgdev/pgtest"
)

// block returns the first block of docs/deliveries.md in a language.
func block(t *testing.T, language string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/deliveries.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```"+language+"\n")
	code, _, closed := strings.Cut(rest, "\n```\n")
	if !found || !closed {
		t.Fatalf("no block of %s", language)
	}
	return code + "\n"
}

// The receiver in the documentation is what people copy: it must build, verify what is sent, and have each effect once.
func TestDocs_GoReceiver(t *testing.T) {
	dir := t.TempDir()
	source, program := filepath.Join(dir, "main.go"), filepath.Join(dir, "receiver")
	if err := os.WriteFile(source, []byte(block(t, "go")), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	addr, url, secret := freeAddr(t), pgtest.NewEmpty(t), newSecret()
	receiver := exec.CommandContext(t.Context(), program)
	receiver.Env = []string{"ADDR=" + addr, "DATABASE_URL=" + url, "WEBHOOK_SECRET=" + secret}
	receiver.Stderr = t.Output()
	if err := receiver.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { receiver.Process.Kill(); receiver.Wait() })

	b := setup(t, fmt.Sprintf(`
destinations:
- name: copied
  kind: webhook
  deduplicates: true
  retry: {min_delay: 10ms, max_delay: 100ms}
  webhook: {url: "http://%s/events", secrets: [{env: SECRET}]}
`, addr))
	b.secret = secret
	first := b.start()
	b.grant("acme", "INV-1", "team_access")
	b.refund("acme", "INV-1")
	b.grant("acme", "INV-2", "team_access")
	b.awaitState("copied", delivered, 3)
	// As if the answers had been lost: all of it is sent again.
	b.exec(`
WITH moved AS (DELETE FROM settled_deliveries RETURNING *)
INSERT INTO deliveries (tenant_id, entitlement_id, entry_number, destination, delivery_id, due_at, created_at)
SELECT tenant_id, entitlement_id, entry_number, destination, delivery_id, clock_timestamp(), created_at FROM moved`)
	b.awaitState("copied", delivered, 3)
	first.stop()

	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var keys, reversed, active int
	if err := conn.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM received), count(*) FILTER (WHERE state = 'ENTITLEMENT_STATE_REVERSED' AND version = 2),
		       count(*) FILTER (WHERE state = 'ENTITLEMENT_STATE_ACTIVE' AND version = 1) FROM access`).Scan(&keys, &reversed, &active); err != nil {
		t.Fatal(err)
	}
	if keys != 3 || reversed != 1 || active != 1 {
		t.Errorf("%d keys, %d reversed, %d active", keys, reversed, active)
	}
	// Somebody else's signature.
	b.secret = newSecret()
	b.start()
	b.grant("acme", "INV-3", "team_access")
	b.awaitState("copied", dead, 1)
}

// freeAddr is an address on which nothing listens at the moment.
func freeAddr(t *testing.T) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	return lis.Addr().String()
}
