package shim

import (
	"fmt"
	"os"
	"sync"
)

// consoleLimit bounds a console file in bytes. A full one becomes PATH.1,
// whose predecessor is dropped: a guest that prints for ever fills no disk.
const consoleLimit = 1 << 20

// console takes what a guest prints. Before it is attached to a file it keeps
// the last few KiB. Writes never fail: a guest must not stall on a full disk.
type console struct {
	mu   sync.Mutex
	path string
	file *os.File
	size int64
	held []byte
}

const consoleHeld = 16 << 10

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file == nil {
		c.held = append(c.held, p...)
		if n := len(c.held) - consoleHeld; n > 0 {
			c.held = c.held[n:]
		}
		return len(p), nil
	}
	c.write(p)
	return len(p), nil
}

func (c *console) write(p []byte) {
	if c.size+int64(len(p)) > consoleLimit {
		c.rotate()
	}
	if c.file == nil {
		return
	}
	n, _ := c.file.Write(p)
	c.size += int64(n)
}

func (c *console) rotate() {
	_ = c.file.Close()
	_ = os.Rename(c.path, c.path+".1")
	c.file, c.size = nil, 0
	if f, err := os.OpenFile(c.path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err == nil {
		c.file = f
	}
}

// attach sends what comes, and what was held, to the end of the file path.
func (c *console) attach(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open console log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open console log: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file != nil { // of the run before
		_ = c.file.Close()
	}
	c.path, c.file, c.size = path, f, info.Size()
	c.write(c.held)
	c.held = nil
	return nil
}

// tail returns the last of what is held by a console that is not attached.
func (c *console) tail() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.held)
}

func (c *console) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file == nil {
		return nil
	}
	err := c.file.Close()
	c.file = nil
	return err
}
