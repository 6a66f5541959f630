package store

import (
	"runtime"
	"testing"
	"weak"
)

// What a batch wrote was held until the next one that was as large: columns pointed into its rows, and through them to commands and bodies.
func TestOutput_HoldsNothingOfABatch(t *testing.T) {
	var o output
	write := func() (weak.Pointer[newDelivery], weak.Pointer[Command], weak.Pointer[Entitlement]) {
		c := &Command{Origin: Origin{TraceID: [16]byte{1}}}
		row := &newDelivery{entry: &Entry{}, origin: &c.Origin, notify: &Notify{}, body: make([]byte, 1<<20)}
		turned := &Entitlement{}
		o.deliveries = append(o.deliveries, row)
		o.notifyColumns.of([]*newDelivery{row})
		o.turnColumns.of([]*Entitlement{turned})
		return weak.Make(row), weak.Make(c), weak.Make(turned)
	}
	row, command, turned := write()
	o.reset()
	runtime.GC()
	if row.Value() != nil || command.Value() != nil || turned.Value() != nil {
		t.Errorf("held: the row %v, its command %v, its entitlement %v", row.Value() != nil, command.Value() != nil, turned.Value() != nil)
	}
	runtime.KeepAlive(&o)
}
