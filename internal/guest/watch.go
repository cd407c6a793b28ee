package guest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"

	filesystempb "github.com/hibernacle/hibernacle/api/filesystem"
)

// watch follows the changes in one folder, or in all below it.
type watch struct {
	place
	recursive bool
	entries   bool // events describe their entries
	notify    *fsnotify.Watcher
}

// openWatch begins to watch: what happens from its return on is seen.
func openWatch(p place, recursive, entries bool) (*watch, error) {
	info, err := os.Stat(p.path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, notFolder(p.path)
	}
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &watch{place: p, recursive: recursive, entries: entries, notify: notify}
	if _, err := w.add(p.path); err != nil {
		return nil, errors.Join(err, notify.Close())
	}
	return w, nil
}

// add watches a folder, with those below it if the watch is recursive. It
// returns the entries found below, which may be younger than the watch.
func (w *watch) add(dir string) (found []string, err error) {
	if !w.recursive {
		return nil, w.notify.Add(dir)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if path == w.path {
				return err
			}
			return nil // it went away
		}
		if path != dir {
			found = append(found, path)
		}
		if !d.IsDir() {
			return nil
		}
		if err := w.notify.Add(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
	return found, err
}

// run passes events on until close, or an error of the kernel's queue.
func (w *watch) run(emit func(*filesystempb.FilesystemEvent) error) error {
	for {
		select {
		case e, ok := <-w.notify.Events:
			if !ok {
				return nil
			}
			if err := w.handle(e, emit); err != nil {
				return err
			}
		case err, ok := <-w.notify.Errors:
			if !ok {
				return nil
			}
			return err
		}
	}
}

// handle passes one event on. A new folder is watched as well; what is in it
// by then is reported as created.
func (w *watch) handle(e fsnotify.Event, emit func(*filesystempb.FilesystemEvent) error) error {
	for _, op := range []struct {
		bit  fsnotify.Op
		kind filesystempb.EventType
	}{
		{fsnotify.Create, filesystempb.EventType_EVENT_TYPE_CREATE},
		{fsnotify.Rename, filesystempb.EventType_EVENT_TYPE_RENAME},
		{fsnotify.Chmod, filesystempb.EventType_EVENT_TYPE_CHMOD},
		{fsnotify.Write, filesystempb.EventType_EVENT_TYPE_WRITE},
		{fsnotify.Remove, filesystempb.EventType_EVENT_TYPE_REMOVE},
	} {
		if e.Has(op.bit) {
			if err := emit(w.event(e.Name, op.kind)); err != nil {
				return err
			}
		}
	}
	if !w.recursive || !e.Has(fsnotify.Create) {
		return nil
	}
	if info, err := os.Lstat(e.Name); err != nil || !info.IsDir() {
		return nil
	}
	found, err := w.add(e.Name)
	if err != nil {
		return err
	}
	for _, path := range found {
		if err := emit(w.event(path, filesystempb.EventType_EVENT_TYPE_CREATE)); err != nil {
			return err
		}
	}
	return nil
}

func (w *watch) event(path string, kind filesystempb.EventType) *filesystempb.FilesystemEvent {
	name, err := filepath.Rel(w.path, path)
	if err != nil {
		name = path
	}
	e := &filesystempb.FilesystemEvent{Name: name, Type: kind}
	if w.entries {
		e.Entry, _ = describe(path, w.names) // nil if it is gone
	}
	return e
}

func (w *watch) close() { _ = w.notify.Close() }

// maxQueued bounds the events that a watcher holds; maxWatchers the watchers.
const (
	maxQueued   = 10_000
	maxWatchers = 64
)

// watcher collects events for a client that asks for them.
type watcher struct {
	*watch
	mu     sync.Mutex
	events []*filesystempb.FilesystemEvent // the last maxQueued
	err    error                           // why it ended by itself
}

func (w *watcher) collect() {
	err := w.run(func(e *filesystempb.FilesystemEvent) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.events) == maxQueued {
			w.events = w.events[1:]
		}
		w.events = append(w.events, e)
		return nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// take returns what was collected since the last call.
func (w *watcher) take() ([]*filesystempb.FilesystemEvent, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.events
	w.events = nil
	if len(events) == 0 {
		return nil, w.err
	}
	return events, nil
}
