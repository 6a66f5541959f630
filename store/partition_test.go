package store

import (
	"testing"
	"time"
)

func TestPartitionName_ReadsBackAsItsDay(t *testing.T) {
	for day := time.Date(2024, 2, 27, 0, 0, 0, 0, time.UTC); day.Year() < 2026; day = day.AddDate(0, 0, 1) {
		if got, ok := partitionDay(partitionName(day)); !ok || !got.Equal(day) {
			t.Fatalf("%s reads as %v, %v", partitionName(day), got, ok)
		}
	}
}

func TestPartitionDay_OfOtherTables(t *testing.T) {
	for _, name := range []string{"attempts", "attempts_", "attempts_2026", "attempts_20260230", "attempts_20260301_old", "my_attempts_20260301"} {
		if day, ok := partitionDay(name); ok {
			t.Errorf("%s is taken for the day %v", name, day)
		}
	}
}
