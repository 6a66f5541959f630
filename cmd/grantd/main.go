// Command grantd is an entitlement authority: it makes a paid invoice grant an entitlement exactly once, however often the
// request arrives.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr); err != nil {
		var usage *kong.ParseError
		fmt.Fprintf(os.Stderr, "grantd: %v\n", err)
		if errors.As(err, &usage) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

// config is every flag of every command. Each flag has a GRANTD_* variable, which --help names.
type config struct {
	Dev        devCmd        `cmd:"" help:"Run the service on a private PostgreSQL, to try it or to develop against it."`
	Serve      serveCmd      `cmd:"" help:"Run the service on your PostgreSQL."`
	Migrate    migrateCmd    `cmd:"" help:"Bring the database up to date, and stop."`
	Apply      applyCmd      `cmd:"" help:"Send a file of requests to a server, and count or check the answers."`
	Deliveries deliveriesCmd `cmd:"" help:"Look after deliveries: what waits for an operator, and what is done about it."`
	Explain    explainCmd    `cmd:"" help:"Tell an operation's whole story: every attempt, the ledger, deliveries, and what a replay would be told."`
	Bench      benchCmd      `cmd:"" help:"Measure a server, or a server beside pgbench."`
	Version    versionCmd    `cmd:"" help:"Print the version."`
}

// stdio is where a command writes, and what is around it.
type stdio struct {
	stdout, stderr io.Writer
	// terminal says that the standard output is one. Nothing is cut to fit where it is not.
	terminal bool
	// env has the variables, in the form NAME=value.
	env []string
}

// command is what each of them implements.
type command interface {
	run(ctx context.Context, io stdio) error
}

// exited is how a parser that has printed its help asks to stop.
type exited struct{ code int }

func run(ctx context.Context, args, env []string, stdout, stderr io.Writer) error {
	return runOn(ctx, args, stdio{stdout: stdout, stderr: stderr, terminal: isTerminal(stdout), env: env})
}

func runOn(ctx context.Context, args []string, io stdio) (err error) {
	defer func() {
		if p := recover(); p != nil {
			e, ok := p.(exited)
			if !ok {
				panic(p)
			}
			if e.code != 0 {
				err = fmt.Errorf("exit status %d", e.code)
			}
		}
	}()
	var cfg config
	parser, err := kong.New(&cfg,
		kong.Name("grantd"),
		kong.Description("An entitlement authority: a paid invoice grants an entitlement exactly once."),
		kong.Writers(io.stdout, io.stderr),
		kong.Exit(func(code int) { panic(exited{code}) }),
		kong.Resolvers(environment(io.env)),
		kong.Vars{"operator": operatorOf(io.env), "addr": defaultAddr},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if err != nil {
		return err
	}
	parsed, err := parser.Parse(args)
	if err != nil {
		return withHelp(err)
	}
	selected := parsed.Selected().Target.Addr().Interface().(command)
	return selected.run(ctx, io)
}

// withHelp says where a command that was called wrongly tells how it is called.
func withHelp(err error) error {
	var usage *kong.ParseError
	if !errors.As(err, &usage) || usage.Context == nil {
		return err
	}
	called := cmp.Or(usage.Context.Selected(), usage.Context.Model.Node)
	return fmt.Errorf("%w (see %s --help)", err, called.FullPath())
}

// environment reads the variables of the flags from env, rather than from the process, so that a command depends on nothing but
// its arguments.
func environment(env []string) kong.Resolver {
	variables := make(map[string]string, len(env))
	for _, e := range env {
		if name, value, ok := strings.Cut(e, "="); ok {
			variables[name] = value
		}
	}
	return kong.ResolverFunc(func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		for _, name := range flag.Envs {
			if value, ok := variables[name]; ok {
				return value, nil
			}
		}
		return nil, nil
	})
}
