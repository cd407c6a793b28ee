package pack

import (
	"container/list"
	"sync"
)

// Cache keeps decoded and verified frames of any number of Readers, within a
// bound. Of several goroutines that ask for a frame at the same time one
// reads it, the others wait. The most recently used frames stay.
type Cache struct {
	mu     sync.Mutex
	limit  int // frames
	frames map[frameKey]*cached
	recent *list.List // of *cached, most recently used in front
}

type frameKey struct {
	reader *Reader
	index  int64
}

// cached is a frame in the cache. Its pages do not change once it is ready.
type cached struct {
	key   frameKey
	elem  *list.Element
	ready chan struct{} // closed when pages or err is set
	pages []byte
	err   error
}

// NewCache returns a cache that keeps at most the given number of bytes, but at
// least one frame.
func NewCache(bytes int64) *Cache {
	return &Cache{
		limit:  int(max(1, bytes/FrameBytes)),
		frames: make(map[frameKey]*cached),
		recent: list.New(),
	}
}

// get returns a frame's pages, which must not be changed, and reads them with
// load if they are not in the cache. What fails is not kept.
func (c *Cache) get(key frameKey, load func() ([]byte, error)) ([]byte, error) {
	c.mu.Lock()
	if f, ok := c.frames[key]; ok {
		c.recent.MoveToFront(f.elem)
		c.mu.Unlock()
		<-f.ready
		return f.pages, f.err
	}
	f := &cached{key: key, ready: make(chan struct{})}
	f.elem = c.recent.PushFront(f)
	c.frames[key] = f
	for c.recent.Len() > c.limit {
		c.remove(c.recent.Back().Value.(*cached))
	}
	c.mu.Unlock()

	f.pages, f.err = load()
	close(f.ready)
	if f.err != nil {
		c.mu.Lock()
		c.remove(f)
		c.mu.Unlock()
	}
	return f.pages, f.err
}

// peek returns a frame's pages if they are in the cache already, else nil.
func (c *Cache) peek(key frameKey) []byte {
	c.mu.Lock()
	f, ok := c.frames[key]
	if ok {
		c.recent.MoveToFront(f.elem)
	}
	c.mu.Unlock()
	if !ok {
		return nil
	}
	<-f.ready
	return f.pages
}

// remove drops f if it is still there; c.mu is held.
func (c *Cache) remove(f *cached) {
	if c.frames[f.key] == f {
		delete(c.frames, f.key)
		c.recent.Remove(f.elem)
	}
}
