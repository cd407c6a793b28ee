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
	recent *list.List // of *cached that are ready, most recently used in front
}

type frameKey struct {
	reader *Reader
	index  int64
}

// cached is a frame in the cache. It belongs to whoever claimed it until it is
// settled, and does not change afterwards.
type cached struct {
	key   frameKey
	ahead bool          // claimed by a Fetch
	elem  *list.Element // nil until it is settled
	ready chan struct{} // closed when it is settled
	pages []byte
	err   error
}

// NewCache returns a cache that keeps at most the given number of bytes, but at
// least one frame. Frames that are being read come on top.
func NewCache(bytes int64) *Cache {
	return &Cache{
		limit:  int(max(1, bytes/FrameBytes)),
		frames: make(map[frameKey]*cached),
		recent: list.New(),
	}
}

// claim returns a frame that is in the cache or being read. If there is none,
// it returns a new one that is the caller's to read and settle.
func (c *Cache) claim(key frameKey, ahead bool) (f *cached, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.find(key); f != nil {
		return f, false
	}
	f = &cached{key: key, ahead: ahead, ready: make(chan struct{})}
	c.frames[key] = f
	return f, true
}

// find returns a frame that is in the cache or being read, else nil; c.mu is held.
func (c *Cache) find(key frameKey) *cached {
	f := c.frames[key]
	if f != nil && f.elem != nil {
		c.recent.MoveToFront(f.elem)
	}
	return f
}

// settle sets what became of a claimed frame. It stays in the cache if keep is
// set; what failed is never kept.
func (c *Cache) settle(f *cached, pages []byte, err error, keep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.pages, f.err = pages, err
	if err == nil && keep {
		f.elem = c.recent.PushFront(f)
	} else {
		delete(c.frames, f.key)
	}
	for c.recent.Len() > c.limit {
		delete(c.frames, c.recent.Remove(c.recent.Back()).(*cached).key)
	}
	close(f.ready)
}

// get returns a frame's pages, which must not be changed, and reads them with
// load if they are not in the cache. Who waited for a Fetch that failed
// reads the frame itself: what was read ahead is no reason for a page fault to fail.
func (c *Cache) get(key frameKey, load func() ([]byte, error)) ([]byte, error) {
	for {
		f, mine := c.claim(key, false)
		if mine {
			pages, err := load()
			c.settle(f, pages, err, true)
			return pages, err
		}
		<-f.ready
		if f.err == nil || !f.ahead {
			return f.pages, f.err
		}
	}
}

// peek returns a frame's pages if they are in the cache, nil otherwise. If wait is
// set, it waits for a frame that is being read.
func (c *Cache) peek(key frameKey, wait bool) []byte {
	c.mu.Lock()
	f := c.find(key)
	c.mu.Unlock()
	if f == nil {
		return nil
	}
	if wait {
		<-f.ready
	}
	select {
	case <-f.ready:
		return f.pages
	default:
		return nil
	}
}
