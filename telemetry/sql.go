package telemetry

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
)

// QueryTracer returns what makes the spans of statements, nil while tracing is off. Statements have their text, never their
// parameters, and only those under a recorded span are traced. Like ServerHandler it makes no metrics.
func (t *Telemetry) QueryTracer() pgx.QueryTracer {
	if !t.tracing {
		return nil
	}
	return &queryTracer{otelpgx.NewTracer(
		otelpgx.WithTracerProvider(t.TracerProvider),
		otelpgx.WithMeterProvider(metricnoop.NewMeterProvider()),
		// They come from a copy of the whole configuration, made for each span, and name the first host of several.
		otelpgx.WithDisableConnectionDetailsInAttributes(),
	)}
}

// queryTracer keeps values out of errors: the driver's own quote a parameter that they cannot encode, PostgreSQL's data
// exceptions one that cannot be read.
type queryTracer struct{ *otelpgx.Tracer }

func (q *queryTracer) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryEndData) {
	data.Err = withoutValues(data.Err)
	q.Tracer.TraceQueryEnd(ctx, conn, data)
}

func (q *queryTracer) TraceBatchQuery(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchQueryData) {
	data.Err = withoutValues(data.Err)
	q.Tracer.TraceBatchQuery(ctx, conn, data)
}

func (q *queryTracer) TraceBatchEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchEndData) {
	data.Err = withoutValues(data.Err)
	q.Tracer.TraceBatchEnd(ctx, conn, data)
}

func (q *queryTracer) TraceCopyFromEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceCopyFromEndData) {
	data.Err = withoutValues(data.Err)
	q.Tracer.TraceCopyFromEnd(ctx, conn, data)
}

// withoutValues lets through the errors that are known to hold none.
func withoutValues(err error) error {
	if err == nil {
		return nil
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		const dataException = "22"
		if !strings.HasPrefix(pg.Code, dataException) {
			return err
		}
		return &pgconn.PgError{Severity: pg.Severity, Code: pg.Code, Message: "data exception"}
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return err
	}
	for _, known := range []error{sql.ErrNoRows, context.Canceled, context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed} {
		if errors.Is(err, known) {
			return err
		}
	}
	return fmt.Errorf("%T", err)
}
