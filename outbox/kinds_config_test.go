package outbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grantd/grantd/outbox"
)

func TestParseDestinations_NATSAndSMTP(t *testing.T) {
	nats := func(fields string) string {
		return "destinations: [{name: d, kind: nats, nats: {" + fields + "}}]"
	}
	smtp := func(fields string) string {
		return "destinations: [{name: d, kind: smtp, smtp: {" + fields + "}}]"
	}
	const server = "servers: ['nats://nats.example:4222'], subject: 'a.{event}'"
	const secured = "servers: ['tls://nats.example:4222'], subject: a"
	const mail = "addr: 'mail.example:587', from: a@shop.example"
	for name, test := range map[string]struct {
		text string
		err  string // "" for none
	}{
		"nats":                       {nats(server), ""},
		"nats with all":              {nats(secured + ", stream: S, unique_subjects: true, inbox_prefix: _INBOX_grantd, user: u, password: {env: P}, tls: {ca_file: a, cert_file: b, key_file: c}"), ""},
		"no servers":                 {nats("subject: a"), "destinations[0].nats.servers: required"},
		"no server":                  {nats("servers: [], subject: a"), "destinations[0].nats.servers: required"},
		"no subject":                 {nats("servers: ['nats://h:4222']"), "destinations[0].nats.subject: required"},
		"a secret in the URL":        {nats("servers: ['nats://u:p@h:4222'], subject: a"), "without a user"},
		"another scheme":             {nats("servers: ['http://h:4222'], subject: a"), "must be an absolute URL"},
		"a wildcard":                 {nats("servers: ['nats://h:4222'], subject: 'a.>'"), "must be a subject"},
		"an empty word":              {nats("servers: ['nats://h:4222'], subject: a..b"), "must be a subject"},
		"two log-ins":                {nats(secured + ", credentials_file: a, nkey_file: b"), "at most one of"},
		"a user without a password":  {nats(secured + ", user: u"), "user and password go together"},
		"a password that is shown":   {nats(server + ", user: u, password: {env: P}"), "needs TLS, so that the password"},
		"a token that is shown":      {nats(server + ", token: {env: P}"), "needs TLS, so that the token"},
		"a token that stays at home": {nats("servers: ['nats://127.0.0.1:4222'], subject: a, token: {env: P}"), ""},
		"half a pair":                {nats(secured + ", tls: {cert_file: a}"), "cert_file and key_file go together"},
		"it must deduplicate":        {"destinations: [{name: d, kind: nats, deduplicates: false, nats: {" + server + "}}]", "must be true or left out"},
		"unknown field of nats":      {nats(server + ", sbject: a"), "unknown field; known are servers, subject"},
		"smtp":                       {smtp(mail), ""},
		"smtp with all": {smtp(mail + ", tls: implicit, ca_file: a, hello: h.example, user: u, password: {file: p}, reply_to: 'Help <b@shop.example>', " +
			"message_id_domain: shop.example, template: mine, template_dir: d, default_locale: pt-BR"), ""},
		"no addr":               {smtp("from: a@shop.example"), "destinations[0].smtp.addr: required"},
		"no port":               {smtp("addr: mail.example, from: a@shop.example"), "must be host:port"},
		"no from":               {smtp("addr: 'mail.example:587'"), "destinations[0].smtp.from: required"},
		"two from":              {smtp("addr: 'mail.example:587', from: 'a@b.example, c@d.example'"), "must be one mail address"},
		"a header in from":      {smtp(`addr: 'mail.example:587', from: "a@b.example\r\nBcc: c@d.example"`), "must be one mail address"},
		"a domain with more":    {smtp(mail + ", message_id_domain: 'a>b'"), "must be a domain name"},
		"a folder as template":  {smtp(mail + ", template: ../x"), "must be a lower-case letter"},
		"no such protection":    {smtp(mail + ", tls: maybe"), "must be starttls, implicit or none"},
		"ca without TLS":        {smtp(mail + ", tls: none, ca_file: a"), "ca_file contradicts"},
		"no mail deduplicates":  {"destinations: [{name: d, kind: smtp, deduplicates: true, smtp: {" + mail + "}}]", "must be false or left out"},
		"unknown field of smtp": {smtp(mail + ", subject: a"), "unknown field; known are addr, tls"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := outbox.ParseDestinations("d.yaml", []byte(test.text))
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("got %v, want %q", err, test.err)
			}
		})
	}
}

