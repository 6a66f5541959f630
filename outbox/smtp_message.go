package outbox

import (
	"bytes"
	"errors"
	"net/mail"
	"strings"
	"time"

	gomail "github.com/wneessen/go-mail"
)

// mailContentType is what a stored body of this kind is: a whole message as RFC 5322 has it, headers and all.
const mailContentType = "message/rfc822"

// mailEnvelope is what a message says of itself beside its content.
type mailEnvelope struct {
	from    *mail.Address
	replyTo *mail.Address // nil for none
	to      *mail.Address
	// id is the part of the Message-ID before the at sign, domain the one after it. It is the delivery's id, which is made from its key
	// and, other than this, leaves the header on one line: many who search for a Message-ID do not find one that is folded.
	id, domain string
	date       time.Time
}

// message makes the bytes. The same input makes the same bytes: no clock, no randomness.
func (e *mailEnvelope) message(content *mailContent) ([]byte, error) {
	m := gomail.NewMsg(gomail.WithNoDefaultUserAgent(), gomail.WithEncoding(gomail.EncodingQP), gomail.WithBoundary("grantd-"+e.id))
	m.FromMailAddress(e.from)
	m.ToMailAddress(e.to)
	if e.replyTo != nil {
		m.ReplyToMailAddress(e.replyTo)
	}
	m.Subject(content.subject)
	m.SetMessageIDWithValue(e.id + "@" + e.domain)
	m.SetDateWithValue(e.date.UTC())
	m.SetGenHeader("Content-Language", content.locale)
	// RFC 3834: nobody's absence notice should answer.
	m.SetGenHeader("Auto-Submitted", "auto-generated")
	m.SetBodyString(gomail.TypeTextPlain, content.text)
	m.AddAlternativeString(gomail.TypeTextHTML, content.html)
	var b bytes.Buffer
	if _, err := m.WriteTo(&b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// mailAddress reads one address, bare or with a name. What could end a header line or an SMTP command is refused.
func mailAddress(text string) (*mail.Address, error) {
	if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, errors.New("holds control characters")
	}
	address, err := mail.ParseAddress(text)
	if err != nil {
		return nil, errors.New("is not a mail address")
	}
	if strings.ContainsAny(address.Address, "<> ") {
		return nil, errors.New("is not a mail address that SMTP can carry")
	}
	return address, nil
}
