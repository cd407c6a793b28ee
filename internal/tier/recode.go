package tier

import (
	"context"
	"io"

	"github.com/hibernacle/hibernacle/internal/pack"
	"github.com/hibernacle/hibernacle/internal/page"
)

func recode(ctx context.Context, w io.Writer, r *pack.Reader, _ pack.Codec) error {
	pw, err := pack.NewWriter(w, pack.Raw)
	if err != nil {
		return err
	}
	defer pw.Abort()
	buf := make([]byte, pack.FrameBytes)
	for off := int64(0); off < r.Summary().Pages*page.Size; off += int64(len(buf)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.ReadAt(buf, off)
		if err != nil && err != io.EOF {
			return err
		}
		if err := pw.Append(buf[:n]); err != nil {
			return err
		}
	}
	_, err = pw.Close()
	return err
}
