package apply

import (
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// Answer is what one request was told, or is expected to be told.
type Answer struct {
	// Outcome is the name of the outcome, for example OUTCOME_NEWLY_APPLIED; the name of the status code, for example
	// INVALID_ARGUMENT, where the call failed; or OK for a method that has no outcome.
	Outcome string `json:"outcome"`
	// Detail is what matched or why it was refused, without the enum's prefix, for example BUSINESS_KEY; of a failed call,
	// the reason or the first field that is wrong. Empty: none.
	Detail string `json:"detail"`
}

func (a Answer) String() string {
	if a.Detail == "" {
		return a.Outcome
	}
	return a.Outcome + " " + a.Detail
}

// applied says that the effect is there.
func (a Answer) applied() bool {
	return a.Outcome == entitlementv1.Outcome_OUTCOME_NEWLY_APPLIED.String() ||
		a.Outcome == entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED.String()
}

// alreadyByKey is what the second arrival of an applied request must be told.
func alreadyByKey() Answer {
	return Answer{
		Outcome: entitlementv1.Outcome_OUTCOME_ALREADY_APPLIED.String(),
		Detail:  enumName(entitlementv1.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY.Descriptor(), entitlementv1.MatchedBy_MATCHED_BY_IDEMPOTENCY_KEY.Number()),
	}
}

// reply is an answer with what people need beside it.
type reply struct {
	Answer
	// failed says that there is no answer: the call ended in a status, or the batch item says RETRYABLE_FAILURE.
	failed  bool
	message string
}

// replyOf reads the fields that every response of the contract shares, by their names.
func replyOf(response proto.Message) reply {
	m := response.ProtoReflect()
	fields := m.Descriptor().Fields()
	outcome := fields.ByName("outcome")
	if outcome == nil {
		return reply{Answer: Answer{Outcome: code.Code_OK.String()}}
	}
	value := outcome.Enum().Values().ByNumber(m.Get(outcome).Enum())
	if value == nil {
		return reply{failed: true, Answer: Answer{Outcome: "unknown outcome"}}
	}
	r := reply{Answer: Answer{Outcome: string(value.Name()), Detail: enumField(m, "matched_by")}}
	if rejection := fields.ByName("rejection"); rejection != nil && m.Has(rejection) {
		r.Detail = enumField(m.Get(rejection).Message(), "reason")
	}
	if failure := fields.ByName("failure"); failure != nil && m.Has(failure) {
		if f, ok := m.Get(failure).Message().Interface().(*entitlementv1.RetryableFailure); ok {
			r.Detail = f.GetReason()
		}
	}
	r.failed = value.Number() == entitlementv1.Outcome_OUTCOME_RETRYABLE_FAILURE.Number()
	return r
}

// replyOfError reads a status.
func replyOfError(err error) reply {
	st := status.Convert(err)
	name, known := code.Code_name[int32(st.Code())]
	if !known {
		name = st.Code().String()
	}
	r := reply{Answer: Answer{Outcome: name}, failed: true, message: st.Message()}
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			r.Detail = d.GetReason()
		case *errdetails.BadRequest:
			if violations := d.GetFieldViolations(); len(violations) > 0 && r.Detail == "" {
				r.Detail = violations[0].GetField()
			}
		}
	}
	return r
}

func enumField(m protoreflect.Message, name protoreflect.Name) string {
	field := m.Descriptor().Fields().ByName(name)
	if field == nil || field.Enum() == nil || !m.Has(field) {
		return ""
	}
	return enumName(field.Enum(), m.Get(field).Enum())
}

// enumName is the value's name without the prefix that all values of the enum share.
func enumName(enum protoreflect.EnumDescriptor, number protoreflect.EnumNumber) string {
	value := enum.Values().ByNumber(number)
	if value == nil {
		return "unknown"
	}
	prefix := strings.TrimSuffix(string(enum.Values().ByNumber(0).Name()), "UNSPECIFIED")
	return strings.TrimPrefix(string(value.Name()), prefix)
}
