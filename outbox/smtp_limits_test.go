package outbox_test

import (
	"bufio"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/grantd/grantd/outbox"
)

// mailScript is a mail server that takes every mail. meets is called for each command, the empty one for the greeting, and returns true
// where it has answered, or does not want an answer.
func mailScript(t *testing.T, meets func(conn net.Conn, command string) bool) (addr string) {
	t.Helper()
	lis := listenOn(t, "127.0.0.1:0")
	t.Cleanup(func() { lis.Close() })
	serve := func(conn net.Conn) {
		defer conn.Close()
		lines := bufio.NewScanner(conn)
		for command := ""; ; command, _, _ = strings.Cut(lines.Text(), " ") {
			reply := map[string]string{"": "220 here", "DATA": "354 go on"}[command]
			if reply == "" {
				reply = "250 ok"
			}
			if !meets(conn, command) {
				conn.Write([]byte(reply + "\r\n"))
			}
			if command == "DATA" {
				for lines.Scan() && lines.Text() != "." {
				}
				conn.Write([]byte("250 taken\r\n"))
			}
			if !lines.Scan() {
				return
			}
		}
	}
	go func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			go serve(conn)
		}
	}()
	return lis.Addr().String()
}

// sendsSoon sends a mail to the server, and fails where that takes anything like its deadline.
func sendsSoon(t *testing.T, addr string) outbox.Attempt {
	t.Helper()
	kind := openKind(t, "destinations:"+mailHook("customer", addr), nil)
	d := rendered(t, kind)
	ended := make(chan outbox.Attempt, 1)
	go func() { ended <- kind.Send(within(t, 5*time.Minute), d) }()
	select {
	case got := <-ended:
		return got
	case <-time.After(30 * time.Second):
		t.Fatal("the attempt does not end")
		panic("unreachable")
	}
}

// The server has taken the mail, and does not answer the good-bye. Until the attempt ended at its deadline nothing was recorded, and a
// crash in that time left in doubt what was long accepted.
func TestSMTP_GoodByeIsNotWaitedFor(t *testing.T) {
	got := sendsSoon(t, mailScript(t, func(_ net.Conn, command string) bool { return command == "QUIT" }))
	if got.Verdict != "delivered" {
		t.Errorf("got %+v", got)
	}
}

// A server whose answer has no end must not fill the memory until the deadline.
func TestSMTP_EndlessAnswer(t *testing.T) {
	got := sendsSoon(t, mailScript(t, func(conn net.Conn, command string) bool {
		for line := []byte("250-" + strings.Repeat("x", 1000) + "\r\n"); command == "EHLO"; time.Sleep(time.Millisecond) {
			if _, err := conn.Write(line); err != nil {
				break
			}
		}
		return command == "EHLO"
	}))
	if got.Verdict != "transient" || !got.Unreachable || !strings.Contains(got.Reason, "too much") {
		t.Errorf("got %+v", got)
	}
}
