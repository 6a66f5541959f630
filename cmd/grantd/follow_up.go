package main

import (
	"cmp"
	"strings"
)

// followUps are commands that go on from the one that prints them. Each carries the flags that it needs, so that it can be copied; a
// word in capitals stands where a person must say something.
type followUps struct {
	target *target
	// environment is the target of a command without flags.
	environment target
	tenant      string
	// operator is who runs the commands, empty where the environment does not say so: then the person must.
	operator string
}

func newFollowUps(io stdio, called *target, tenant string) *followUps {
	return &followUps{called, environmentTarget(io.env), tenant, operatorOf(io.env)}
}

// What stands for what a person must say. No order is given with it.
const (
	actorToSay  = "ACTOR"
	reasonToSay = "REASON"
)

// command is the words of one, as a shell takes them.
func (f *followUps) command(words ...string) []string {
	words = append([]string{"grantd"}, words...)
	for _, set := range []struct{ name, value, environment, unset string }{
		{"addr", f.target.Addr, f.environment.Addr, defaultAddr}, {"ca", f.target.CA, f.environment.CA, ""},
		{"cert", f.target.Cert, f.environment.Cert, ""}, {"cert-key", f.target.CertKey, f.environment.CertKey, ""},
	} {
		// The default, too, must be said where a variable says something else.
		if set.value != set.unset || set.value != cmp.Or(set.environment, set.unset) {
			words = append(words, flag(set.name, set.value))
		}
	}
	switch {
	case f.target.InsecurePlaintext:
		words = append(words, "--insecure-plaintext")
	case f.environment.InsecurePlaintext:
		words = append(words, "--insecure-plaintext=false")
	}
	return words
}

// explain tells another story of the tenant.
func (f *followUps) explain(flags ...string) []string {
	return f.command(append([]string{"explain", flag("tenant", f.tenant)}, flags...)...)
}

// show tells of a delivery of the tenant.
func (f *followUps) show(delivery string) []string {
	return f.command("deliveries", "show", shellWord(delivery), flag("tenant", f.tenant))
}

// order changes a delivery of the tenant.
func (f *followUps) order(verb, delivery string, flags ...string) []string {
	return f.stated(f.command(append([]string{"deliveries", verb, shellWord(delivery), flag("tenant", f.tenant)}, flags...)...))
}

// resume ends a pause.
func (f *followUps) resume(destination string, flags ...string) []string {
	return f.stated(f.command(append([]string{"deliveries", "resume", shellWord(destination)}, flags...)...))
}

func (f *followUps) stated(words []string) []string {
	if f.operator == "" {
		words = append(words, flag("actor", actorToSay))
	}
	return append(words, flag("reason", reasonToSay))
}

// flag keeps its value also where that begins like another flag.
func flag(name, value string) string { return "--" + name + "=" + shellWord(value) }

// shellWord quotes what a shell would take apart.
func shellWord(s string) string {
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return !strings.ContainsRune("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:@+-", r)
	}) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// commandLines breaks a command between its words into lines that fit where the words do. They are one command to a shell.
func commandLines(words []string, columns int) []string {
	lines := []string{words[0]}
	for _, w := range words[1:] {
		last := &lines[len(lines)-1]
		if w = visible(w); len([]rune(*last))+len(" ")+len([]rune(w))+len(` \`) > columns {
			*last += ` \`
			lines = append(lines, "  "+w)
			continue
		}
		*last += " " + w
	}
	return lines
}
