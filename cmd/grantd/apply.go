package main

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/grantd/grantd/client"
	"github.com/grantd/grantd/cmd/grantd/internal/apply"
)

// applyCmd is `grantd apply`.
type applyCmd struct {
	File string `arg:"" help:"File of requests, one JSON object a line: {\"method\", \"request\", \"expect\": {\"outcome\", \"detail\"}}. - reads standard input; .gz is unpacked."`

	Target      target        `embed:""`
	Concurrency int           `help:"Calls under way at once; 1 keeps the order of the file. 0: 1 with --check, 2 with --batch, else 16." default:"0" env:"GRANTD_APPLY_CONCURRENCY"`
	Batch       int           `help:"Group that many neighbouring GrantEntitlement lines into one BatchGrantEntitlements call, at most 1000." default:"1" env:"GRANTD_APPLY_BATCH"`
	Check       bool          `help:"List each line whose answer is not the expected one, and fail if there is any." env:"GRANTD_APPLY_CHECK"`
	Duplicate   float64       `help:"Share of the writing lines to send a second time, from 0 to 1, as a staging environment should." default:"0" env:"GRANTD_APPLY_DUPLICATE"`
	Seed        uint64        `help:"Chooses which lines those are." default:"1" env:"GRANTD_APPLY_SEED"`
	Timeout     time.Duration `help:"Longest time for one call, with its retries." default:"30s" env:"GRANTD_APPLY_TIMEOUT"`
}

// shownFailures bounds the list of failed lines where nobody asked for all of them.
const shownFailures = 10

func (c *applyCmd) run(ctx context.Context, io stdio) error {
	options, err := c.options()
	if err != nil {
		return err
	}
	in, size, err := openInput(c.File)
	if err != nil {
		return err
	}
	defer in.Close()
	conn, err := c.Target.dial(ctx, grpc.WithDefaultServiceConfig(client.ServiceConfig()))
	if err != nil {
		return err
	}
	defer conn.Close()

	counted := &countingReader{in: in}
	progress := newProgress(io.stderr, counted, size)
	options.Progress = progress.show
	lines, err := unpack(counted, c.File)
	if err != nil {
		return err
	}
	report, failure := apply.Run(ctx, conn, bufio.NewReaderSize(lines, 64<<10), options)
	progress.clear()
	if report == nil {
		return failure
	}
	return errors.Join(failure, c.print(report, io))
}

func (c *applyCmd) options() (apply.Options, error) {
	options := apply.Options{
		Concurrency: c.Concurrency,
		Batch:       c.Batch,
		Check:       c.Check,
		Duplicate:   c.Duplicate,
		Seed:        c.Seed,
		Timeout:     c.Timeout,
	}
	switch {
	case c.Concurrency < 0:
		return options, errors.New("--concurrency must not be negative")
	case c.Batch < 1 || c.Batch > apply.MaxBatch:
		return options, fmt.Errorf("--batch must be between 1 and %d", apply.MaxBatch)
	case !(c.Duplicate >= 0 && c.Duplicate <= 1):
		return options, errors.New("--duplicate must be between 0 and 1")
	case c.Timeout <= 0:
		return options, errors.New("--timeout must be positive")
	case c.Concurrency == 0 && c.Check:
		options.Concurrency = 1
	case c.Concurrency == 0 && c.Batch > 1:
		options.Concurrency = 2
	case c.Concurrency == 0:
		options.Concurrency = 16
	}
	return options, nil
}

// print returns an error when the command has to fail.
func (c *applyCmd) print(report *apply.Report, io stdio) error {
	if err := report.Write(io.stdout); err != nil {
		return err
	}
	limit := shownFailures
	if c.Check {
		limit = 0
	}
	if report.Failed() > 0 {
		fmt.Fprintf(io.stdout, "\nwithout an answer:\n")
		if err := report.WriteFailures(io.stdout, limit); err != nil {
			return err
		}
	}
	if c.Check && report.Differing() > 0 {
		fmt.Fprintf(io.stdout, "\nnot as expected:\n")
		if err := report.WriteDifferences(io.stdout); err != nil {
			return err
		}
	}
	switch {
	case c.Check && report.Differing() > 0:
		return fmt.Errorf("answers not as expected: %d", report.Differing())
	case report.Failed() > 0:
		return fmt.Errorf("requests without an answer: %d", report.Failed())
	case c.Check && report.Expecting() == 0:
		return errors.New(`--check: no line has an "expect"`)
	case c.Check:
		_, err := fmt.Fprintf(io.stdout, "answers as expected: all %d\n", report.Expecting())
		return err
	}
	return nil
}

// unpack reads through gzip where the file's name says so.
func unpack(in io.Reader, name string) (io.Reader, error) {
	if !strings.HasSuffix(name, ".gz") {
		return in, nil
	}
	lines, err := gzip.NewReader(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return lines, nil
}

// openInput returns the size in bytes, 0 where it is not known.
func openInput(name string) (io.ReadCloser, int64, error) {
	if name == "-" {
		return io.NopCloser(os.Stdin), 0, nil
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, file.Close())
	}
	if !info.Mode().IsRegular() {
		return file, 0, nil
	}
	return file, info.Size(), nil
}
