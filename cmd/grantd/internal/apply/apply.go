// Package apply sends a file of requests to a server and is the authority for whether the answers are those that the file
// expects.
package apply

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

const (
	// MaxBatch is how many grants the contract allows in one call.
	MaxBatch      = 1000
	maxBatchBytes = 1 << 20
	// itemOverheadBytes is what the batch adds to each request: tag and length.
	itemOverheadBytes = 4
	// itemAttempts is how often a batch item is sent that says RETRYABLE_FAILURE; the retry policy cannot see it.
	itemAttempts = 5
)

// Options say how the lines are sent.
type Options struct {
	// Concurrency is how many calls may be under way; 1 keeps the order of the file.
	Concurrency int
	// Batch groups neighbouring GrantEntitlement lines into calls of that many; 1 does not.
	Batch int
	// Check judges the answers by the file's expectations, and those to second arrivals by what the first was told.
	Check bool
	// Duplicate is the share of writing lines that are sent a second time, from 0 to 1, chosen by Seed.
	Duplicate float64
	Seed      uint64
	// Timeout bounds each call, its retries included.
	Timeout time.Duration
	// Progress is called now and then with the number of requests answered; nil: it is not.
	Progress func(answered int)
}

// run is one pass over a file.
type run struct {
	options Options
	conn    grpc.ClientConnInterface
	report  *Report
	waiting waiting

	calls    chan []*line
	underWay sync.WaitGroup
	batch    []*line // being gathered
	size     int     // of its requests, in bytes
}

// Run sends every line and reports what they were told. An error that stops it, such as a line that is no request,
// comes with the report on the lines before it.
func Run(ctx context.Context, conn grpc.ClientConnInterface, in io.Reader, options Options) (*Report, error) {
	lines, err := newReader(in)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{
		options: options,
		conn:    conn,
		report:  newReport(options),
		calls:   make(chan []*line),
	}
	var workers sync.WaitGroup
	for range options.Concurrency {
		workers.Go(func() {
			for call := range r.calls {
				r.process(ctx, call)
				r.underWay.Done()
			}
		})
	}
	err = r.dispatch(ctx, lines)
	close(r.calls)
	workers.Wait()
	r.report.finish()
	return r.report, err
}

// dispatch hands out the lines in the order of the file, with second arrivals among them.
func (r *run) dispatch(ctx context.Context, lines *reader) error {
	chooser := newChooser(r.options.Duplicate, r.options.Seed)
	var failure error
	for {
		l, err := lines.next()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				failure = err
			}
			break
		}
		chooser.choose(l)
		if err := r.sendDue(ctx, l.number); err != nil {
			return err
		}
		if err := r.send(ctx, l); err != nil {
			return err
		}
	}
	if err := r.flush(ctx); err != nil {
		return err
	}
	r.underWay.Wait()
	if err := r.sendDue(ctx, math.MaxInt); err != nil {
		return err
	}
	if err := r.flush(ctx); err != nil {
		return err
	}
	return failure
}

