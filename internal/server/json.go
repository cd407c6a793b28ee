package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
)

// maxBody bounds a JSON body: requests are small, files have a route of their own.
const maxBody = 1 << 20

// decode reads the JSON object of a request into v. It refuses fields that v
// does not have, anything behind the object, and bodies beyond maxBody. An
// empty body leaves v as it is.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return fmt.Errorf("the body is %w: at most %d bytes are taken", errTooLarge, tooLarge.Limit)
	}
	if err != nil {
		return requestError{"read the body: " + err.Error(), ""}
	}
	if len(strings.TrimSpace(string(body))) == 0 {
		return nil
	}
	dec := json.NewDecoder(strings.NewReader(string(body)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return jsonError(body, dec.InputOffset(), err)
	}
	if _, err := dec.Token(); err != io.EOF {
		line, col := position(body, dec.InputOffset())
		return requestError{fmt.Sprintf("malformed JSON at line %d, column %d: something follows the object", line, col), "send one JSON object"}
	}
	return nil
}

// jsonError says in words, with its position, what is wrong with a body.
func jsonError(body []byte, offset int64, err error) error {
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		line, col := position(body, syntax.Offset)
		return requestError{fmt.Sprintf("malformed JSON at line %d, column %d: %s", line, col, syntax), "send one JSON object"}
	case errors.Is(err, io.ErrUnexpectedEOF):
		line, col := position(body, int64(len(body)))
		return requestError{fmt.Sprintf("malformed JSON at line %d, column %d: it ends too early", line, col), "send one JSON object"}
	case errors.As(err, &typ):
		line, col := position(body, typ.Offset)
		if typ.Field == "" {
			return requestError{fmt.Sprintf("the body must be a JSON object, not %s", typ.Value), ""}
		}
		return requestError{fmt.Sprintf("field %q at line %d, column %d must be %s, not %s", typ.Field, line, col, typeName(typ.Type.Kind().String()), typ.Value), ""}
	}
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		line, col := position(body, offset)
		return requestError{fmt.Sprintf("unknown field %s near line %d, column %d", field, line, col), "see /v1/openapi.json for the fields"}
	}
	return requestError{"malformed JSON: " + err.Error(), ""}
}

// typeName says what kind of JSON value a Go kind is read from.
func typeName(kind string) string {
	switch {
	case kind == "string":
		return "a string"
	case kind == "bool":
		return "true or false"
	case kind == "slice", kind == "array":
		return "an array"
	case kind == "map", kind == "struct", kind == "ptr":
		return "an object"
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "a whole number"
	}
	return "a number"
}

// position returns the line and the column, counted from 1, of the byte that
// comes before offset.
func position(body []byte, offset int64) (line, col int) {
	offset = max(0, min(offset, int64(len(body))))
	before := string(body[:offset])
	line = 1 + strings.Count(before, "\n")
	return line, max(1, len(before)-strings.LastIndex(before, "\n")-1)
}

// writeJSON answers with v. An error of the connection is the client's loss.
func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// lines writes JSON values one a line, each sent at once. The header goes out
// with the first line, so an error before it may still have a status. Its
// methods may be called at the same time.
type lines struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	sent bool
}

func (l *lines) write(v any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.sent {
		l.sent = true
		l.w.Header().Set("Content-Type", "application/x-ndjson")
		l.w.WriteHeader(http.StatusOK)
	}
	_ = json.NewEncoder(l.w).Encode(v)
	_ = http.NewResponseController(l.w).Flush()
}

// begun tells whether a line was written.
func (l *lines) begun() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent
}
