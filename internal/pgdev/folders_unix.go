//go:build unix

package pgdev

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Root's own folders are closed to the account that runs its servers.
const (
	rootCache = "/var/cache/grantd"
	rootData  = "/var/lib/grantd"
)

func (o Options) cacheDir() (string, error) {
	if o.CacheDir != "" {
		return filepath.Abs(o.CacheDir)
	}
	if os.Geteuid() == 0 {
		return rootCache, nil
	}
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "grantd"), err
}

// DefaultDataDir is a place for Options.DataDir that the server can reach: /var/lib/grantd for root, else "grantd" in
// the user's folder for configuration.
func DefaultDataDir() (string, error) {
	if os.Geteuid() == 0 {
		return rootData, nil
	}
	dir, err := os.UserConfigDir()
	return filepath.Join(dir, "grantd"), err
}

// TempDir is os.TempDir, but where this is root's and closed to the server's account, /tmp.
func TempDir(ctx context.Context) (string, error) {
	account, err := serverAccount()
	if err != nil {
		return "", err
	}
	return accountTempDir(ctx, account), nil
}

func accountTempDir(ctx context.Context, account *account) string {
	dir := os.TempDir()
	if account.checkReach(ctx, dir) != nil {
		return "/tmp"
	}
	return dir
}

// makeDir makes the cluster's folder where it is missing and checks that the server's account can enter it.
func (c *cluster) makeDir(ctx context.Context) error {
	mode := os.FileMode(0o700)
	if c.account != nil {
		mode = 0o711
	}
	_, err := os.Stat(c.dir)
	made := errors.Is(err, fs.ErrNotExist)
	if made {
		err = os.MkdirAll(c.dir, mode)
	}
	if err != nil {
		return err
	}
	if err := c.account.checkReach(ctx, c.dir); err != nil {
		if made {
			err = errors.Join(err, os.Remove(c.dir))
		}
		return err
	}
	return nil
}
