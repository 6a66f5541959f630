package bench

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// receiver is a webhook's receiver that costs next to nothing: it reads each request of HTTP/1.1 to its end, notes its delivery key
// and answers 204. What is measured is who calls it.
type receiver struct {
	url      string
	listener net.Listener
	arrivals

	mu   sync.Mutex
	keys map[uint64]struct{} // the beginnings of the keys that arrived
}

// arrivals are what a destination got: how many different deliveries, and when the first one came.
type arrivals struct {
	distinct atomic.Int64
	first    atomic.Pointer[time.Time]
}

func (a *arrivals) add() {
	if a.distinct.Add(1) == 1 {
		now := time.Now()
		a.first.Store(&now)
	}
}

func startReceiver() (*receiver, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &receiver{url: fmt.Sprintf("http://%s/events", listener.Addr()), listener: listener, keys: make(map[uint64]struct{})}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go r.serve(conn)
		}
	}()
	return r, nil
}

func (r *receiver) stop() { r.listener.Close() }

func (r *receiver) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 8<<10)
	for {
		key, length := uint64(0), 0
		for {
			line, err := in.ReadSlice('\n')
			if err != nil {
				return
			}
			line = bytes.TrimRight(line, "\r\n")
			if len(line) == 0 {
				break
			}
			name, value, _ := bytes.Cut(line, []byte(": "))
			switch string(name) {
			case "Content-Length":
				if length, err = strconv.Atoi(string(value)); err != nil {
					return
				}
			case "Idempotency-Key":
				var start [8]byte
				if _, err := hex.Decode(start[:], value[:min(len(value), 16)]); err != nil {
					return
				}
				key = binary.BigEndian.Uint64(start[:])
			}
		}
		if _, err := in.Discard(length); err != nil {
			return
		}
		r.note(key)
		if _, err := io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n"); err != nil {
			return
		}
	}
}

func (r *receiver) note(key uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, again := r.keys[key]; !again {
		r.keys[key] = struct{}{}
		r.add()
	}
}
