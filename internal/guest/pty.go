package guest

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPTY opens a pseudo-terminal. Its two files are not blocking, so that
// reads of the master cost no thread and can be ended.
func openPTY(cols, rows uint32) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	var number int
	err = control(master, func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
		number = n
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("unlock a terminal: %w", err)
	}
	if err = resizePTY(master, cols, rows); err != nil {
		return nil, nil, err
	}
	slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	return master, slave, nil
}

// resizePTY sets a terminal's size in characters.
func resizePTY(master *os.File, cols, rows uint32) error {
	size := &unix.Winsize{Col: uint16(min(cols, 1<<16-1)), Row: uint16(min(rows, 1<<16-1))}
	err := control(master, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
	if err != nil {
		return fmt.Errorf("resize a terminal: %w", err)
	}
	return nil
}

// control calls fn with the descriptor of f and leaves f non-blocking, which
// f.Fd does not.
func control(f *os.File, fn func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		return err
	}
	return inner
}
