package bench

import (
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
)

// collector takes whatever is exported to it over OTLP's gRPC, and keeps nothing: the machine's cores are shared with what is measured.
type collector struct {
	addr   string
	server *grpc.Server
}

func startCollector() (*collector, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c := &collector{addr: listener.Addr().String(), server: grpc.NewServer(grpc.ForceServerCodecV2(unread{}), grpc.MaxRecvMsgSize(64<<20),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			if err := stream.RecvMsg(nil); err != nil {
				return err
			}
			return stream.SendMsg(nil)
		}))}
	go c.server.Serve(listener) // it ends with stop
	return c, nil
}

func (c *collector) stop() { c.server.Stop() }

// unread is a codec whose messages are empty when sent, which is how OTLP says that all was taken, and left unread when received.
type unread struct{}

func (unread) Marshal(any) (mem.BufferSlice, error) { return nil, nil }
func (unread) Unmarshal(mem.BufferSlice, any) error { return nil }
func (unread) Name() string                         { return "unread" }
