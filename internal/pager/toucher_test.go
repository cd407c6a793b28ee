package pager

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime/debug"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/hibernacle/hibernacle/internal/page"
)

// The process that serves a slot must not touch its mapping. Tests let a child
// do it: the test binary itself, run as a "toucher" that obeys commands on its
// standard input, or as a "server" that serves a slot until it is killed.
const roleEnv = "HIB_PAGER_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "toucher":
		serveLines(newToucher())
	case "server":
		serveLines(&pagerChild{})
	default:
		goleak.VerifyTestMain(m)
	}
}

// command is one order to a child. Offsets and lengths are in bytes.
type command struct {
	Op   string
	Path string `json:",omitempty"`
	Off  int64  `json:",omitempty"`
	Len  int64  `json:",omitempty"`
	Byte byte   `json:",omitempty"`
	Seed uint64 `json:",omitempty"`
	UID  int    `json:",omitempty"`
}

// result is the answer to a command.
type result struct {
	Addr  uint64        `json:",omitempty"`
	Sum   string        `json:",omitempty"`
	Path  string        `json:",omitempty"`
	Took  time.Duration `json:",omitempty"`
	Fault bool          `json:",omitempty"` // the access ended in SIGBUS or SIGSEGV
	Error string        `json:",omitempty"`
}

// serveLines answers commands until standard input ends.
func serveLines(child interface{ do(command) (result, error) }) {
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		var c command
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			panic(err)
		}
		r, err := child.do(c)
		if err != nil {
			r.Error = err.Error()
		}
		if err := out.Encode(r); err != nil {
			panic(err)
		}
	}
	os.Exit(0)
}

// child is the test's end of a child process.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
	end io.Closer
}

// startChild starts a child in a role. It ends with the test.
func startChild(t testing.TB, role string, change ...func(*exec.Cmd)) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, "GORACE=atexit_sleep_ms=0") // else each child sleeps a second at its end
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	for _, f := range change {
		f(cmd)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(out), end: in}
	t.Cleanup(c.stop)
	return c
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// stop ends the child and waits for it. Idempotent.
func (c *child) stop() {
	_ = c.end.Close()
	_ = c.cmd.Wait()
}

// kill ends the child with SIGKILL and waits for it.
func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// try sends a command and returns the answer.
func (c *child) try(cmd command) result {
	c.t.Helper()
	if err := c.in.Encode(cmd); err != nil {
		c.t.Fatalf("%s: %v", cmd.Op, err)
	}
	var r result
	if err := c.out.Decode(&r); err != nil {
		c.t.Fatalf("%s: no answer from the child: %v", cmd.Op, err)
	}
	return r
}

// must is try where failure fails the test.
func (c *child) must(cmd command) result {
	c.t.Helper()
	r := c.try(cmd)
	if r.Fault || r.Error != "" {
		c.t.Fatalf("%+v: %+v", cmd, r)
	}
	return r
}

// toucher maps one file or anonymous memory, and touches it.
type toucher struct{ mem []byte }

func newToucher() *toucher {
	debug.SetPanicOnFault(true)
	return &toucher{}
}

func (t *toucher) do(c command) (r result, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			if _, ok := cause.(interface{ Addr() uintptr }); !ok {
				panic(cause)
			}
			r = result{Fault: true}
		}
	}()
	switch c.Op {
	case "map":
		return t.mapFile(c.Path, c.Off, c.Len)
	case "anonymous":
		return t.mapped(unix.Mmap(-1, 0, int(c.Len), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
	case "read":
		sum := sha256.Sum256(t.mem[c.Off : c.Off+c.Len])
		return result{Sum: hex.EncodeToString(sum[:])}, nil
	case "write":
		b := t.mem[c.Off : c.Off+c.Len]
		for i := range b {
			b[i] = c.Byte
		}
		return r, nil
	case "rewrite": // each page's first byte with what it has
		for p := c.Off; p < c.Off+c.Len; p += page.Size {
			rewrite(&t.mem[p])
		}
		return r, nil
	case "dontneed":
		return r, unix.Madvise(t.mem[c.Off:c.Off+c.Len], unix.MADV_DONTNEED)
	case "protect": // splits the mapping in the kernel's books
		return r, unix.Mprotect(t.mem[c.Off:c.Off+c.Len], unix.PROT_READ)
	case "unmap":
		_, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(&t.mem[c.Off])), uintptr(c.Len), 0)
		if errno != 0 {
			return r, errno
		}
		return r, nil
	case "scattered", "local", "sequential": // Len bytes, page by page, timed
		return t.touch(c), nil
	case "truncate":
		return r, os.Truncate(c.Path, c.Len)
	case "pwrite":
		f, err := os.OpenFile(c.Path, os.O_RDWR, 0)
		if err != nil {
			return r, err
		}
		defer f.Close()
		_, err = f.WriteAt([]byte{1}, c.Off)
		return r, err
	case "fallocate":
		f, err := os.OpenFile(c.Path, os.O_RDWR, 0)
		if err != nil {
			return r, err
		}
		defer f.Close()
		return r, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page.Size)
	}
	return r, errors.New("unknown command")
}

