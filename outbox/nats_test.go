package outbox_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/grantd/grantd/outbox"
)

func TestNATS_EventArrives(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	kind := openKind(t, natsDestination(b.url(), "      stream: EVENTS\n"), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != "" {
		t.Fatalf("got %+v", got)
	}
	m, err := stream.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if m.Subject != "entitlements.granted" || string(m.Data) != string(d.Body) {
		t.Errorf("got %s\n%s", m.Subject, m.Data)
	}
	for name, want := range map[string]string{
		"Nats-Msg-Id": d.Key, "Idempotency-Key": d.Key, "Content-Type": "application/cloudevents+json",
	} {
		if got := m.Header.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
}

// Baggage may hold anything that a caller ever put there. An internal destination is told the trace and the key, an external one
// nothing.
func TestNATS_TraceAndBaggage(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	for i, internal := range []bool{true, false} {
		text := natsDestination(b.url(), "")
		if !internal {
			text = strings.Replace(text, "internal: true", "internal: false", 1)
		}
		kind := openKind(t, text, nil)
		d := rendered(t, kind)
		if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" {
			t.Fatalf("got %+v", got)
		}
		m, err := stream.GetMsg(t.Context(), uint64(i+1))
		if err != nil {
			t.Fatal(err)
		}
		wantTrace, wantBaggage := "", ""
		if internal {
			wantTrace, wantBaggage = "00-01020300000000000000000000000000-", "entitlement.idempotency_key="
		}
		for name, want := range map[string]string{"traceparent": wantTrace, "baggage": wantBaggage} {
			got := m.Header.Get(name)
			if !strings.HasPrefix(got, want) || (want == "") != (got == "") || strings.Contains(got, ",") {
				t.Errorf("internal %v: %s is %q", internal, name, got)
			}
		}
	}
}

func TestNATS_AgainIsADuplicate(t *testing.T) {
	b := newBroker(t, nil)
	stream := b.stream(t, b.jetStream(t), nil)
	kind := openKind(t, natsDestination(b.url(), ""), nil)
	d := rendered(t, kind)
	const attempts = 32
	var wg sync.WaitGroup
	notes := make([]string, attempts)
	for i := range attempts {
		wg.Go(func() {
			got := kind.Send(within(t, time.Minute), d)
			if got.Verdict != "delivered" {
				t.Errorf("got %+v", got)
			}
			notes[i] = got.Note
		})
	}
	wg.Wait()
	first := 0
	for _, note := range notes {
		if note == "" {
			first++
		}
	}
	if first != 1 || stored(t, stream) != 1 {
		t.Errorf("%d attempts were the first, and the stream holds %d messages", first, stored(t, stream))
	}
}

// The acknowledgement is lost: the event may be there. The next attempt is told that it is.
func TestNATS_LostAcknowledgement(t *testing.T) {
	b := newBroker(t, nil)
	js := b.jetStream(t)
	stream := b.stream(t, js, func(c *jetstream.StreamConfig) { c.NoAck = true })
	kind := openKind(t, strings.Replace(natsDestination(b.url(), ""), "timeout: 2s", "timeout: 200ms", 1), nil)
	d := rendered(t, kind)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "uncertain" || !got.Unreachable {
		t.Fatalf("without an acknowledgement: got %+v", got)
	}
	b.stream(t, js, nil)
	if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != "duplicate" {
		t.Errorf("again: got %+v", got)
	}
	if n := stored(t, stream); n != 1 {
		t.Errorf("the stream holds %d messages", n)
	}
}

// The stream's window has passed, and with it the memory of the message's id. Only with unique subjects the stream still knows the
// event.
func TestNATS_AfterTheWindow(t *testing.T) {
	for unique, want := range map[bool]string{true: "duplicate", false: ""} {
		t.Run(fmt.Sprint(unique), func(t *testing.T) {
			b := newBroker(t, nil)
			js := b.jetStream(t)
			stream := b.stream(t, js, nil)
			kind := openKind(t, natsDestination(b.url(), fmt.Sprintf("      unique_subjects: %v\n", unique)), nil)
			d := rendered(t, kind)
			subject := "entitlements.granted"
			if unique {
				subject += "." + d.Key
			}
			// As after the window: the message stands there, and its id is not known.
			if _, err := js.Publish(t.Context(), subject, d.Body); err != nil {
				t.Fatal(err)
			}
			if got := kind.Send(within(t, 5*time.Second), d); got.Verdict != "delivered" || got.Note != want {
				t.Errorf("got %+v, want the note %q", got, want)
			}
			if n := stored(t, stream); n != map[bool]uint64{true: 1, false: 2}[unique] {
				t.Errorf("the stream holds %d messages", n)
			}
		})
	}
}

// Nothing that an operator can mend at the broker is a reason to give an event up.
func TestNATS_WhatAFailureMeans(t *testing.T) {
	for name, test := range map[string]struct {
		stream func(*jetstream.StreamConfig)
		server func(*server.Options)
		more   string
		// mend makes the next attempt succeed; nil where nothing could.
		mend func(t *testing.T, b *broker, js jetstream.JetStream, stream jetstream.Stream)
		want outbox.Attempt
	}{
		"no stream": {
			stream: func(c *jetstream.StreamConfig) { c.Subjects = []string{"elsewhere.>"} },
			mend:   func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) { b.stream(t, js, nil) },
			want:   outbox.Attempt{Verdict: "transient", Unreachable: true, Reason: "no stream takes the subject"},
		},
		"another stream": {
			stream: func(c *jetstream.StreamConfig) { c.Name = "WRONG" },
			more:   "      stream: EVENTS\n",
			mend: func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) {
				if err := js.DeleteStream(t.Context(), "WRONG"); err != nil {
					t.Fatal(err)
				}
				b.stream(t, js, nil)
			},
			want: outbox.Attempt{Verdict: "transient", Unreachable: true, StatusCode: http.StatusBadRequest, Reason: "expected stream does not match"},
		},
		"the stream is full": {
			stream: func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 100, jetstream.DiscardNew },
			mend:   func(t *testing.T, b *broker, js jetstream.JetStream, _ jetstream.Stream) { b.stream(t, js, nil) },
			want:   outbox.Attempt{Verdict: "transient", Unreachable: true, StatusCode: http.StatusServiceUnavailable, Reason: "maximum bytes exceeded"},
		},
		"too large for the stream": {
			stream: func(c *jetstream.StreamConfig) { c.MaxMsgSize = 100 },
			want:   outbox.Attempt{Verdict: "permanent", Reason: "message size exceeds maximum allowed"},
		},
		"too large for the server": {
			server: func(o *server.Options) { o.MaxPayload = 700 },
			want:   outbox.Attempt{Verdict: "permanent", Reason: "maximum payload exceeded"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBroker(t, test.server)
			js := b.jetStream(t)
			stream := b.stream(t, js, test.stream)
			kind := openKind(t, natsDestination(b.url(), test.more), nil)
			d := rendered(t, kind)
			got := kind.Send(within(t, time.Minute), d)
			if !strings.Contains(got.Reason, test.want.Reason) {
				t.Errorf("the reason is %q, want %q", got.Reason, test.want.Reason)
			}
			got.Reason = test.want.Reason
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if test.mend == nil {
				return
			}
			test.mend(t, b, js, stream)
			if got := kind.Send(within(t, time.Minute), d); got.Verdict != "delivered" {
				t.Errorf("mended: got %+v", got)
			}
		})
	}
}
