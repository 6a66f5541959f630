package main

import (
	"os"

	"github.com/grantd/grantd/store"
)

// loadCatalog reads the catalogue from a file. Without one, every entitlement type may be granted.
func loadCatalog(file string) (*store.Catalog, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return store.ParseCatalog(file, text)
}
