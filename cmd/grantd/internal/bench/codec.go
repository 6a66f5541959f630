package bench

import (
	"errors"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// outcomes counts answers by the outcome's number; unknown ones stand under 0.
type outcomes [8]uint64

// codec is gRPC's own for requests. Of a response it reads the outcomes alone, as pgbench reads no more of an answer than its
// tag: here the machine's cores are shared with what is measured.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	counts, ok := v.(*outcomes)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	return counts.read(buffer.ReadOnlyData())
}

const (
	outcomeField   = 1 // of GrantEntitlementResponse, a number
	responsesField = 1 // of BatchGrantEntitlementsResponse, messages
)

// read adds the outcome of a single answer, or those of a batch: they differ in the first field's type.
func (o *outcomes) read(message []byte) error {
	single := true
	var outcome uint64
	for len(message) > 0 {
		number, wireType, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		switch {
		case number == outcomeField && wireType == protowire.VarintType:
			outcome, n = protowire.ConsumeVarint(message)
		case number == responsesField && wireType == protowire.BytesType:
			var item []byte
			if item, n = protowire.ConsumeBytes(message); n >= 0 {
				single = false
				if err := o.read(item); err != nil {
					return err
				}
			}
		default:
			n = protowire.ConsumeFieldValue(number, wireType, message)
		}
		if n < 0 {
			return errors.Join(errors.New("malformed answer"), protowire.ParseError(n))
		}
		message = message[n:]
	}
	if single {
		if outcome >= uint64(len(o)) {
			outcome = 0
		}
		o[outcome]++
	}
	return nil
}

func (o *outcomes) total() uint64 {
	var sum uint64
	for _, n := range o {
		sum += n
	}
	return sum
}

// add keeps apart by name.
func (o *outcomes) add(to map[string]uint64) {
	for number, n := range o {
		if n > 0 {
			to[entitlementv1.Outcome(number).String()] += n
		}
	}
}
