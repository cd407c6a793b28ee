package template

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// Checker verifies templates before they are used, and reads their files again
// only after they were touched: a file that is the same by device, inode, length
// and times of change is taken for the one that was verified. The zero value is
// ready; its method may be called at the same time.
type Checker struct {
	mu      sync.Mutex
	checked map[string]*check // by folder
}

// check is the verification of one state of a template's files.
type check struct {
	identity string
	once     sync.Once
	err      error
}

// Check returns what a.Verify returned for the files as they are.
func (c *Checker) Check(a Artifacts) error {
	identity, err := filesIdentity(a)
	if err != nil {
		return err
	}
	c.mu.Lock()
	found := c.checked[a.Dir]
	if found == nil || found.identity != identity {
		found = &check{identity: identity}
		if c.checked == nil {
			c.checked = map[string]*check{}
		}
		c.checked[a.Dir] = found
	}
	c.mu.Unlock()
	found.once.Do(func() { found.err = a.Verify() })
	return found.err
}

// filesIdentity returns what changes when a file of the template does.
func filesIdentity(a Artifacts) (string, error) {
	identity := ""
	for _, name := range []string{recordFile, kernelFile, initrdFile, baseFile} {
		path := filepath.Join(a.Dir, name)
		info, err := os.Stat(path)
		if err != nil {
			return "", fmt.Errorf("check template: %w: %w", ErrCorrupt, err)
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return "", fmt.Errorf("check template: %s tells no inode", path)
		}
		identity += fmt.Sprintf("%d:%d:%d:%d.%d:%d.%d;", st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec)
	}
	return identity, nil
}
