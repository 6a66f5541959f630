package server

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// gRPC answers INTERNAL to what it cannot read as a method's message, a string that is not UTF-8 for example, and callers would take that
// for a bug of the service. It has sent that before any handler or interceptor could change it. So the codec here keeps such an error to
// itself, and the handler answers INVALID_ARGUMENT.

// received is a request on its way in.
type received struct {
	message any
	err     error
}

// codec is gRPC's own but for requests as received.
type codec struct {
	encoding.CodecV2
}

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	r, ok := v.(*received)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	r.err = c.CodecV2.Unmarshal(data, r.message)
	return nil
}

// wellFormed registers services whose requests come through the codec.
type wellFormed struct {
	grpc.ServiceRegistrar
}

func (w wellFormed) RegisterService(service *grpc.ServiceDesc, server any) {
	described := *service
	described.Methods = slices.Clone(service.Methods)
	for i := range described.Methods {
		m := &described.Methods[i]
		handle := m.Handler
		m.Handler = func(server any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return handle(server, ctx, func(message any) error { return receive(decode, message) }, interceptor)
		}
	}
	w.ServiceRegistrar.RegisterService(&described, server)
}

func receive(decode func(any) error, message any) error {
	r := received{message: message}
	if err := decode(&r); err != nil || r.err == nil {
		return err
	}
	var v violations
	v.add("", "The request must be a message of this method, and every string in it UTF-8.")
	return invalid(v)
}
