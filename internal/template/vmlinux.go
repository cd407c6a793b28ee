package template

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

// Offsets in a bzImage, from the kernel's Documentation/arch/x86/boot.rst.
const (
	bzSetupSects    = 0x1f1 // byte: length of the real-mode part in sectors, without the first; 0 means 4
	bzBootFlag      = 0x1fe // 0xaa55
	bzHeaderMagic   = 0x202 // "HdrS"
	bzVersion       = 0x206 // boot protocol; the payload fields exist from 2.08 on
	bzPayloadOffset = 0x248 // from the start of the protected-mode part
	bzPayloadLength = 0x24c
	bzHeaderEnd     = 0x250
)

const (
	maxKernelImage = 256 << 20 // bytes of a bzImage
	maxVMLinux     = 512 << 20 // bytes of a kernel that was uncompressed
	lz4LegacyBlock = 8 << 20   // uncompressed size of every block of a legacy LZ4 stream but the last
	maxZstdWindow  = 128 << 20 // what "zstd --ultra" uses for a kernel
)

// errKernelImage is wrapped by every error about a kernel image that cannot be used.
var errKernelImage = errors.New("not a usable kernel image")

// extractVMLinux returns the uncompressed ELF kernel inside a bzImage. The
// compressed payload ends with the kernel's size (32 bits, little-endian),
// which the result is checked against. The kernel must have a PVH entry,
// through which a virtual machine starts it without firmware.
func extractVMLinux(bzImage []byte) ([]byte, error) {
	payload, err := kernelPayload(bzImage)
	if err != nil {
		return nil, err
	}
	if len(payload) < 8 {
		return nil, fmt.Errorf("%w: the payload has only %d bytes", errKernelImage, len(payload))
	}
	size := int64(binary.LittleEndian.Uint32(payload[len(payload)-4:]))
	if size == 0 || size > maxVMLinux {
		return nil, fmt.Errorf("%w: it claims an uncompressed size of %d bytes, at most %d are accepted", errKernelImage, size, int64(maxVMLinux))
	}
	kernel, err := uncompress(payload, size)
	if err != nil {
		return nil, err
	}
	if int64(len(kernel)) != size {
		return nil, fmt.Errorf("%w: the payload holds %d bytes, its end says %d", errKernelImage, len(kernel), size)
	}
	if err := checkPVH(kernel); err != nil {
		return nil, err
	}
	return kernel, nil
}

// kernelPayload returns the compressed kernel within a bzImage.
func kernelPayload(b []byte) ([]byte, error) {
	if len(b) < bzHeaderEnd || binary.LittleEndian.Uint16(b[bzBootFlag:]) != 0xaa55 ||
		string(b[bzHeaderMagic:bzHeaderMagic+4]) != "HdrS" {
		return nil, fmt.Errorf("%w: it has no x86 boot header", errKernelImage)
	}
	if v := binary.LittleEndian.Uint16(b[bzVersion:]); v < 0x0208 {
		return nil, fmt.Errorf("%w: boot protocol %d.%02d is too old, 2.08 is needed", errKernelImage, v>>8, v&0xff)
	}
	sectors := int64(b[bzSetupSects])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int64(binary.LittleEndian.Uint32(b[bzPayloadOffset:]))
	end := start + int64(binary.LittleEndian.Uint32(b[bzPayloadLength:]))
	if start >= end || end > int64(len(b)) {
		return nil, fmt.Errorf("%w: its payload lies at bytes %d to %d of %d", errKernelImage, start, end, len(b))
	}
	return b[start:end], nil
}

