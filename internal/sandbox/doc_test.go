package sandbox_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hibernacle/hibernacle/internal/sandbox"
)

// rows returns the cells of the table under a heading of a document.
func rows(t *testing.T, document, heading string) [][]string {
	t.Helper()
	_, rest, found := strings.Cut(document, "\n## "+heading+"\n")
	if !found {
		t.Fatalf("the document has no heading %q", heading)
	}
	section, _, _ := strings.Cut(rest, "\n## ")
	var list [][]string
	for line := range strings.Lines(section) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|-") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i, c := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(c), "`")
		}
		list = append(list, cells)
	}
	if len(list) < 2 {
		t.Fatalf("no table under %q", heading)
	}
	return list[1:] // without its head
}

func lifecycle(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/lifecycle.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestDocumentShowsTheTable: docs/lifecycle.md has the moves and the recovery
// actions that the code has, in the same words.
func TestDocumentShowsTheTable(t *testing.T) {
	doc := lifecycle(t)
	var moves, actions [][]string
	for _, m := range sandbox.Moves {
		moves = append(moves, []string{string(m.From), string(m.To), m.When})
	}
	for _, s := range sandbox.States {
		actions = append(actions, []string{string(s), sandbox.Recovery[s]})
	}
	for heading, want := range map[string][][]string{"Moves": moves, "Recovery": actions} {
		got := rows(t, doc, heading)
		for _, row := range want {
			if !slices.ContainsFunc(got, func(r []string) bool { return slices.Equal(r, row) }) {
				t.Errorf("%s: the document lacks | %s |", heading, strings.Join(row, " | "))
			}
		}
		for _, row := range got {
			if !slices.ContainsFunc(want, func(r []string) bool { return slices.Equal(r, row) }) {
				t.Errorf("%s: the code lacks | %s |", heading, strings.Join(row, " | "))
			}
		}
	}
}

// TestTableIsSound: every state has a recovery action and a way to be deleted,
// and none is entered that is not known.
func TestTableIsSound(t *testing.T) {
	for _, s := range sandbox.States {
		if sandbox.Recovery[s] == "" {
			t.Errorf("%s has no recovery action", s)
		}
		if s != sandbox.StateDeleting && !slices.ContainsFunc(sandbox.Moves, func(m sandbox.Move) bool { return m.From == s && m.To == sandbox.StateDeleting }) {
			t.Errorf("%s cannot be deleted", s)
		}
	}
	for _, m := range sandbox.Moves {
		if !slices.Contains(sandbox.States, m.From) || m.To != sandbox.StateGone && !slices.Contains(sandbox.States, m.To) {
			t.Errorf("unknown state in %v", m)
		}
	}
}

// TestFailpointsAreHit: every name that is listed stands in the code.
func TestFailpointsAreHit(t *testing.T) {
	table, err := os.ReadFile("table.go")
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".go") && !strings.HasSuffix(f.Name(), "_test.go") && f.Name() != "table.go" {
			text, err := os.ReadFile(f.Name())
			if err != nil {
				t.Fatal(err)
			}
			code.Write(text)
		}
	}
	for _, name := range slices.Concat(sandbox.Failpoints, sandbox.CompactFailpoints) {
		m := regexp.MustCompile(`(fp\w+)\s+= "` + regexp.QuoteMeta(name) + `"`).FindSubmatch(table)
		if m == nil || !strings.Contains(code.String(), string(m[1])) {
			t.Errorf("failpoint %s is nowhere in the code", name)
		}
	}
}
