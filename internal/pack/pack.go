// Package pack owns packs: immutable files of guest pages, stored in frames
// that can be read and verified one by one. docs/formats/pack.md specifies the
// format.
//
// A pack page is a page in a pack, numbered in the order of writing. A frame
// holds FramePages consecutive pack pages, the last one of a pack may hold
// fewer. A pack's Sum is the hash of its index, which holds the hash of each
// frame: who knows the Sum can trust whatever a Reader returns.
package pack

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/hibernacle/hibernacle/internal/page"
)

// Version is the version of the format that this package writes and reads.
const Version = 1

// FramePages is the number of pages in a frame, FrameBytes their length.
const (
	FramePages = 16
	FrameBytes = FramePages * page.Size
)

// MaxPages is the largest number of pages that a pack can hold.
const MaxPages = 1<<32 - 2

const (
	headerSize  = 4096
	entrySize   = 48
	trailerSize = 64
	sumOffset   = 32 // in the trailer
	maxStored   = 2 * FrameBytes

	headerMagic  = "HIBPACK\n"
	trailerMagic = "KCAPBIH\n"
)

// ErrCorrupt is wrapped by every error that says that a pack's bytes are not
// those that were written.
var ErrCorrupt = errors.New("corrupt pack")

// ErrVersion is wrapped by the error that says that a pack was written by a
// newer release.
var ErrVersion = errors.New("unknown version of the pack format")

// Sum is the SHA-256 over a pack's header, index and trailer.
type Sum [sha256.Size]byte

// String returns the sum in hexadecimal digits.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Summary describes a whole pack: what a manifest records of it.
type Summary struct {
	Size  int64 // bytes of the file
	Pages int64
	Sum   Sum
}

// Codec says how a frame's pages are encoded.
type Codec uint8

// The codecs of format version 1.
const (
	Raw  Codec = 0
	Zstd Codec = 1
)

// String returns the codec's name in the format's specification.
func (c Codec) String() string {
	switch c {
	case Raw:
		return "raw"
	case Zstd:
		return "zstd"
	}
	return fmt.Sprintf("codec %d", uint8(c))
}

// entry is a frame's entry in the index.
type entry struct {
	offset int64
	stored int32
	codec  Codec
	sum    [sha256.Size]byte // of the decoded pages
}

func (e *entry) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(e.offset))
	b = binary.LittleEndian.AppendUint32(b, uint32(e.stored))
	b = append(b, byte(e.codec), 0, 0, 0)
	return append(b, e.sum[:]...)
}

// header returns a pack's first bytes.
func header() []byte {
	b := make([]byte, headerSize)
	copy(b, headerMagic)
	binary.LittleEndian.PutUint32(b[8:], Version)
	return b
}

// trailer is a pack's end, but for the sum.
type trailer struct {
	pages int64
	index int64 // file offset
}

func (t *trailer) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(t.pages))
	b = binary.LittleEndian.AppendUint64(b, uint64(t.index))
	b = binary.LittleEndian.AppendUint32(b, Version)
	b = append(b, 0, 0, 0, 0)
	return append(b, trailerMagic...)
}

// frames returns how many frames hold n pages.
func frames(n int64) int64 { return (n + FramePages - 1) / FramePages }

// corrupt returns an error that wraps ErrCorrupt.
func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}