// uncompress returns what payload (with its size field) holds: at most size+1
// bytes, so that the caller sees when there are too many.
func uncompress(payload []byte, size int64) ([]byte, error) {
	stream := payload[:len(payload)-4]
	var (
		r    io.Reader
		name string
		err  error
	)
	switch {
	case bytes.HasPrefix(stream, []byte{0x02, 0x21, 0x4c, 0x18}):
		return unlz4Legacy(stream[4:], size)
	case bytes.HasPrefix(stream, []byte{0x1f, 0x8b}):
		// The size at the end is gzip's own.
		name = "gzip"
		var z *gzip.Reader
		if z, err = gzip.NewReader(bytes.NewReader(payload)); err == nil {
			z.Multistream(false)
			r = z
		}
	case bytes.HasPrefix(stream, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		name = "zstd"
		var z *zstd.Decoder
		if z, err = zstd.NewReader(bytes.NewReader(stream), zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderMaxWindow(maxZstdWindow)); err == nil {
			defer z.Close()
			r = z
		}
	case bytes.HasPrefix(stream, []byte("\xfd7zXZ\x00")):
		name = "xz"
		r, err = xz.ReaderConfig{SingleStream: true}.NewReader(bytes.NewReader(stream))
	default:
		return nil, fmt.Errorf("%w: its compression (first bytes % x) is not known; gzip, lz4, zstd and xz are", errKernelImage, stream[:4])
	}
	if err == nil {
		out := bytes.NewBuffer(make([]byte, 0, min(size, 64<<20)))
		if _, err = io.Copy(out, io.LimitReader(r, size+1)); err == nil {
			return out.Bytes(), nil
		}
	}
	return nil, fmt.Errorf("%w: its %s payload: %w", errKernelImage, name, err)
}

// unlz4Legacy reads the blocks of the LZ4 variant that kernels use: a 32-bit
// length before each compressed block, nothing else.
func unlz4Legacy(stream []byte, size int64) ([]byte, error) {
	var out []byte
	block := make([]byte, lz4LegacyBlock)
	for len(stream) > 0 && int64(len(out)) <= size {
		if int64(len(out))%lz4LegacyBlock != 0 {
			return nil, fmt.Errorf("%w: its lz4 payload goes on after a short block", errKernelImage)
		}
		if len(stream) < 4 {
			return nil, fmt.Errorf("%w: its lz4 payload ends within a block's length", errKernelImage)
		}
		n := int64(binary.LittleEndian.Uint32(stream))
		stream = stream[4:]
		if n == 0 || n > int64(len(stream)) {
			return nil, fmt.Errorf("%w: its lz4 payload has a block of %d bytes where %d are left", errKernelImage, n, len(stream))
		}
		m, err := lz4.UncompressBlock(stream[:n], block)
		if err != nil {
			return nil, fmt.Errorf("%w: its lz4 payload: %w", errKernelImage, err)
		}
		if m == 0 {
			return nil, fmt.Errorf("%w: its lz4 payload has an empty block", errKernelImage)
		}
		out = append(out, block[:m]...)
		stream = stream[n:]
	}
	return out, nil
}

// checkPVH reports whether an ELF kernel can be entered by a virtual machine
// directly: a note of owner "Xen" and type 18 names the entry.
func checkPVH(kernel []byte) error {
	f, err := elf.NewFile(bytes.NewReader(kernel))
	if err != nil {
		return fmt.Errorf("%w: what it holds is no ELF file: %w", errKernelImage, err)
	}
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 || f.Type != elf.ET_EXEC {
		return fmt.Errorf("%w: it holds a %v %v %v file, not an x86-64 kernel", errKernelImage, f.Class, f.Machine, f.Type)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes := make([]byte, p.Filesz)
		if _, err := p.ReadAt(notes, 0); err != nil {
			return fmt.Errorf("%w: its notes: %w", errKernelImage, err)
		}
		if hasNote(notes, "Xen\x00", 18) {
			return nil
		}
	}
	return fmt.Errorf("%w: it has no PVH entry (CONFIG_PVH)", errKernelImage)
}

// hasNote looks in the little-endian ELF notes b for one of this owner and type.
func hasNote(b []byte, owner string, kind uint32) bool {
	align := func(n uint32) uint64 { return (uint64(n) + 3) &^ 3 }
	for len(b) >= 12 {
		nameLen, descLen := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
		length := 12 + align(nameLen) + align(descLen)
		if length > uint64(len(b)) {
			return false
		}
		if binary.LittleEndian.Uint32(b[8:]) == kind && string(b[12:12+nameLen]) == owner {
			return true
		}
		b = b[length:]
	}
	return false
}
