// Package pack owns packs: immutable files of guest pages, stored in frames
// that can be read and verified one by one. docs/formats/pack.md specifies the
// format.
//
// A pack page is a page in a pack, numbered in the order of writing. A frame
// holds FramePages consecutive pack pages, the last one of a pack may hold
// fewer. A pack's Sum is the hash of its frames' hashes, whatever codec they are
// stored with: who knows the Sum can trust whatever a Reader returns.
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
const Version = 2

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
	entrySumAt  = entrySize - sha256.Size
	trailerSize = 64
	checksumAt  = trailerSize - sha256.Size // in the trailer
	maxStored   = 2 * FrameBytes

	headerMagic  = "HIBPACK\n"
	trailerMagic = "KCAPBIH\n"
	sumDomain    = "hibernacle pack\n" // makes a Sum unlike any other hash
)

// ErrCorrupt is wrapped by every error that says that a pack's bytes are not
// those that were written.
var ErrCorrupt = errors.New("corrupt pack")

// ErrVersion is wrapped by the error that says that a pack has a version of the
// format that this release does not read.
var ErrVersion = errors.New("unknown version of the pack format")

// Sum is the SHA-256 over the number of a pack's pages and the hashes of its
// decoded frames. It does not depend on the frames' codecs.
type Sum [sha256.Size]byte

// String returns the sum in hexadecimal digits.
func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Summary describes a whole pack. Pages and Sum say which pack it is: a manifest
// records these. Size belongs to one file of it and differs with the codec.
type Summary struct {
	Size  int64 // bytes of the file; 0: not known
	Pages int64
	Sum   Sum
}

// Same reports whether a and b describe the same pack, in whatever codec.
func (a Summary) Same(b Summary) bool { return a.Pages == b.Pages && a.Sum == b.Sum }

// Codec says how a frame's pages are encoded.
type Codec uint8

// The codecs of this version of the format.
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

// sumOf returns the Sum of the pack with that many pages and that index.
func sumOf(pages int64, index []byte) (sum Sum) {
	h := sha256.New()
	h.Write([]byte(sumDomain))
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(pages)))
	for ; len(index) > 0; index = index[entrySize:] {
		h.Write(index[entrySumAt:entrySize])
	}
	h.Sum(sum[:0])
	return sum
}

// appendTrailer adds the trailer to index, the whole index of a pack of that
// many pages, which lies at offset at of the file.
func appendTrailer(index []byte, pages, at int64) []byte {
	b := binary.LittleEndian.AppendUint64(index, uint64(pages))
	b = binary.LittleEndian.AppendUint64(b, uint64(at))
	b = binary.LittleEndian.AppendUint32(b, Version)
	b = append(b, 0, 0, 0, 0)
	b = append(b, trailerMagic...)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// frames returns how many frames hold n pages.
func frames(n int64) int64 { return (n + FramePages - 1) / FramePages }

// tailSize returns the length of index and trailer of a pack of n pages.
func tailSize(n int64) int64 { return frames(n)*entrySize + trailerSize }

// corrupt returns an error that wraps ErrCorrupt.
func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}
