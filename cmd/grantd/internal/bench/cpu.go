package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// tick is the unit of the times in /proc: USER_HZ, which Linux shows as 100 to everybody.
const tick = 10 * time.Millisecond

// processTimes are the fields of /proc/PID/stat that matter here.
type processTimes struct {
	parent int
	own    time.Duration
	// waitedFor is that of children that have ended.
	waitedFor time.Duration
}

func readProcess(pid string) (processTimes, error) {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return processTimes{}, err
	}
	// The name stands in parentheses, and may hold any. After it come the state, the parent and, from the twelfth on, the times.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 15 {
		return processTimes{}, fmt.Errorf("process %s: %d fields", pid, len(fields))
	}
	number := func(i int) time.Duration {
		n, _ := strconv.ParseInt(fields[i], 10, 64)
		return time.Duration(n)
	}
	return processTimes{parent: int(number(1)), own: (number(11) + number(12)) * tick, waitedFor: (number(13) + number(14)) * tick}, nil
}

// cpu is what a server, its database and this process, which is the load, have used so far. It stays zero where there is no /proc.
type cpu struct{ server, postgres, load time.Duration }

func readCPU(server, postmaster int) (c cpu) {
	if p, err := readProcess(strconv.Itoa(os.Getpid())); err == nil {
		c.load = p.own
	}
	if p, err := readProcess(strconv.Itoa(server)); err == nil {
		c.server = p.own
	}
	if p, err := readProcess(strconv.Itoa(postmaster)); err == nil {
		c.postgres = p.own + p.waitedFor
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return c
	}
	for _, e := range entries {
		if e.Name()[0] < '1' || e.Name()[0] > '9' {
			continue
		}
		if p, err := readProcess(e.Name()); err == nil && p.parent == postmaster {
			c.postgres += p.own
		}
	}
	return c
}

func (c cpu) since(before cpu) cpu {
	return cpu{server: c.server - before.server, postgres: c.postgres - before.postgres, load: c.load - before.load}
}

// postmasterOf finds the process that all of a PostgreSQL's others are children of.
func postmasterOf(ctx context.Context, url string) (pid int, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return 0, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, `SELECT split_part(pg_read_file('postmaster.pid'), E'\n', 1)::int`).Scan(&pid)
	return pid, err
}
