package guest

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	filesystempb "github.com/hibernacle/hibernacle/api/filesystem"
)

// watchService serves the calls of filesystem.Filesystem that watch folders.
type watchService struct {
	files *fileService
	stall time.Duration

	mu       sync.Mutex
	watchers map[string]*watcher
}

func newWatchService(accounts func() (*accounts, error), stall time.Duration) *watchService {
	return &watchService{files: &fileService{accounts}, stall: stall, watchers: map[string]*watcher{}}
}

func (s *watchService) open(h http.Header, path string, recursive, entries bool) (*watch, error) {
	p, err := s.files.place(h, path)
	if err != nil {
		return nil, err
	}
	return openWatch(p, recursive, entries)
}

// WatchDir streams the changes in a folder.
func (s *watchService) WatchDir(ctx context.Context, req *connect.Request[filesystempb.WatchDirRequest], out *connect.ServerStream[filesystempb.WatchDirResponse]) error {
	w, err := s.open(req.Header(), req.Msg.GetPath(), req.Msg.GetRecursive(), req.Msg.GetIncludeEntry())
	if err != nil {
		return fileError(err)
	}
	send := s.sender(ctx, out)
	if err := send(&filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Start{Start: &filesystempb.WatchDirResponse_StartEvent{}}}); err != nil {
		w.close()
		return err
	}
	stop := context.AfterFunc(ctx, w.close)
	defer stop()
	defer w.close()
	alive := time.NewTicker(keepalive(req.Header()))
	defer alive.Stop()
	beat, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(beat)
		for {
			select {
			case <-alive.C:
				if send(&filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Keepalive{Keepalive: &filesystempb.WatchDirResponse_KeepAlive{}}}) != nil {
					return
				}
			case <-ended:
				return
			}
		}
	}()
	err = w.run(func(e *filesystempb.FilesystemEvent) error {
		return send(&filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Filesystem{Filesystem: e}})
	})
	close(ended)
	<-beat
	if ctx.Err() != nil {
		return processError(ctx.Err())
	}
	return fileError(err)
}

// sender returns a function that sends from any goroutine, each message within the stall limit.
func (s *watchService) sender(ctx context.Context, out *connect.ServerStream[filesystempb.WatchDirResponse]) func(*filesystempb.WatchDirResponse) error {
	var mu sync.Mutex
	return func(m *filesystempb.WatchDirResponse) error {
		mu.Lock()
		defer mu.Unlock()
		limitWrites(ctx, s.stall)
		return out.Send(m)
	}
}

// CreateWatcher begins to collect the changes in a folder.
func (s *watchService) CreateWatcher(_ context.Context, req *connect.Request[filesystempb.CreateWatcherRequest]) (*connect.Response[filesystempb.CreateWatcherResponse], error) {
	opened, err := s.open(req.Header(), req.Msg.GetPath(), req.Msg.GetRecursive(), req.Msg.GetIncludeEntry())
	if err != nil {
		return nil, fileError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.watchers) == maxWatchers {
		opened.close()
		return nil, fileError(fmt.Errorf("%w watchers: remove one of the %d", errTooMany, maxWatchers))
	}
	id, w := randomName(), &watcher{watch: opened}
	s.watchers[id] = w
	go w.collect()
	return connect.NewResponse(&filesystempb.CreateWatcherResponse{WatcherId: id}), nil
}

// GetWatcherEvents returns what a watcher collected since the last call.
func (s *watchService) GetWatcherEvents(_ context.Context, req *connect.Request[filesystempb.GetWatcherEventsRequest]) (*connect.Response[filesystempb.GetWatcherEventsResponse], error) {
	s.mu.Lock()
	w := s.watchers[req.Msg.GetWatcherId()]
	s.mu.Unlock()
	if w == nil {
		return nil, fileError(noWatcher(req.Msg.GetWatcherId()))
	}
	events, err := w.take()
	return connect.NewResponse(&filesystempb.GetWatcherEventsResponse{Events: events}), fileError(err)
}

// RemoveWatcher ends a watcher.
func (s *watchService) RemoveWatcher(_ context.Context, req *connect.Request[filesystempb.RemoveWatcherRequest]) (*connect.Response[filesystempb.RemoveWatcherResponse], error) {
	id := req.Msg.GetWatcherId()
	s.mu.Lock()
	w := s.watchers[id]
	delete(s.watchers, id)
	s.mu.Unlock()
	if w == nil {
		return nil, fileError(noWatcher(id))
	}
	w.close()
	return connect.NewResponse(&filesystempb.RemoveWatcherResponse{}), nil
}

func noWatcher(id string) error { return fmt.Errorf("watcher %q: %w", id, fs.ErrNotExist) }
