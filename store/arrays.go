package store

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// arrayCodec encodes a []T without an allocation for each element, which pgx's own makes: half of all allocations of a grant were
// for that. The row types stand on it too. Whatever is not a []T, and all decoding, is left to pgx.
type arrayCodec[T any] struct {
	*pgtype.ArrayCodec
	elementOID uint32
	// put appends one element's bytes, or reports that it is NULL.
	put func(buf []byte, v T) (_ []byte, isNull bool)
}

func (c arrayCodec[T]) PlanEncode(m *pgtype.Map, oid uint32, format int16, value any) pgtype.EncodePlan {
	if _, ok := value.([]T); ok && format == pgtype.BinaryFormatCode {
		return arrayPlan[T](c)
	}
	return c.ArrayCodec.PlanEncode(m, oid, format, value)
}

type arrayPlan[T any] arrayCodec[T]

// maxGrowth bounds the room that one element can ask for on behalf of the others.
const maxGrowth = 1 << 20

// Encode writes PostgreSQL's binary form of a one-dimensional array.
func (p arrayPlan[T]) Encode(value any, buf []byte) ([]byte, error) {
	values := value.([]T)
	dimensions, hasNull := uint32(1), uint32(0)
	if len(values) == 0 {
		dimensions = 0
	}
	buf = binary.BigEndian.AppendUint32(buf, dimensions)
	flags := len(buf)
	buf = binary.BigEndian.AppendUint32(buf, 0)
	buf = binary.BigEndian.AppendUint32(buf, p.elementOID)
	if len(values) == 0 {
		return buf, nil
	}
	buf = binary.BigEndian.AppendUint32(buf, uint32(len(values)))
	buf = binary.BigEndian.AppendUint32(buf, 1) // the first index
	first := len(buf)
	for i, v := range values {
		if i == 1 {
			// The others are about as long, so that the buffer need not grow step by step.
			buf = slices.Grow(buf, min((len(buf)-first)*(len(values)-1), maxGrowth))
		}
		length := len(buf)
		buf = append(buf, 0xff, 0xff, 0xff, 0xff) // the length -1 says NULL
		var isNull bool
		if buf, isNull = p.put(buf, v); isNull {
			hasNull = 1
			continue
		}
		binary.BigEndian.PutUint32(buf[length:], uint32(len(buf)-length-4))
	}
	binary.BigEndian.PutUint32(buf[flags:], hasNull)
	return buf, nil
}

// postgresEpoch is where a timestamptz counts its microseconds from.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

func registerArrays(m *pgtype.Map) {
	register(m, pgtype.TextArrayOID, pgtype.TextOID, func(buf []byte, v string) ([]byte, bool) {
		return append(buf, v...), false
	})
	register(m, pgtype.ByteaArrayOID, pgtype.ByteaOID, func(buf []byte, v []byte) ([]byte, bool) {
		return append(buf, v...), false
	})
	register(m, pgtype.Int2ArrayOID, pgtype.Int2OID, func(buf []byte, v int16) ([]byte, bool) {
		return binary.BigEndian.AppendUint16(buf, uint16(v)), false
	})
	register(m, pgtype.Int8ArrayOID, pgtype.Int8OID, func(buf []byte, v int64) ([]byte, bool) {
		return binary.BigEndian.AppendUint64(buf, uint64(v)), false
	})
	register(m, pgtype.UUIDArrayOID, pgtype.UUIDOID, func(buf []byte, v [16]byte) ([]byte, bool) {
		return append(buf, v[:]...), false
	})
	register(m, pgtype.TIDArrayOID, pgtype.TIDOID, func(buf []byte, v pgtype.TID) ([]byte, bool) {
		return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint32(buf, v.BlockNumber), v.OffsetNumber), false
	})
	register(m, pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, func(buf []byte, v *time.Time) ([]byte, bool) {
		if v == nil {
			return buf, true
		}
		return binary.BigEndian.AppendUint64(buf, uint64(v.UnixMicro()-postgresEpoch)), false
	})
}

func register[T any](m *pgtype.Map, arrayOID, elementOID uint32, put func([]byte, T) ([]byte, bool)) {
	array, _ := m.TypeForOID(arrayOID)
	m.RegisterType(&pgtype.Type{
		Name: array.Name, OID: arrayOID,
		Codec: arrayCodec[T]{ArrayCodec: array.Codec.(*pgtype.ArrayCodec), elementOID: elementOID, put: put},
	})
}