//go:noinline
func rewrite(p *byte) { *p = load(p) }

//go:noinline
func load(p *byte) byte { return *p }

// mapFile maps length bytes of a file as a VMM does.
func (t *toucher) mapFile(path string, off, length int64) (result, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return result{}, fmt.Errorf("open: %w", err)
	}
	defer unix.Close(fd)
	return t.mapped(unix.Mmap(fd, off, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE))
}

func (t *toucher) mapped(mem []byte, err error) (result, error) {
	if err != nil {
		return result{}, err
	}
	t.mem = mem
	return result{Addr: uint64(uintptr(unsafe.Pointer(&mem[0])))}, nil
}

// touch reads a byte of each of Len/4096 different pages: in order, at random,
// or runs of 16 at random.
func (t *toucher) touch(c command) result {
	run := map[string]int64{"scattered": 1, "local": 16, "sequential": c.Len / page.Size}[c.Op]
	order := rand.New(rand.NewPCG(c.Seed, 0)).Perm(int(int64(len(t.mem)) / (run * page.Size)))
	if c.Op == "sequential" {
		order = []int{0}
	}
	start, sum := time.Now(), byte(0)
	for _, first := range order[:c.Len/page.Size/run] {
		for p := range run {
			sum += t.mem[(int64(first)*run+p)*page.Size]
		}
	}
	return result{Took: time.Since(start), Sum: string(rune(sum))}
}

// pagerChild serves a slot from a process of its own.
type pagerChild struct {
	server *Server
	slot   *Slot
	asked  chan struct{} // closed when a silent source was read
}

func (p *pagerChild) do(c command) (r result, err error) {
	switch c.Op {
	case "mount", "mount silent": // a slot "ram" of Len bytes of pattern, or of a source that never answers
		start := time.Now()
		if p.server, err = Mount(c.Path, nil); err != nil {
			return r, err
		}
		if p.slot, err = p.server.NewSlot("ram", c.Len); err != nil {
			return r, err
		}
		source := io.ReaderAt(pattern(c.Len))
		if c.Op == "mount silent" {
			p.asked = make(chan struct{})
			once := sync.OnceFunc(func() { close(p.asked) })
			source = sourceFunc(func([]byte, int64) (int, error) { once(); select {} })
		}
		return result{Path: p.slot.Path(), Took: time.Since(start)}, p.slot.Bind(source)
	case "push": // Len bytes, once the silent source was asked
		<-p.asked
		go p.slot.Push(c.Off, make([]byte, c.Len))
	case "setuid":
		if err := syscall.Setgid(c.UID); err != nil {
			return r, err
		}
		return r, syscall.Setuid(c.UID)
	case "close":
		start := time.Now()
		err = p.server.Close()
		return result{Took: time.Since(start)}, err
	default:
		err = errors.New("unknown command")
	}
	return r, err
}

// pattern is a source of that many bytes, none of which repeat at short
// distances.
type pattern int64

func (n pattern) ReadAt(p []byte, off int64) (int, error) {
	size := min(int64(len(p)), max(0, int64(n)-off))
	for i := range size {
		at := uint64(off + i)
		p[i] = byte((at/8*0x9e3779b97f4a7c15 + 0x7f4a7c15) >> (8 * (at % 8)))
	}
	if size < int64(len(p)) {
		return int(size), io.EOF
	}
	return int(size), nil
}

// sum returns the checksum of a part of the pattern.
func (n pattern) sum(off, length int64) string {
	b := make([]byte, length)
	if _, err := n.ReadAt(b, off); err != nil {
		panic(err)
	}
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}
