package template

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

// section is a named part of an ELF file that makeELF makes.
type section struct {
	name string
	data []byte
}

// makeELF returns a small ELF file for x86-64: one segment of type segment (0:
// none) that holds segmentData, and the sections.
func makeELF(t testing.TB, fileType uint16, segment uint32, segmentData []byte, sections ...section) []byte {
	t.Helper()
	const ehdr, phdr, shdr = 64, 56, 64
	le := binary.LittleEndian
	b := make([]byte, ehdr+phdr)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], fileType)
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[32:], ehdr)
	le.PutUint16(b[52:], ehdr)
	le.PutUint16(b[54:], phdr)
	if segment != 0 {
		le.PutUint16(b[56:], 1)
		le.PutUint32(b[ehdr:], segment)
		le.PutUint64(b[ehdr+8:], uint64(len(b)))
		le.PutUint64(b[ehdr+32:], uint64(len(segmentData)))
		le.PutUint64(b[ehdr+40:], uint64(len(segmentData)))
		b = append(b, segmentData...)
	}
	names := []byte{0}
	headers := make([]byte, shdr) // the null section
	add := func(name string, kind uint32, data []byte) {
		h := make([]byte, shdr)
		if name != "" {
			le.PutUint32(h, uint32(len(names)))
			names = append(names, name+"\x00"...)
		}
		le.PutUint32(h[4:], kind)
		le.PutUint64(h[24:], uint64(len(b)))
		le.PutUint64(h[32:], uint64(len(data)))
		b = append(b, data...)
		headers = append(headers, h...)
	}
	for _, s := range sections {
		add(s.name, 1, s.data)
	}
	add("", 3, names)
	le.PutUint64(b[40:], uint64(len(b)))
	le.PutUint16(b[58:], shdr)
	le.PutUint16(b[60:], uint16(len(headers)/shdr))
	le.PutUint16(b[62:], uint16(len(headers)/shdr-1))
	return append(b, headers...)
}

// pvhNote is the ELF note by which a kernel names its PVH entry.
var pvhNote = []byte("\x04\x00\x00\x00\x04\x00\x00\x00\x12\x00\x00\x00Xen\x00\x00\x00\x00\x01")

// makeTestKernel returns an uncompressed kernel with a PVH entry.
func makeTestKernel(t testing.TB) []byte {
	return makeELF(t, 2, 4, pvhNote, section{".text", bytes.Repeat([]byte("kernel code "), 5000)})
}

// makeBzImage returns a bzImage with the payload.
func makeBzImage(payload []byte) []byte {
	const setup, offset = 2, 100
	b := make([]byte, (setup+1)*512+offset)
	b[bzSetupSects] = setup
	binary.LittleEndian.PutUint16(b[bzBootFlag:], 0xaa55)
	copy(b[bzHeaderMagic:], "HdrS")
	binary.LittleEndian.PutUint16(b[bzVersion:], 0x020f)
	binary.LittleEndian.PutUint32(b[bzPayloadOffset:], offset)
	binary.LittleEndian.PutUint32(b[bzPayloadLength:], uint32(len(payload)))
	return append(append(b, payload...), "what follows the payload"...)
}

// compressKernel returns a payload: the compressed kernel and its size.
func compressKernel(t testing.TB, format string, kernel []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	size := binary.LittleEndian.AppendUint32(nil, uint32(len(kernel)))
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	switch format {
	case "gzip":
		w := gzip.NewWriter(&b)
		_, err := w.Write(kernel)
		must(err)
		must(w.Close())
		return b.Bytes() // ends with the size itself
	case "lz4":
		w := lz4.NewWriter(&b)
		must(w.Apply(lz4.LegacyOption(true)))
		_, err := w.Write(kernel)
		must(err)
		must(w.Close())
	case "zstd":
		w, err := zstd.NewWriter(&b)
		must(err)
		_, err = w.Write(kernel)
		must(err)
		must(w.Close())
	case "xz":
		w, err := xz.NewWriter(&b)
		must(err)
		_, err = w.Write(kernel)
		must(err)
		must(w.Close())
	default:
		t.Fatalf("format %q", format)
	}
	return append(b.Bytes(), size...)
}

func TestExtractVMLinux(t *testing.T) {
	kernel := makeTestKernel(t)
	for _, format := range []string{"gzip", "lz4", "zstd", "xz"} {
		t.Run(format, func(t *testing.T) {
			got, err := extractVMLinux(makeBzImage(compressKernel(t, format, kernel)))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, kernel) {
				t.Errorf("%d bytes came out, %d went in", len(got), len(kernel))
			}
		})
	}
}

