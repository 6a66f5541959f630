package outbox

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// secret names where a secret is found: in a file or in a variable of the environment. It never holds the secret itself, so that
// nothing which prints a configuration can show it.
type secret struct{ file, env string }

// errNoSecret says where a secret should be, and never what was found there.
var errNoSecret = errors.New("holds no secret")

// read returns the secret as it is now, without the white space around it. A file is read each time, so that its replacement
// counts from the next attempt on. The error names the file or the variable.
func (s secret) read(getenv func(string) string) (string, error) {
	if s.env != "" {
		value := strings.TrimSpace(getenv(s.env))
		if value == "" {
			return "", fmt.Errorf("the variable %s %w", s.env, errNoSecret)
		}
		return value, nil
	}
	text, err := os.ReadFile(s.file)
	if err != nil {
		return "", err
	}
	value := strings.TrimSpace(string(text))
	if value == "" {
		return "", fmt.Errorf("the file %s %w", s.file, errNoSecret)
	}
	return value, nil
}

func (s secret) String() string {
	if s.env != "" {
		return "variable " + s.env
	}
	return "file " + s.file
}
