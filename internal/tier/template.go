package tier

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hibernacle/hibernacle/internal/atomicfile"
	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

const (
	listVersion = 1
	maxList     = 1 << 20
	maxFile     = 64 << 30 // bytes of a template's file
)

// fileList is the list of a template's files, by which they are verified.
type fileList struct {
	Version int        `json:"version"`
	Files   []fileItem `json:"files"` // in the order of their names

	hash    string // names the folder in the remote store
	encoded []byte
}

type fileItem struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

func (t templateRecord) key() string {
	return templatePrefix + t.Name + "/" + strconv.Itoa(t.Version)
}

func (t templateRecord) listKey() string { return t.key() + "/" + t.List + "/list" }

func isListKey(key string) bool {
	return strings.HasPrefix(key, templatePrefix) && strings.Count(key, "/") == 4 && strings.HasSuffix(key, "/list")
}

// parseListKey returns the template that the key of a list names.
func parseListKey(key string) (t templateRecord, ok bool) {
	parts := strings.Split(strings.TrimPrefix(key, templatePrefix), "/")
	if !isListKey(key) || !isHash(parts[2]) {
		return t, false
	}
	t.Name, t.List = parts[0], parts[2]
	var err error
	t.Version, err = strconv.Atoi(parts[1])
	return t, err == nil && t.listKey() == key
}

func (t templateRecord) fileKey(name string) string { return t.key() + "/" + t.List + "/files/" + name }

// parseList decodes and checks the list in b, which lies under that key.
func parseList(key, hash string, b []byte) (fileList, error) {
	l := fileList{hash: hash, encoded: b}
	fail := func(err error) (fileList, error) {
		return fileList{}, fmt.Errorf("%w %s in the remote store: %w", snapshot.ErrCorrupt, key, err)
	}
	if listHash(b) != hash {
		return fail(errors.New("it does not fit the hash in its key"))
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return fail(err)
	}
	if l.Version != listVersion {
		return fileList{}, fmt.Errorf("%w %s in the remote store: version %d, this release reads version %d", snapshot.ErrVersion, key, l.Version, listVersion)
	}
	for i, f := range l.Files {
		sum, err := hex.DecodeString(f.SHA256)
		if err != nil || len(sum) != sha256.Size || f.Size < 0 || f.Size > maxFile || !isFileName(f.Name) || i > 0 && l.Files[i-1].Name >= f.Name {
			return fail(fmt.Errorf("the entry of file %q is wrong", f.Name))
		}
	}
	return l, nil
}

// isFileName tells whether a file of that name can be a part of a key, and of
// a folder.
func isFileName(name string) bool {
	return blob.CheckKey(name) == nil && filepath.Base(name) == name
}

func listHash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:hashLen]
}

func (l fileList) bytes() (n int64) {
	for _, f := range l.Files {
		n += f.Size
	}
	return n
}

// listFiles reads and hashes the files in a template's folder.
func listFiles(ctx context.Context, dir string) (fileList, error) {
	entries, err := os.ReadDir(dir) // in the order of their names
	if err != nil {
		return fileList{}, err
	}
	l := fileList{Version: listVersion}
	for _, e := range entries {
		if !e.Type().IsRegular() || !isFileName(e.Name()) {
			return fileList{}, fmt.Errorf("%s: not a file that a template can have", filepath.Join(dir, e.Name()))
		}
		item, err := hashFile(ctx, dir, e.Name())
		if err != nil {
			return fileList{}, err
		}
		l.Files = append(l.Files, item)
	}
	if l.encoded, err = json.Marshal(l); err != nil {
		return fileList{}, err
	}
	l.hash = listHash(l.encoded)
	return l, nil
}

