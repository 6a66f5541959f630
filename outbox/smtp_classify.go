package outbox

import (
	"errors"
	"fmt"
	"net/textproto"
)

// mailStage is how far an attempt came. What an error means depends on it more than on the error.
type mailStage int

const (
	// stageGreeting: connection, TLS, EHLO, log-in. Nothing was said of the mail yet.
	stageGreeting mailStage = iota
	// stageSender: MAIL FROM, which is the same for every mail.
	stageSender
	// stageRecipient: RCPT TO.
	stageRecipient
	// stageContents: from DATA to the last byte before the final dot. A server may not take a mail without the dot.
	stageContents
	// stageCommitted: the final dot may have left. Only the server's answer says whether the mail is out.
	stageCommitted
)

func (s mailStage) String() string {
	return [...]string{"connecting", "sender", "recipient", "content", "after the final dot"}[s]
}

// mailResult says what an attempt came to that ended with err at the stage. nil is success, which only the last stage can have.
func mailResult(stage mailStage, err error) result {
	if err == nil {
		return result{verdict: delivered}
	}
	r := result{verdict: transient, reason: fmt.Sprintf("%s: %v", stage, err)}
	var reply *textproto.Error
	if !errors.As(err, &reply) {
		// No answer, or none that can be read.
		if stage == stageCommitted {
			r.verdict = uncertain
			return r
		}
		r.unreachable = true
		return r
	}
	r.statusCode = reply.Code
	class := reply.Code / 100
	switch {
	// The mail was not yet spoken of, so the refusal cannot be about it.
	case stage <= stageSender:
		r.unreachable = true
	// 421 is the server's good-bye, whatever the command.
	case reply.Code == 421:
		r.unreachable = true
	case class == 4:
	case class == 5:
		r.verdict = permanent
	case class == 2 && stage == stageCommitted:
		return result{verdict: delivered, statusCode: reply.Code}
	case stage == stageCommitted:
		r.verdict = uncertain
	}
	return r
}

// replyCode is what may be told of a server's answer that could repeat a secret.
func replyCode(err error) string {
	var reply *textproto.Error
	if errors.As(err, &reply) {
		return fmt.Sprintf(" (%d)", reply.Code)
	}
	return ""
}
