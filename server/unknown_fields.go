package server

import (
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// checkUnknownFields refuses fields that this version does not know, at any depth: a grant must not drop half of what a newer
// caller meant. A known field that arrived with another wire type counts as unknown too. The path names the field by its
// number, for example `grant.15`; the root's own path may be empty.
func checkUnknownFields(v *violations, path string, root proto.Message) {
	// The usual request has none, so the walk that finds out builds no paths.
	if m := root.ProtoReflect(); hasUnknownFields(m) {
		walkUnknownFields(v, path, m)
	}
}

func hasUnknownFields(m protoreflect.Message) bool {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	for field := range messageFields(m) {
		value := m.Get(field)
		if !field.IsList() {
			if hasUnknownFields(value.Message()) {
				return true
			}
			continue
		}
		for i := range value.List().Len() {
			if hasUnknownFields(value.List().Get(i).Message()) {
				return true
			}
		}
	}
	return false
}

func walkUnknownFields(v *violations, path string, m protoreflect.Message) {
	addUnknownFields(v, path, m.GetUnknown())
	for field := range messageFields(m) {
		value, at := m.Get(field), fieldPath(path, field.TextName())
		if !field.IsList() {
			walkUnknownFields(v, at, value.Message())
			continue
		}
		for i := range value.List().Len() {
			walkUnknownFields(v, at+"["+strconv.Itoa(i)+"]", value.List().Get(i).Message())
		}
	}
}

// messageFields yields the populated fields that hold messages. Maps to messages do not occur in requests, and the entries of a map
// keep no unknown fields.
func messageFields(m protoreflect.Message) func(yield func(protoreflect.FieldDescriptor) bool) {
	return func(yield func(protoreflect.FieldDescriptor) bool) {
		fields := m.Descriptor().Fields()
		for i := range fields.Len() {
			field := fields.Get(i)
			if field.Message() != nil && !field.IsMap() && m.Has(field) && !yield(field) {
				return
			}
		}
	}
}

// addUnknownFields names each unknown field of one message once, by ascending number.
func addUnknownFields(v *violations, path string, unknown protoreflect.RawFields) {
	var numbers []protowire.Number
	for len(unknown) > 0 {
		number, _, n := protowire.ConsumeField(unknown)
		if n < 0 {
			// Only a message built in this process can hold bytes that are no fields.
			v.add(path, ruleUnknownField)
			break
		}
		numbers = append(numbers, number)
		unknown = unknown[n:]
	}
	slices.Sort(numbers)
	for _, number := range slices.Compact(numbers) {
		v.add(fieldPath(path, strconv.Itoa(int(number))), ruleUnknownField)
	}
}

func fieldPath(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