// What cannot work is found at the start, and not by the first customer.
func TestOpen_NATSAndSMTP(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	const good = `{{define "subject"}}s{{end}}{{define "text"}}{{.TenantID}}{{end}}{{define "html"}}<p>{{.TenantID}}</p>{{end}}`
	templates := func(name string, change map[string]string) string {
		for _, locale := range []string{"en", "fr"} {
			for _, kind := range []string{"granted", "reversed", "reinstated"} {
				file := locale + "/" + kind + ".tmpl"
				text, changed := change[file]
				if !changed {
					text = good
				}
				if text != "" {
					write(name+"/"+file, text)
				}
			}
		}
		return filepath.Join(dir, name)
	}
	smtp := func(fields string) string { return mailDestination("127.0.0.1:25", plaintext+fields) }
	withTemplates := func(name string, change map[string]string) string {
		return smtp(fmt.Sprintf("      template: mine\n      template_dir: %s\n", templates(name, change)))
	}
	const nats = "nats://127.0.0.1:4222"
	notPEM := write("not.pem", "nothing")
	for name, test := range map[string]struct {
		text string
		err  string // "" for none
	}{
		"own templates":            {withTemplates("own", nil), ""},
		"no such template":         {smtp("      template: other\n"), "the template other is not built in"},
		"no such locale":           {smtp("      default_locale: ja\n"), `no folder for the default locale "ja"`},
		"a mail is missing":        {withTemplates("missing", map[string]string{"fr/reversed.tmpl": ""}), "fr/reversed.tmpl: is missing"},
		"a part is missing":        {withTemplates("part", map[string]string{"fr/granted.tmpl": `{{define "subject"}}s{{end}}{{define "text"}}t{{end}}`}), `fr/granted.tmpl: html/template: "html" is undefined`},
		"a part is empty":          {withTemplates("empty", map[string]string{"en/granted.tmpl": strings.Replace(good, "{{.TenantID}}", "{{with .Quantity}}{{.}}{{end}}", 1)}), `en/granted.tmpl: "text" is empty`},
		"a field that is not":      {withTemplates("field", map[string]string{"en/granted.tmpl": strings.Replace(good, "{{.TenantID}}", "{{.Actor}}", 1)}), "can't evaluate field Actor"},
		"not a template":           {withTemplates("broken", map[string]string{"en/granted.tmpl": `{{`}), "en/granted.tmpl: template:"},
		"no such folder":           {smtp("      template_dir: " + dir + "/nowhere\n"), "no such file"},
		"no password":              {smtp("      user: u\n      password: {env: NOT_SET}\n"), "NOT_SET"},
		"no token":                 {natsDestination(nats, "      token: {env: NOT_SET}\n"), "NOT_SET"},
		"no nats password":         {natsDestination(nats, "      user: u\n      password: {file: "+dir+"/nowhere}\n"), "no such file"},
		"no credentials":           {natsDestination(nats, "      credentials_file: "+dir+"/nowhere\n"), "no such file"},
		"no seed":                  {natsDestination(nats, "      nkey_file: "+notPEM+"\n"), "holds no nkey seed"},
		"no authority":             {natsDestination(nats, "      tls: {ca_file: "+notPEM+"}\n"), "holds no certificate"},
		"no certificate":           {natsDestination(nats, "      tls: {cert_file: "+notPEM+", key_file: "+notPEM+"}\n"), "PEM"},
		"no authority for mail":    {mailDestination("127.0.0.1:25", "      ca_file: "+notPEM+"\n"), "holds no certificate"},
		"a broker that is not yet": {natsDestination(nats, ""), ""},
	} {
		t.Run(name, func(t *testing.T) {
			all, err := outbox.ParseDestinations("d.yaml", []byte(test.text))
			if err != nil {
				t.Fatal(err)
			}
			kind, err := outbox.OpenKind(&all[0], func(string) string { return "" })
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("got %v, want %q", err, test.err)
			}
			if err == nil {
				kind.Close()
			}
		})
	}
}