func TestExtractVMLinuxRefusesWhatIsNoKernel(t *testing.T) {
	good := makeBzImage(compressKernel(t, "lz4", makeTestKernel(t)))
	change := func(at int, to ...byte) []byte {
		b := bytes.Clone(good)
		copy(b[at:], to)
		return b
	}
	payload := func(format string, kernel []byte, change func([]byte)) []byte {
		p := compressKernel(t, format, kernel)
		change(p)
		return makeBzImage(p)
	}
	end := func(p []byte) []byte { return p[len(p)-4:] }
	for name, c := range map[string]struct {
		image []byte
		want  string
	}{
		"empty":                  {nil, "boot header"},
		"short":                  {good[:bzHeaderEnd-1], "boot header"},
		"no magic":               {change(bzHeaderMagic, 'X'), "boot header"},
		"old protocol":           {change(bzVersion, 0x07, 0x02), "too old"},
		"payload past the end":   {change(bzPayloadLength, 0xff, 0xff, 0xff, 0x7f), "payload lies"},
		"payload far off":        {change(bzPayloadOffset, 0xff, 0xff, 0xff, 0xff), "payload lies"},
		"no payload":             {change(bzPayloadLength, 0, 0, 0, 0), "payload lies"},
		"tiny payload":           {makeBzImage([]byte("tiny")), "only 4 bytes"},
		"unknown compression":    {makeBzImage([]byte("BZh91AY&SY\x00\x10\x00\x00")), "compression"},
		"huge size":              {payload("lz4", makeTestKernel(t), func(p []byte) { copy(end(p), "\xff\xff\xff\xff") }), "claims"},
		"size too small":         {payload("zstd", makeTestKernel(t), func(p []byte) { copy(end(p), "\x10\x00\x00\x00") }), "its end says 16"},
		"size too large":         {payload("lz4", makeTestKernel(t), func(p []byte) { end(p)[2]++ }), "its end says"},
		"damaged lz4 block size": {payload("lz4", makeTestKernel(t), func(p []byte) { copy(p[4:], "\xff\xff\xff\xff") }), "block of"},
		"damaged lz4 data":       {payload("lz4", makeTestKernel(t), func(p []byte) { clear(p[8 : len(p)-4]) }), "lz4"},
		"lz4 of short blocks":    {makeBzImage([]byte("\x02\x21\x4c\x18\x02\x00\x00\x00\x10A\x02\x00\x00\x00\x10A\x20\x00\x00\x00")), "short block"},
		"damaged zstd":           {payload("zstd", makeTestKernel(t), func(p []byte) { clear(p[8 : len(p)-4]) }), "zstd"},
		"damaged gzip":           {payload("gzip", makeTestKernel(t), func(p []byte) { clear(p[12 : len(p)-8]) }), "gzip"},
		"damaged xz":             {payload("xz", makeTestKernel(t), func(p []byte) { clear(p[12 : len(p)-8]) }), "xz"},
		"no ELF file":            {makeBzImage(compressKernel(t, "gzip", []byte("#!/bin/sh"))), "no ELF file"},
		"a relocatable file":     {makeBzImage(compressKernel(t, "gzip", makeELF(t, 1, 4, pvhNote))), "not an x86-64 kernel"},
		"no PVH entry":           {makeBzImage(compressKernel(t, "gzip", makeELF(t, 2, 4, pvhNote[:11]))), "PVH"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := extractVMLinux(c.image)
			if !errors.Is(err, errKernelImage) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %s", err, c.want)
			}
		})
	}
}

func FuzzExtractVMLinux(f *testing.F) {
	for _, format := range []string{"gzip", "lz4", "zstd", "xz"} {
		f.Add(makeBzImage(compressKernel(f, format, makeTestKernel(f))))
	}
	f.Fuzz(func(t *testing.T, image []byte) {
		kernel, err := extractVMLinux(image)
		if err == nil && (len(kernel) == 0 || len(kernel) > maxVMLinux) {
			t.Errorf("a kernel of %d bytes was accepted", len(kernel))
		}
	})
}

// FuzzPayload fuzzes the decompressors and the ELF check behind a good header.
func FuzzPayload(f *testing.F) {
	for _, format := range []string{"gzip", "lz4", "zstd", "xz"} {
		f.Add(compressKernel(f, format, makeTestKernel(f)))
	}
	f.Add(makeTestKernel(f))
	f.Fuzz(func(t *testing.T, payload []byte) {
		_, _ = extractVMLinux(makeBzImage(payload))
		_ = checkPVH(payload)
	})
}