func hashFile(ctx context.Context, dir, name string) (fileItem, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return fileItem{}, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, contextReader{ctx, f})
	return fileItem{Name: name, Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, err
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// template sends the template's files, their list last, and returns the list's hash.
func (u *upload) template(ctx context.Context) (string, error) {
	tpl := u.replica.Template
	if tpl.Dir == "" {
		return "", nil
	}
	l, err := u.tier.listOf(ctx, tpl.Dir)
	if err != nil {
		return "", err
	}
	rec := templateRecord{Name: tpl.Name, Version: tpl.Version, List: l.hash}
	if there, err := u.tier.isRemote(ctx, rec.listKey()); err != nil || there {
		return l.hash, err
	}
	for _, f := range l.Files {
		err := u.put(ctx, rec.fileKey(f.Name), fpTemplateFile, func(w io.Writer) error {
			return sendFile(ctx, w, tpl.Dir, f)
		})
		if err != nil {
			return "", err
		}
	}
	return l.hash, u.put(ctx, rec.listKey(), fpTemplate, func(w io.Writer) error {
		_, err := w.Write(l.encoded)
		return err
	})
}

func sendFile(ctx context.Context, w io.Writer, dir string, f fileItem) error {
	path := filepath.Join(dir, f.Name)
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	sum, err := encode(w, contextReader{ctx, file})
	if err == nil && hex.EncodeToString(sum) != f.SHA256 {
		err = fmt.Errorf("%s has changed since it was hashed", path)
	}
	return err
}

// listOf is listFiles, once for each folder: the files of a template's version
// do not change.
func (t *Tier) listOf(ctx context.Context, dir string) (fileList, error) {
	t.mu.Lock()
	l, ok := t.lists[dir]
	t.mu.Unlock()
	if ok {
		return l, nil
	}
	l, err := listFiles(ctx, dir)
	if err != nil {
		return fileList{}, err
	}
	t.mu.Lock()
	t.lists[dir] = l
	t.mu.Unlock()
	return l, nil
}

// fetchTemplate brings the files of a template into the folder dir, which is
// there whole or not at all. One that is there already must hold these files.
func (t *Tier) fetchTemplate(ctx context.Context, tpl templateRecord, l fileList, dir string, done func(bytes int64)) error {
	if _, err := os.Stat(dir); err == nil {
		have, err := listFiles(ctx, dir)
		if err == nil && have.hash != l.hash {
			err = fmt.Errorf("another template is in %s", dir)
		}
		done(l.bytes())
		return err
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := atomicfile.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(parent, "."+filepath.Base(dir)+".import") // of one that was broken off too
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return err
	}
	for _, f := range l.Files {
		err := atomicfile.Write(filepath.Join(tmp, f.Name), 0o644, func(w io.Writer) error {
			return t.fetchFile(ctx, w, tpl.fileKey(f.Name), f)
		})
		if err != nil {
			return err
		}
		done(f.Size)
	}
	if err := atomicfile.SyncDir(tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	return atomicfile.SyncDir(parent)
}

func (t *Tier) fetchFile(ctx context.Context, w io.Writer, key string, f fileItem) error {
	o, err := t.cfg.Remote.Open(ctx, key)
	if err != nil {
		return fmt.Errorf("remote store: %w", err)
	}
	defer o.Close()
	h := sha256.New()
	if err := decodeTo(io.MultiWriter(w, h), o, key, f.Size); err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != f.SHA256 {
		return fmt.Errorf("%w %s in the remote store: it is not the file that the list names", snapshot.ErrCorrupt, key)
	}
	return nil
}

// fetchList returns the list of a template's files.
func (t *Tier) fetchList(ctx context.Context, tpl templateRecord) (fileList, error) {
	key := tpl.listKey()
	o, err := t.cfg.Remote.Open(ctx, key)
	if err != nil {
		return fileList{}, fmt.Errorf("remote store: %w", err)
	}
	defer o.Close()
	if o.Size() > maxList {
		return fileList{}, fmt.Errorf("%w %s in the remote store: %d bytes are too many", snapshot.ErrCorrupt, key, o.Size())
	}
	b := make([]byte, o.Size())
	if n, err := o.ReadAt(b, 0); n < len(b) {
		return fileList{}, fmt.Errorf("read %s from the remote store: %w", key, noEOF(err))
	}
	return parseList(key, tpl.List, b)
}
