package store

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrPageToken says that a page token was not made by this service for this very list.
var ErrPageToken = errors.New("the page token does not belong to this list")

const (
	defaultPageSize = 100
	maxPageSize     = 1000
)

// Page is a part of a list that is asked for.
type Page struct {
	// Size is how many rows at most, 1 to 1000; 0 stands for 100.
	Size int
	// Token is that of the page before, empty for the first page.
	Token string
}

func (p Page) limit() int {
	if p.Size == 0 {
		return defaultPageSize
	}
	return min(p.Size, maxPageSize)
}

// pageTokens makes and reads tokens: the last row's key, signed together with what was listed, so that a token is good for that
// list alone. A token names a place, not a snapshot: it survives every insert.
type pageTokens struct {
	secret []byte
}

const pageTokenSecretSQL = `SELECT secret FROM page_token_secret`

func (s *Store) loadPageTokens(ctx context.Context) error {
	if err := s.reads.QueryRow(ctx, pageTokenSecretSQL).Scan(&s.tokens.secret); err != nil {
		return fmt.Errorf("read the secret of page tokens: %w", err)
	}
	return nil
}

// sign covers the list's name and filter, and the place in it.
func (t pageTokens) sign(list []string, place string) []byte {
	mac := hmac.New(sha256.New, t.secret)
	for _, part := range append(list, place) {
		mac.Write(binary.AppendUvarint(nil, uint64(len(part))))
		mac.Write([]byte(part))
	}
	return mac.Sum(nil)[:16]
}

// after makes the token for what follows a place in a list.
func (t pageTokens) after(list []string, place string) string {
	return base64.RawURLEncoding.EncodeToString(append(t.sign(list, place), place...))
}

// place reads a token; the empty one is the place before every row.
func (t pageTokens) place(list []string, token string) (string, error) {
	if token == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) < 16 {
		return "", ErrPageToken
	}
	place := string(raw[16:])
	// As text, since the decoder passes over line breaks.
	if !hmac.Equal([]byte(token), []byte(t.after(list, place))) {
		return "", ErrPageToken
	}
	return place, nil
}
