package bench

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// The plot's measures in pixels.
const (
	plotWidth  = 920
	plotLeft   = 250 // of the axis
	plotRight  = 120 // room for figures
	plotTop    = 76
	rowHeight  = 22
	groupSpace = 30
)

// plotStyle holds for light and dark backgrounds.
const plotStyle = `
  svg { background: #ffffff; font-family: system-ui, sans-serif; font-size: 12px; fill: #24292f }
  .title { font-size: 17px; font-weight: 600 } .quiet { fill: #66707b } .group { font-weight: 600 }
  .grid { stroke: #e3e7eb } .end { text-anchor: end } .mid { text-anchor: middle }
  .hib { stroke: #0b7285; fill: #0b7285 } .lazy { stroke: #0b7285; fill: #ffffff }
  .awake { stroke: #2f9e44; fill: #2f9e44 } .peer { stroke: #c2410c; fill: #c2410c }
  .range { stroke-width: 3; stroke-linecap: round; opacity: .38 } .dot { stroke-width: 2 } .tick { stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    svg { background: #14181d; fill: #e2e6ea } .quiet { fill: #939ca6 } .grid { stroke: #2b323a }
    .hib { stroke: #3bc9db; fill: #3bc9db } .lazy { stroke: #3bc9db; fill: #14181d }
    .awake { stroke: #69db7c; fill: #69db7c } .peer { stroke: #ff922b; fill: #ff922b }
  }`

// plotGroup are the rows of one workload and size.
type plotGroup struct {
	title string
	rows  []Row
}

// WriteSVG draws the time to the first answer in every state: a dot at the
// median, a line to the 95th percentile, a mark at the slowest, on a logarithmic scale.
func WriteSVG(w io.Writer, res Result) error {
	groups, low, high := plotGroups(res.Rows)
	x := logScale(low, high)
	height := plotTop + 40
	for _, g := range groups {
		height += groupSpace + rowHeight*len(g.rows)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n<style>%s\n</style>\n",
		plotWidth, height, plotWidth, height, plotStyle)
	text(&b, 24, 32, "title", "From the request to the first answer")
	text(&b, 24, 52, "quiet", fmt.Sprintf("%s, %s, %d cores, %s", strings.ToUpper(res.Meta.Accel), res.Meta.CPU, res.Meta.Cores, res.Meta.Date.Format("2006-01-02")))
	legend(&b)
	for _, v := range ticks(low, high) {
		fmt.Fprintf(&b, "<line class=\"grid\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>\n", x(v), plotTop, x(v), height-34)
		text(&b, x(v), float64(height-16), "quiet mid", duration(v))
	}
	y := float64(plotTop)
	for _, g := range groups {
		y += groupSpace
		text(&b, 24, y-8, "group", g.title)
		for _, r := range g.rows {
			plotRow(&b, x, y+rowHeight/2, r)
			y += rowHeight
		}
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// plotGroups returns what is drawn, in groups, and the least and greatest value.
func plotGroups(rows []Row) (groups []plotGroup, low, high float64) {
	low, high = math.Inf(1), 0
	for _, r := range rows {
		boot := r.Peer == PeerBoot
		if r.SuccessRate == 0 || r.Metric != MetricFirst && !boot || r.P50 <= 0 {
			continue
		}
		title := fmt.Sprintf("%s, %d MiB", r.Workload, r.MemoryMiB)
		switch {
		case boot:
			title = fmt.Sprintf("cold boot, to the agent's first answer, %d MiB", r.MemoryMiB)
		case r.Concurrency > 1:
			title += fmt.Sprintf(", %d at once", r.Concurrency)
		}
		i := 0
		for i < len(groups) && groups[i].title != title {
			i++
		}
		if i == len(groups) {
			groups = append(groups, plotGroup{title: title})
		}
		groups[i].rows = append(groups[i].rows, r)
		low, high = min(low, r.P50), max(high, r.Max)
	}
	if high == 0 {
		low, high = 1, 10
	}
	return groups, low / 1.15, max(high, low*1.2) * 1.05
}

// logScale returns where a value in milliseconds lies on the axis.
func logScale(low, high float64) func(float64) float64 {
	width := float64(plotWidth - plotLeft - plotRight)
	return func(v float64) float64 { return plotLeft + width*math.Log(v/low)/math.Log(high/low) }
}

// ticks returns 1, 2 and 5 times powers of ten in a range; only the powers in
// one that is wide.
func ticks(low, high float64) []float64 {
	steps := []float64{1, 2, 5}
	if high/low > 3000 {
		steps = steps[:1]
	}
	var all []float64
	for power := math.Pow(10, math.Floor(math.Log10(low))); power <= high; power *= 10 {
		for _, s := range steps {
			if v := s * power; v >= low && v <= high {
				all = append(all, v)
			}
		}
	}
	return all
}

func duration(ms float64) string {
	switch {
	case ms >= 1000:
		return fmt.Sprintf("%.3g s", ms/1000)
	case ms >= 100:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.2g ms", ms)
}

// plotRow draws one row with its middle at y.
func plotRow(b *strings.Builder, x func(float64) float64, y float64, r Row) {
	class, name := "hib", stateName(r.Cache)
	switch {
	case r.Peer != PeerSelf:
		class, name = "peer", strings.ReplaceAll(r.Peer, "_", " ")
	case r.Cache == CacheAwake:
		class = "awake"
	case r.Cache != CacheParked && !r.Prefetch:
		class, name = "lazy", name+", no prefetch"
	}
	text(b, plotLeft-14, y+4, "end", name)
	fmt.Fprintf(b, "<line class=\"range %s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", class, x(r.P50), y, x(r.P95), y)
	fmt.Fprintf(b, "<line class=\"tick %s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", class, x(r.Max), y-4, x(r.Max), y+4)
	fmt.Fprintf(b, "<circle class=\"dot %s\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\"/>\n", class, x(r.P50), y)
	text(b, x(r.Max)+10, y+4, "quiet", fmt.Sprintf("%s (n=%d)", duration(r.P50), r.N))
}

// stateName names a cache state for people.
func stateName(cache string) string {
	name, without := strings.CutSuffix(cache, noPool)
	name = strings.ReplaceAll(name, "_", " ")
	if without {
		name += ", no pool"
	}
	return name
}

// legend explains the marks.
func legend(b *strings.Builder) {
	at := float64(plotWidth - 24)
	text(b, at, 32, "quiet end", "dot: median · line: to p95 · mark: slowest · axis: logarithmic")
	text(b, at, 52, "quiet end", "hollow: without prefetch · orange: compared with")
}

// text writes a text, whose characters may be any.
func text(b *strings.Builder, x, y float64, class, s string) {
	fmt.Fprintf(b, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\">", class, x, y)
	_ = xml.EscapeText(b, []byte(s)) // a Builder takes everything
	b.WriteString("</text>\n")
}
