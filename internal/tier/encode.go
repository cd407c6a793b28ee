package tier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/hibernacle/hibernacle/internal/blob"
	"github.com/hibernacle/hibernacle/internal/snapshot"
)

// Objects other than packs are encoded as docs/formats/remote.md says: header,
// content as Zstandard, trailer.
const (
	encodedMagic   = "HIBZSTD\n"
	encodedVersion = 1
	encodedHeader  = 16
	encodedTrailer = 8 + sha256.Size
	maxWindow      = 8 << 20
)

// maxObject bounds the content of what is decoded into memory; it is the bound of a manifest.
const maxObject = 1 << 30

// encode writes the content in r to w, encoded, and returns the content's SHA-256.
func encode(w io.Writer, r io.Reader) ([]byte, error) {
	header := append(make([]byte, 0, encodedHeader), encodedMagic...)
	header = binary.LittleEndian.AppendUint32(header, encodedVersion)
	header = binary.LittleEndian.AppendUint32(header, 0)
	if _, err := w.Write(header); err != nil {
		return nil, err
	}
	// One goroutine: what runs beside has the right of way.
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(maxWindow), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	n, err := io.Copy(z, io.TeeReader(r, sum))
	if cerr := z.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, err
	}
	digest := sum.Sum(nil)
	_, err = w.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(n)), digest...))
	return digest, err
}

// decode returns the content of the encoded object o, at most limit bytes.
func decode(o blob.Object, key string, limit int64) ([]byte, error) {
	var b bytes.Buffer
	if err := decodeTo(&b, o, key, limit); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// decodeTo writes the content of the encoded object o to w and then verifies
// it: on error what was written is worth nothing. Errors name the key; one about
// wrong bytes wraps snapshot.ErrCorrupt, one about an unknown version
// snapshot.ErrVersion.
func decodeTo(w io.Writer, o blob.Object, key string, limit int64) error {
	corrupt := func(format string, args ...any) error {
		return fmt.Errorf("%w %s in the remote store: %s", snapshot.ErrCorrupt, key, fmt.Sprintf(format, args...))
	}
	if o.Size() < encodedHeader+encodedTrailer {
		return corrupt("it is cut off, it has %d bytes", o.Size())
	}
	var header [encodedHeader]byte
	var trailer [encodedTrailer]byte
	for _, part := range []struct {
		p   []byte
		off int64
	}{{header[:], 0}, {trailer[:], o.Size() - encodedTrailer}} {
		if n, err := o.ReadAt(part.p, part.off); n < len(part.p) {
			return fmt.Errorf("read %s from the remote store: %w", key, noEOF(err))
		}
	}
	if string(header[:8]) != encodedMagic {
		return corrupt("it is not encoded as it should be")
	}
	if v := binary.LittleEndian.Uint32(header[8:]); v != encodedVersion {
		return fmt.Errorf("%w %s in the remote store: version %d, this release reads version %d", snapshot.ErrVersion, key, v, encodedVersion)
	}
	size := binary.LittleEndian.Uint64(trailer[:])
	if binary.LittleEndian.Uint32(header[12:]) != 0 || size > uint64(limit) {
		return corrupt("its header is wrong, or its %d bytes are more than the %d that are possible", size, limit)
	}
	src := &source{r: io.NewSectionReader(o, encodedHeader, o.Size()-encodedHeader-encodedTrailer)}
	dst := &sink{w: w}
	z, err := zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return err
	}
	defer z.Close()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(dst, sum), io.LimitReader(z, int64(size)+1))
	switch {
	case src.err != nil:
		return fmt.Errorf("read %s from the remote store: %w", key, src.err)
	case dst.err != nil:
		return dst.err
	case err != nil:
		return corrupt("%v", err)
	case n != int64(size) || !bytes.Equal(sum.Sum(nil), trailer[8:]):
		return corrupt("its content does not fit its hash")
	}
	return nil
}

// source keeps the error of a read, which is not the fault of the bytes.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// sink keeps the error of a write, which is not either.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		s.err = err
	}
	return n, err
}

// noEOF makes the end of an object that came too early an error of its own.
func noEOF(err error) error {
	if err == io.EOF || err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}
