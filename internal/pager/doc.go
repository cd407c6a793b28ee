// Package pager serves the memory of a virtual machine as a file, and finds
// out from outside what the machine changed of it. It knows neither snapshots
// nor VMMs, only bytes, files and processes. Its nouns:
//
//   - A [Server] is one FUSE mount, served by this process.
//   - A [Slot] is one file of fixed size in it. A VMM maps it privately
//     (MAP_PRIVATE). The slot exists before its content is decided: [Slot.Bind]
//     gives it its source, once.
//   - The source is an io.ReaderAt. A page fault of the VMM becomes a READ
//     request, and the READ is answered with the source's bytes or, where the
//     source fails, with EIO, which the VMM receives as SIGBUS. Bytes are never
//     made up.
//   - A dirty page is a page of such a private mapping that no longer shows
//     the file: it was written, or swapped out after that, or replaced by the
//     zero page. [Dirty] lists them, [Mapping] finds the mapping and
//     [ProcessMemory] reads it.
//
// The process that serves a slot must never touch a mapping of it: a goroutine
// that waits in a page fault holds its thread in a way that the Go runtime
// does not know of, and may stop the very goroutines that would answer.
// Reading through [ProcessMemory] is safe, since that is a system call.
//
// The package is for Linux on 64-bit machines with 4 KiB pages.
package pager
