package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
)

// versionCmd is `grantd version`.
type versionCmd struct{}

func (versionCmd) run(_ context.Context, io stdio) error {
	_, err := fmt.Fprintf(io.stdout, "grantd %s %s %s/%s\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

// buildVersion is the module's version or, in a build from a checkout, the commit.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return "devel"
}
