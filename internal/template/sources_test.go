package template

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestHostSuite(t *testing.T) {
	for osRelease, want := range map[string]string{
		"ID=debian\nVERSION_CODENAME=bookworm\n":     "bookworm",
		"VERSION_CODENAME=\"trixie\"\nID=\"debian\"": "trixie",
		"ID=debian\nVERSION_CODENAME=buster\n":       defaultSuite,
		"ID=ubuntu\nVERSION_CODENAME=noble\n":        defaultSuite,
		"":                                           defaultSuite,
	} {
		if got := hostSuite([]byte(osRelease)); got != want {
			t.Errorf("%q: %s, want %s", osRelease, got, want)
		}
	}
}

const stanzas = `# comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
# comment within
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://user:secret@mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://other.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://vendor.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 debian-archive-
`

func TestDebianSources(t *testing.T) {
	for name, c := range map[string]struct {
		list, stanzas, suite, want string
	}{
		"none": {},
		"stanzas": {
			stanzas: stanzas, suite: "bookworm",
			want: `deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian bookworm-updates main
deb [arch=amd64] https://user:secret@mirror.example/debian-security bookworm-security main
`,
		},
		"another release of the same mirror": {
			list: "deb http://mirror.example/debian stable main\ndeb http://mirror.example/debian stable-backports main\n", suite: "trixie",
			want: "deb [arch=amd64] http://mirror.example/debian trixie main\n",
		},
		"lines": {
			list: `# deb http://commented.example/debian bookworm main
deb-src http://mirror.example/debian bookworm main
deb [ arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg ] http://mirror.example/debian/ bookworm main non-free # comment
deb http://mirror.example/debian/ bookworm main
deb [unclosed http://mirror.example/debian bookworm main
deb http://vendor.example/apt bookworm main
deb [signed-by=/etc/apt/keyrings/vendor.gpg] http://vendor.example/debian bookworm main
deb http://mirror.example/debian bookworm contrib
deb file:/srv/debian bookworm main
deb cdrom:[Debian]/ bookworm main
deb http://mirror.example/ubuntu noble main
`,
			suite: "bookworm",
			want: "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian/ bookworm main\n" +
				"deb [arch=amd64] http://mirror.example/debian/ bookworm main\n",
		},
		"updates alone are no mirror": {list: "deb http://mirror.example/debian bookworm-updates main\n", suite: "bookworm"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "sources.list.d"), 0o755); err != nil {
				t.Fatal(err)
			}
			for file, content := range map[string]string{"sources.list": c.list, "sources.list.d/debian.sources": c.stanzas} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := debianSources(readSources(dir), c.suite); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}

func FuzzSources(f *testing.F) {
	f.Add([]byte(stanzas))
	f.Add([]byte("deb [a=b] http://mirror.example/debian bookworm main\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		list := debianSources(append(parseOneLine(b), parseStanzas(b)...), "bookworm")
		for line := range strings.Lines(list) {
			if !strings.HasPrefix(line, "deb [arch=amd64") || !strings.HasSuffix(line, " main\n") {
				t.Errorf("line %q", line)
			}
		}
	})
}

func TestFetchOptions(t *testing.T) {
	dump := `Acquire "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3142";
Acquire::https::Proxy "DIRECT";
Acquire::https::Verify-Peer "";
Acquire::Check-Date "false";
Acquire::CompressionTypes::xz "xz";
APT::Install-Recommends "1";
`
	want := `Acquire::http::Proxy "http://proxy.example:3142";
Acquire::https::Proxy "DIRECT";
Acquire::Check-Date "false";
`
	if got := fetchOptions(dump); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
