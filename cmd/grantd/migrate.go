package main

import (
	"context"
	"fmt"

	"github.com/grantd/grantd/migrations"
)

// migrateCmd is `grantd migrate`.
type migrateCmd struct {
	DatabaseURL string `name:"database-url" required:"" help:"PostgreSQL URL of a login that may create schemas and roles." env:"GRANTD_DATABASE_URL"`
}

func (c *migrateCmd) run(ctx context.Context, io stdio) error {
	ran, err := migrations.Up(ctx, c.DatabaseURL)
	if err != nil {
		return err
	}
	for _, name := range ran {
		fmt.Fprintln(io.stdout, "applied", name)
	}
	if len(ran) == 0 {
		fmt.Fprintln(io.stdout, "up to date")
	}
	return nil
}
