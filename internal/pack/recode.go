package pack

import (
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
)

// Recode writes the pack that src reads to dst with another codec, and returns
// what it wrote, which is the same pack: Pages and Sum are src's. Every frame is
// verified on the way. It reads ahead and uses all cores, and its memory does not
// grow with the pack. Errors of src name the frame and wrap ErrCorrupt where
// its bytes are wrong; dst then holds nothing of use.
func Recode(ctx context.Context, dst io.Writer, src *Reader, codec Codec) (Summary, error) {
	w, err := NewWriter(dst, codec)
	if err != nil {
		return Summary{}, err
	}
	defer w.Abort()
	g, ctx := errgroup.WithContext(ctx)
	frames := make(chan []byte, requestFrames)
	g.Go(func() error {
		defer close(frames)
		return src.stream(ctx, frames)
	})
	g.Go(func() error {
		for pages := range frames {
			if err := w.Append(pages); err != nil {
				return err
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return Summary{}, fmt.Errorf("recode pack: %w", err)
	}
	s, err := w.Close()
	if err == nil && !s.Same(src.summary) {
		err = fmt.Errorf("recode pack: it came out with the sum %v instead of %v; is this machine's memory sound?", s.Sum, src.summary.Sum)
	}
	if err != nil {
		return Summary{}, err
	}
	return s, nil
}

// stream sends the verified pages of all frames in order.
func (r *Reader) stream(ctx context.Context, to chan<- []byte) error {
	frames := make([]int64, r.frames())
	for i := range frames {
		frames[i] = int64(i)
	}
	for len(frames) > 0 {
		n, _ := r.Cut(frames, 0)
		var failed error
		r.readFrames(frames[:n], func(k int, pages []byte, err error) {
			switch {
			case failed != nil:
			case err != nil:
				failed = fmt.Errorf("frame %d: %w", frames[k], err)
			default:
				select {
				case to <- pages:
				case <-ctx.Done():
					failed = ctx.Err()
				}
			}
		})
		if failed != nil {
			return failed
		}
		frames = frames[n:]
	}
	return nil
}
