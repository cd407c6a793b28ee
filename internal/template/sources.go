package template

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// defaultSuite is the Debian release of templates built on a host that runs none of suites.
const defaultSuite = "bookworm"

// suites are the Debian releases that templates can be made of.
var suites = []string{"bookworm", "trixie"}

// mirroredReleases are the names of releases that a mirror of Debian is known by.
var mirroredReleases = []string{"bullseye", "bookworm", "trixie", "forky", "oldstable", "stable"}

// hostSuite returns the Debian release that the host runs, given its
// os-release file, or defaultSuite.
func hostSuite(osRelease []byte) string {
	values := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(osRelease))
	for lines.Scan() {
		if key, value, ok := strings.Cut(lines.Text(), "="); ok {
			values[key] = strings.Trim(value, `"'`)
		}
	}
	if suite := values["VERSION_CODENAME"]; values["ID"] == "debian" && slices.Contains(suites, suite) {
		return suite
	}
	return defaultSuite
}

// source is one repository that the host's apt fetches binary packages from.
type source struct {
	uri, suite, signedBy string
	components           []string
}

// line returns s as a line of apt's sources.list.
func (s source) line() string {
	options := "arch=amd64"
	if s.signedBy != "" {
		options += " signed-by=" + s.signedBy
	}
	return "deb [" + options + "] " + s.uri + " " + s.suite + " main\n"
}

// debianSources returns those of the host's sources that deliver Debian, as a
// sources.list for the release suite with the component main alone. A source
// for another release counts, because a mirror has them all. "" means that the
// host has none: it is another distribution, or its mirrors are on its own disk.
//
// Other vendors' repositories in the same files are left out: they are told by
// their keys, or by an address that has no "debian" in it.
func debianSources(all []source, suite string) string {
	seen := map[string]bool{}
	var list strings.Builder
	main := false
	for _, s := range all {
		remote := strings.HasPrefix(s.uri, "http://") || strings.HasPrefix(s.uri, "https://")
		ours := s.signedBy == "" || strings.HasPrefix(filepath.Base(s.signedBy), "debian-archive-") && !strings.ContainsAny(s.signedBy, " \t\n]")
		release, pocket, _ := strings.Cut(s.suite, "-")
		if !remote || !ours || !strings.Contains(s.uri, "debian") || !slices.Contains(s.components, "main") ||
			!slices.Contains(mirroredReleases, release) || !slices.Contains([]string{"", "updates", "security"}, pocket) {
			continue
		}
		s.suite = suite + strings.TrimPrefix(s.suite, release)
		if line := s.line(); !seen[line] {
			seen[line] = true
			list.WriteString(line)
		}
		main = main || s.suite == suite
	}
	if !main {
		return ""
	}
	return list.String()
}

// readSources reads apt's sources below dir (/etc/apt): sources.list, and the
// files of sources.list.d in both formats. What cannot be read or understood
// is left out, as what the host has beyond Debian's own repositories is no
// business of a template.
func readSources(dir string) []source {
	var all []source
	lists, _ := filepath.Glob(filepath.Join(dir, "sources.list.d", "*.list"))
	for _, path := range append([]string{filepath.Join(dir, "sources.list")}, lists...) {
		if b, err := os.ReadFile(path); err == nil {
			all = append(all, parseOneLine(b)...)
		}
	}
	stanzas, _ := filepath.Glob(filepath.Join(dir, "sources.list.d", "*.sources"))
	for _, path := range stanzas {
		if b, err := os.ReadFile(path); err == nil {
			all = append(all, parseStanzas(b)...)
		}
	}
	return all
}

// parseOneLine parses lines such as
//
//	deb [signed-by=KEYRING] URI SUITE COMPONENT...
func parseOneLine(b []byte) []source {
	var all []source
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		text, _, _ := strings.Cut(lines.Text(), "#")
		text, ok := strings.CutPrefix(strings.TrimSpace(text), "deb")
		if !ok || strings.TrimLeft(text, " \t[") == text {
			continue // deb-src, or no source at all
		}
		var s source
		if text = strings.TrimSpace(text); strings.HasPrefix(text, "[") {
			options, rest, ok := strings.Cut(text[1:], "]")
			if !ok {
				continue
			}
			for _, option := range strings.Fields(options) {
				if key, value, _ := strings.Cut(option, "="); strings.EqualFold(key, "signed-by") {
					s.signedBy = value
				}
			}
			text = rest
		}
		if fields := strings.Fields(text); len(fields) > 2 {
			s.uri, s.suite, s.components = fields[0], fields[1], fields[2:]
			all = append(all, s)
		}
	}
	return all
}

// parseStanzas parses the deb822 format: stanzas of "Field: value" lines,
// continued by lines that begin with a blank.
func parseStanzas(b []byte) []source {
	var all []source
	fields, last := map[string]string{}, ""
	flush := func() {
		all = append(all, stanzaSources(fields)...)
		fields, last = map[string]string{}, ""
	}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		text := lines.Text()
		switch {
		case strings.HasPrefix(text, "#"):
		case strings.TrimSpace(text) == "":
			flush()
		case text[0] == ' ' || text[0] == '\t':
			fields[last] += "\n" + strings.TrimSpace(text)
		default:
			name, value, _ := strings.Cut(text, ":")
			last = strings.ToLower(name)
			fields[last] = strings.TrimSpace(value)
		}
	}
	flush()
	return all
}

// stanzaSources returns the sources that one stanza stands for. A key that is
// written into the stanza makes signedBy something that is no keyring of Debian's.
func stanzaSources(fields map[string]string) []source {
	enabled := strings.ToLower(fields["enabled"])
	if enabled == "no" || enabled == "false" || !slices.Contains(strings.Fields(fields["types"]), "deb") {
		return nil
	}
	var all []source
	for _, uri := range strings.Fields(fields["uris"]) {
		for _, suite := range strings.Fields(fields["suites"]) {
			all = append(all, source{
				uri: uri, suite: suite, signedBy: fields["signed-by"],
				components: strings.Fields(fields["components"]),
			})
		}
	}
	return all
}
