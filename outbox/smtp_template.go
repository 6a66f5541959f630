package outbox

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	htmltemplate "html/template"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	texttemplate "text/template"
	"time"

	"golang.org/x/text/language"

	entitlementv1 "github.com/grantd/grantd/gen/entitlement/v1"
)

// builtinTemplates has a folder for each template that needs no folder of the operator's own.
//
//go:embed templates
var builtinTemplates embed.FS

// MailData is what a mail's template may say. It holds nothing that was said among colleagues: no actor, no reason, no key.
type MailData struct {
	TenantID         string
	InvoiceID        string
	EntitlementType  string
	OperationVersion int64
	Scope            map[string]string
	// Quantity is 0 where the grant is not counted.
	Quantity int64
	// StartsAt and EndsAt are the window, exclusive at its end; nil for open.
	StartsAt *time.Time
	EndsAt   *time.Time
	// At is when it happened.
	At time.Time
}

// mailKinds are the names of the files, one for each kind of entry.
var mailKinds = map[entitlementv1.EntryKind]string{
	entitlementv1.EntryKind_ENTRY_KIND_GRANTED:    "granted",
	entitlementv1.EntryKind_ENTRY_KIND_REVERSED:   "reversed",
	entitlementv1.EntryKind_ENTRY_KIND_REINSTATED: "reinstated",
}

const mailTemplateSuffix = ".tmpl"

// mailTemplate is one template in all its languages: a folder for each locale, and in it a file for each kind of entry, which
// defines "subject", "text" and "html".
type mailTemplate struct {
	locales []language.Tag
	matcher language.Matcher
	// mails stands in the order of locales.
	mails []map[entitlementv1.EntryKind]*mailText
}

// mailText is one file, parsed twice: escaping is right for HTML in one and absent in the other.
type mailText struct {
	text *texttemplate.Template
	html *htmltemplate.Template
}

// mailContent is a rendered mail, before it is a message.
type mailContent struct {
	locale              string
	subject, text, html string
}

// readMailTemplate reads the folder of one template and tries every mail in it, so that what is wrong stops the start and not a
// customer's mail. fallback is the locale for recipients whose own language is not there.
func readMailTemplate(files fs.FS, fallback string) (*mailTemplate, error) {
	folders, err := fs.ReadDir(files, ".")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, folder := range folders {
		if folder.IsDir() {
			names = append(names, folder.Name())
		}
	}
	at := slices.Index(names, fallback)
	if at < 0 {
		return nil, fmt.Errorf("there is no folder for the default locale %q, only for %q", fallback, names)
	}
	// The matcher's first language is the one that it falls back to.
	names = slices.Insert(slices.Delete(names, at, at+1), 0, fallback)
	t := &mailTemplate{}
	for _, name := range names {
		tag, err := language.Parse(name)
		if err != nil {
			return nil, fmt.Errorf("the folder %q is not named after a locale (BCP 47): %w", name, err)
		}
		mails := make(map[entitlementv1.EntryKind]*mailText, len(mailKinds))
		for _, kind := range slices.Sorted(maps.Keys(mailKinds)) {
			file := path.Join(name, mailKinds[kind]+mailTemplateSuffix)
			if mails[kind], err = readMailText(files, file); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
		}
		t.locales = append(t.locales, tag)
		t.mails = append(t.mails, mails)
	}
	t.matcher = language.NewMatcher(t.locales)
	return t, t.try()
}

func readMailText(files fs.FS, name string) (*mailText, error) {
	source, err := fs.ReadFile(files, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("is missing; each locale needs a file for each kind of entry")
	}
	if err != nil {
		return nil, err
	}
	functions := map[string]any{"date": mailDate}
	t := &mailText{}
	if t.text, err = texttemplate.New("").Option("missingkey=error").Funcs(functions).Parse(string(source)); err != nil {
		return nil, err
	}
	if t.html, err = htmltemplate.New("").Option("missingkey=error").Funcs(functions).Parse(string(source)); err != nil {
		return nil, err
	}
	return t, nil
}

// mailDate is a date that reads the same in every language.
func mailDate(t *time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

func (t *mailTemplate) try() error {
	now := time.Unix(0, 0)
	full := MailData{
		TenantID: "tenant", InvoiceID: "invoice", EntitlementType: "type", OperationVersion: 1, Scope: map[string]string{"name": "value"},
		Quantity: 1, StartsAt: &now, EndsAt: &now, At: now,
	}
	for _, locale := range t.locales {
		for kind, name := range mailKinds {
			for _, data := range []MailData{full, {TenantID: "tenant", InvoiceID: "invoice", EntitlementType: "type"}} {
				if _, err := t.render(kind, locale.String(), &data); err != nil {
					return fmt.Errorf("%s/%s%s: %w", locale, name, mailTemplateSuffix, err)
				}
			}
		}
	}
	return nil
}

// render writes the mail in the language nearest to locale, which may be empty or unknown.
func (t *mailTemplate) render(kind entitlementv1.EntryKind, locale string, data *MailData) (*mailContent, error) {
	_, at := language.MatchStrings(t.matcher, locale)
	mail, ok := t.mails[at][kind]
	if !ok {
		return nil, fmt.Errorf("no mail is written for %v", kind)
	}
	content := &mailContent{locale: t.locales[at].String()}
	var b bytes.Buffer
	for _, part := range []struct {
		name    string
		execute func() error
		into    *string
	}{
		{"subject", func() error { return mail.text.ExecuteTemplate(&b, "subject", data) }, &content.subject},
		{"text", func() error { return mail.text.ExecuteTemplate(&b, "text", data) }, &content.text},
		{"html", func() error { return mail.html.ExecuteTemplate(&b, "html", data) }, &content.html},
	} {
		b.Reset()
		if err := part.execute(); err != nil {
			return nil, err
		}
		if *part.into = strings.TrimSpace(b.String()); *part.into == "" {
			return nil, fmt.Errorf("%q is empty", part.name)
		}
	}
	// A subject is one line.
	content.subject = strings.Join(strings.Fields(content.subject), " ")
	content.text += "\n"
	content.html += "\n"
	return content, nil
}