func (r *run) sendDue(ctx context.Context, number int) error {
	for l := r.waiting.pop(number); l != nil; l = r.waiting.pop(number) {
		if err := r.send(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// send starts the line's call, or puts it into the batch being gathered.
func (r *run) send(ctx context.Context, l *line) error {
	if _, ok := l.request.(*entitlementv1.GrantEntitlementRequest); !ok || r.options.Batch <= 1 {
		if err := r.flush(ctx); err != nil {
			return err
		}
		return r.start(ctx, []*line{l})
	}
	size := proto.Size(l.request) + itemOverheadBytes
	if r.size+size > maxBatchBytes {
		if err := r.flush(ctx); err != nil {
			return err
		}
	}
	r.batch = append(r.batch, l)
	r.size += size
	if len(r.batch) < r.options.Batch {
		return nil
	}
	return r.flush(ctx)
}

func (r *run) flush(ctx context.Context) error {
	if len(r.batch) == 0 {
		return nil
	}
	batch := r.batch
	r.batch, r.size = nil, 0
	return r.start(ctx, batch)
}

func (r *run) start(ctx context.Context, call []*line) error {
	r.underWay.Add(1)
	select {
	case r.calls <- call:
		return nil
	case <-ctx.Done():
		r.underWay.Done()
		return ctx.Err()
	}
}

// process makes the call and sees to second arrivals. What was applied is sent again later. What was refused is sent
// again at once: by then nothing else can have changed the state that decides, so that the answer must be the same.
func (r *run) process(ctx context.Context, call []*line) {
	var again []*line
	for i, answered := range r.call(ctx, call) {
		l := call[i]
		r.report.add(l, answered)
		switch {
		case l.repeatAfter == 0 || answered.failed:
		case answered.applied():
			r.waiting.add(l.second(answered.Answer), l.number+l.repeatAfter)
		default:
			again = append(again, l.second(answered.Answer))
		}
	}
	if len(again) > 0 {
		for i, answered := range r.call(ctx, again) {
			r.report.add(again[i], answered)
		}
	}
	if r.options.Progress != nil {
		r.options.Progress(r.report.answered())
	}
}

// call returns a reply for each line. A call of several lines goes as one batch.
func (r *run) call(ctx context.Context, call []*line) []reply {
	_, isGrant := call[0].request.(*entitlementv1.GrantEntitlementRequest)
	if r.options.Batch > 1 && isGrant {
		return r.callBatch(ctx, call)
	}
	replies := make([]reply, 0, len(call))
	for _, l := range call {
		replies = append(replies, r.callOne(ctx, l))
	}
	return replies
}

func (r *run) callOne(ctx context.Context, l *line) reply {
	response, err := newMessage(l.method.Output())
	if err != nil {
		return replyOfError(err)
	}
	if err := r.invoke(ctx, l.fullMethod(), l.request, response); err != nil {
		return replyOfError(err)
	}
	return replyOf(response)
}

func (r *run) callBatch(ctx context.Context, call []*line) []reply {
	replies := make([]reply, len(call))
	open := make([]int, len(call)) // those without an answer yet
	for i := range call {
		open[i] = i
	}
	for attempt := 1; ; attempt++ {
		request := &entitlementv1.BatchGrantEntitlementsRequest{}
		for _, i := range open {
			request.Requests = append(request.Requests, call[i].request.(*entitlementv1.GrantEntitlementRequest))
		}
		response := &entitlementv1.BatchGrantEntitlementsResponse{}
		err := r.invoke(ctx, entitlementv1.EntitlementService_BatchGrantEntitlements_FullMethodName, request, response)
		if err == nil && len(response.GetResponses()) != len(open) {
			err = fmt.Errorf("%d answers to %d requests", len(response.GetResponses()), len(open))
		}
		if err != nil {
			for _, i := range open {
				replies[i] = replyOfError(err)
			}
			return replies
		}
		var unanswered []int
		var delay time.Duration
		for at, i := range open {
			replies[i] = replyOf(response.Responses[at])
			if replies[i].failed {
				unanswered = append(unanswered, i)
				delay = max(delay, response.Responses[at].GetFailure().GetRetryDelay().AsDuration())
			}
		}
		if len(unanswered) == 0 || attempt == itemAttempts {
			return replies
		}
		open = unanswered
		select {
		case <-time.After(min(delay, r.options.Timeout)):
		case <-ctx.Done():
			return replies
		}
	}
}

// invoke makes one call and counts its latency. While the server is away it waits for it.
func (r *run) invoke(ctx context.Context, method string, request, response proto.Message) error {
	ctx, cancel := context.WithTimeout(ctx, r.options.Timeout)
	defer cancel()
	begin := time.Now()
	err := r.conn.Invoke(ctx, method, request, response, grpc.WaitForReady(true))
	r.report.called(time.Since(begin))
	return err
}
