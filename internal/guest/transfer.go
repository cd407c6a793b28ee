package guest

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	filesPath    = "/files"
	transferSize = 256 << 10 // bytes copied at once
)

// uploaded is one line of the answer to an upload.
type uploaded struct {
	Name string `json:"name"`
	Path string `json:"path"`
	Type string `json:"type"`
}

// transferUser returns the user that a transfer is made for: the query's, else the header's.
func transferUser(r *http.Request) (string, error) {
	if name := r.URL.Query().Get("username"); name != "" {
		return name, nil
	}
	name, err := callerName(r.Header)
	if err != nil {
		err = fmt.Errorf("%w: %w", errNoUser, err)
	}
	return name, err
}

// download serves GET /files: the content of a file, whole or in ranges.
func (s *fileService) download(w http.ResponseWriter, r *http.Request) {
	f, info, err := s.openFile(r)
	if err != nil {
		writeError(w, statusOf(err), err.Error())
		return
	}
	defer f.Close()
	w.Header().Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": info.Name()}))
	http.ServeContent(w, r, info.Name(), info.ModTime(), f)
}

func (s *fileService) openFile(r *http.Request) (*os.File, os.FileInfo, error) {
	user, err := transferUser(r)
	if err != nil {
		return nil, nil, err
	}
	p, err := s.placeOf(user, r.URL.Query().Get("path"))
	if err != nil {
		return nil, nil, err
	}
	info, err := os.Stat(p.path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is not a file", errBadRequest, p.path)
	}
	if err != nil {
		return nil, nil, err
	}
	f, err := os.Open(p.path)
	if err != nil {
		return nil, nil, err
	}
	return f, info, nil
}

// upload serves POST /files: one file as an octet stream, or any number as the
// parts "file" of a form.
func (s *fileService) upload(w http.ResponseWriter, r *http.Request) {
	files, err := s.receive(r)
	if err != nil {
		writeError(w, statusOf(err), err.Error())
		return
	}
	writeJSON(w, files)
}

func (s *fileService) receive(r *http.Request) ([]uploaded, error) {
	user, err := transferUser(r)
	if err != nil {
		return nil, err
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, fmt.Errorf("%w: the Content-Type: %w", errBadRequest, err)
	}
	body, err := decoded(r)
	if err != nil {
		return nil, err
	}
	path := r.URL.Query().Get("path")
	switch kind {
	case "application/octet-stream":
		if path == "" {
			return nil, fmt.Errorf("%w: an octet stream needs the query parameter path", errBadRequest)
		}
		file, err := s.store(user, path, body)
		return []uploaded{file}, err
	case "multipart/form-data":
		return s.receiveForm(user, path, multipart.NewReader(body, params["boundary"]))
	}
	return nil, fmt.Errorf("%w: Content-Type %s: send multipart/form-data or application/octet-stream", errBadRequest, kind)
}

// decoded returns the body without its content encoding.
func decoded(r *http.Request) (io.Reader, error) {
	switch encoding := r.Header.Get("Content-Encoding"); encoding {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, fmt.Errorf("%w: the gzip body: %w", errBadRequest, err)
		}
		return z, nil
	default:
		return nil, fmt.Errorf("%w: Content-Encoding %s: send gzip or none", errBadRequest, encoding)
	}
}

// receiveForm stores each part named "file": at path, or where the part's own
// file name says.
func (s *fileService) receiveForm(user, path string, form *multipart.Reader) ([]uploaded, error) {
	files := []uploaded{}
	for {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: the form: %w", errBadRequest, err)
		}
		if part.FormName() != "file" {
			continue
		}
		target := path
		if target == "" {
			if target, err = partName(part); err != nil {
				return nil, err
			}
		} else if len(files) > 0 {
			return nil, fmt.Errorf("%w: several files for the one path %s: leave path out and name each", errBadRequest, path)
		}
		file, err := s.store(user, target, part)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
}

// partName returns a part's file name with its folders, which the multipart
// package would cut off.
func partName(part *multipart.Part) (string, error) {
	_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	if err != nil || params["filename"] == "" {
		return "", fmt.Errorf("%w: a part without file name, and no query parameter path", errBadRequest)
	}
	return params["filename"], nil
}

// store writes a file. It is overwritten where it is, so that its inode, owner
// and mode stay, links and devices work, and who watches it sees a write. A
// file that is new and cannot be completed is removed again; one that was
// there is left cut short.
func (s *fileService) store(user, path string, from io.Reader) (uploaded, error) {
	p, err := s.placeOf(user, path)
	if err != nil {
		return uploaded{}, err
	}
	if err := p.user.makeDirs(filepath.Dir(p.path)); err != nil {
		return uploaded{}, err
	}
	f, created, err := openForWriting(p)
	if err != nil {
		return uploaded{}, err
	}
	if err := fill(f, from); err != nil {
		if created {
			err = errors.Join(err, os.Remove(p.path))
		}
		return uploaded{}, fmt.Errorf("write %s: %w", p.path, err)
	}
	return uploaded{Name: filepath.Base(p.path), Path: p.path, Type: "file"}, nil
}

// openForWriting opens a file emptied, or creates it for the user.
func openForWriting(p place) (f *os.File, created bool, err error) {
	f, err = os.OpenFile(p.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err == nil {
		if err := f.Chown(int(p.user.UID), int(p.user.GID)); err != nil {
			return nil, false, errors.Join(err, f.Close(), os.Remove(p.path))
		}
		return f, true, nil
	}
	if !errors.Is(err, os.ErrExist) {
		return nil, false, err
	}
	f, err = os.OpenFile(p.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	return f, false, err
}

// fill copies with constant memory and closes f.
func fill(f *os.File, from io.Reader) error {
	// Only Write and Read are shown: the copy is to use this buffer.
	_, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{from}, make([]byte, transferSize))
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// checkSignature checks the signature in a transfer's URL: that of path,
// operation and user made with the access token, and of the time it ends.
func checkSignature(r *http.Request, token string, now time.Time) error {
	q := r.URL.Query()
	given := q.Get("signature")
	if given == "" {
		return errors.New("the request has neither the access token nor a signature")
	}
	operation := "read"
	if r.Method == http.MethodPost {
		operation = "write"
	}
	fields := []string{q.Get("path"), operation, q.Get("username"), token}
	expiration := q.Get("signature_expiration")
	if expiration != "" {
		end, err := strconv.ParseInt(expiration, 10, 64)
		if err != nil {
			return fmt.Errorf("the signature's expiration %q is not a time", expiration)
		}
		if now.Unix() > end {
			return errors.New("the signature has expired")
		}
		fields = append(fields, expiration)
	}
	sum := sha256.Sum256([]byte(strings.Join(fields, ":")))
	if !sameToken(given, "v1_"+base64.RawStdEncoding.EncodeToString(sum[:])) {
		return errors.New("the signature is wrong")
	}
	return nil
}
