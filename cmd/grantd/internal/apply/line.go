package apply

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// maxLineBytes is above what the server accepts in one message.
const maxLineBytes = 8 << 20

// line is one request of the file.
type line struct {
	number  int
	method  protoreflect.MethodDescriptor
	request proto.Message
	expect  *Answer // nil: the file does not say

	// repeatAfter is how many lines later the same request is sent again; 0: it is not.
	repeatAfter int
	// first is what the first arrival was told, in the line that stands for the second.
	first *Answer
}

// isWrite says whether the method changes anything, by what the contract declares of it.
func (l *line) isWrite() bool {
	options, ok := l.method.Options().(*descriptorpb.MethodOptions)
	return !ok || options.GetIdempotencyLevel() != descriptorpb.MethodOptions_NO_SIDE_EFFECTS
}

func (l *line) fullMethod() string {
	return fmt.Sprintf("/%s/%s", l.method.Parent().FullName(), l.method.Name())
}

// reader takes lines off a file, one by one.
type reader struct {
	scanner *bufio.Scanner
	service protoreflect.ServiceDescriptor
	number  int
}

func newReader(in io.Reader) (*reader, error) {
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(
		protoreflect.FullName(entitlementv1.EntitlementService_ServiceDesc.ServiceName))
	if err != nil {
		return nil, err
	}
	service, ok := found.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil, fmt.Errorf("%s is no service", found.FullName())
	}
	scanner := bufio.NewScanner(in)
	scanner.Buffer(make([]byte, 64<<10), maxLineBytes)
	return &reader{scanner: scanner, service: service}, nil
}

// next returns io.EOF at the end. Any other error names the line. Blank lines are passed over.
func (r *reader) next() (*line, error) {
	for r.scanner.Scan() {
		r.number++
		text := bytes.TrimSpace(r.scanner.Bytes())
		if len(text) == 0 {
			continue
		}
		l, err := r.parse(text)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", r.number, err)
		}
		return l, nil
	}
	if err := r.scanner.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", r.number+1, err)
	}
	return nil, io.EOF
}

func (r *reader) parse(text []byte) (*line, error) {
	var raw struct {
		Method  string          `json:"method"`
		Request json.RawMessage `json:"request"`
		Expect  *Answer         `json:"expect"`
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&raw); err != nil {
		return nil, err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("more than one JSON value")
	}
	method := r.service.Methods().ByName(protoreflect.Name(raw.Method))
	if method == nil || method.IsStreamingClient() || method.IsStreamingServer() {
		return nil, fmt.Errorf("unknown method %q", raw.Method)
	}
	if method.Output().FullName() == (*entitlementv1.BatchGrantEntitlementsResponse)(nil).ProtoReflect().Descriptor().FullName() {
		return nil, fmt.Errorf("%s has many answers: write its requests as lines, and group them with --batch", raw.Method)
	}
	if len(raw.Request) == 0 {
		return nil, errors.New(`no "request"`)
	}
	request, err := newMessage(method.Input())
	if err != nil {
		return nil, err
	}
	if err := protojson.Unmarshal(raw.Request, request); err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	return &line{number: r.number, method: method, request: request, expect: raw.Expect}, nil
}

func newMessage(descriptor protoreflect.MessageDescriptor) (proto.Message, error) {
	messageType, err := protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName())
	if err != nil {
		return nil, err
	}
	return messageType.New().Interface(), nil
}
