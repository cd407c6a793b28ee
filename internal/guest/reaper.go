package guest

import (
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// spawner starts child processes and keeps them apart from the orphans that
// fall to the first process of a system. A child's exit status belongs to
// whoever waits for the child; only what nobody started here is reaped.
type spawner struct {
	starting sync.RWMutex // held for reading between fork and registration
	children sync.Map     // pid → struct{}
	exits    chan os.Signal
}

func newSpawner() *spawner { return &spawner{exits: make(chan os.Signal, 1)} }

// start starts a process. The caller must call wait once.
func (s *spawner) start(path string, argv []string, attr *os.ProcAttr) (*os.Process, error) {
	s.starting.RLock()
	p, err := os.StartProcess(path, argv, attr)
	if err == nil {
		s.children.Store(p.Pid, struct{}{})
	}
	s.starting.RUnlock()
	s.poke()
	return p, err
}

// wait waits for the end of a process that start started.
func (s *spawner) wait(p *os.Process) (*os.ProcessState, error) {
	state, err := p.Wait()
	s.children.Delete(p.Pid)
	s.poke() // the reaper may have stood before this process
	return state, err
}

func (s *spawner) poke() {
	select {
	case s.exits <- unix.SIGCHLD:
	default:
	}
}

// reapOrphans reaps what ended until the channel closes. It is run only in the
// first process; exits must also be fed with SIGCHLD.
func (s *spawner) reapOrphans() {
	for range s.exits {
		for s.reapOne() {
		}
	}
}

// reapOne reaps one ended orphan. It looks at the first ended child without
// reaping it: a child with an owner is left to the owner, whose wait pokes the
// reaper again. While a start is under way nothing is reaped, since a process
// could have ended before it was registered; the start pokes as well.
func (s *spawner) reapOne() bool {
	if !s.starting.TryLock() {
		return false
	}
	defer s.starting.Unlock()
	pid := endedChild()
	if pid <= 0 {
		return false
	}
	if _, owned := s.children.Load(pid); owned {
		return false
	}
	_, err := unix.Wait4(pid, nil, unix.WNOHANG, nil)
	return err == nil
}

// endedChild returns the pid of a child that has ended and was not reaped, or 0.
func endedChild() int {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
	if err != nil || info.Signo == 0 {
		return 0
	}
	// The kernel's siginfo_t has si_pid at offset 16 on 64-bit machines; the
	// package leaves that part unnamed.
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 16)))
}
