package bench

import (
	"fmt"
	"slices"
	"time"
)

// pace tells how far a run has come, and so how long it will take. The weights
// of scenarios only matter against each other: the machine's own speed shows
// as the run goes on.
type pace struct {
	begun         time.Time
	whole, passed float64 // weights of all scenarios, and of those that are over
	current       float64 // weight of the one that runs
	part          float64 // of it that is done, 0 to 1
}

// newPace returns the pace of a run that begins now.
func newPace(o Options) pace {
	p := pace{begun: time.Now()}
	for _, s := range Scenarios {
		if slices.Contains(o.Scenarios, s) {
			p.whole += o.weight(s)
		}
	}
	return p
}

// enter says that a scenario of a weight begins, and the one before is over.
func (p *pace) enter(weight float64) {
	p.passed += p.current
	p.current, p.part = weight, 0
}

// String tells the time so far and the time that is left; that only once it
// can be told.
func (p *pace) String() string {
	took := time.Since(p.begun).Round(time.Second)
	share := (p.passed + p.current*min(p.part, 1)) / p.whole
	if share < 0.03 || share > 1 {
		return took.String()
	}
	left := time.Duration(float64(took) * (1 - share) / share)
	return fmt.Sprintf("%s, about %s left", took, left.Round(10*time.Second))
}

// weight is about what a scenario takes in seconds on a machine of two cores
// without hardware virtualisation.
func (o Options) weight(scenario string) float64 {
	n, seconds := float64(o.N), 0.0
	switch scenario {
	case ScenarioCreate:
		seconds = float64(len(o.MemoryMiB)) * (15 + 3*n)
	case ScenarioStates:
		for _, group := range o.chosen() {
			for _, p := range group {
				seconds += 25 + 2.5*n*float64(len(p.caches))
			}
		}
	case ScenarioWake:
		seconds = 25 + 5*wakePairs*n
	case ScenarioBurst:
		for _, burst := range o.Burst {
			seconds += float64(burst) * (2 + 2*float64(o.burstRounds(burst)))
		}
	case ScenarioCompression:
		seconds = 60
	case ScenarioCycles:
		seconds = 20 + 0.5*float64(o.Cycles)
	case ScenarioScale:
		seconds = 2*(settleTime+o.IdleFor).Seconds() + 0.4*float64(o.Scale)
	}
	return max(seconds, 1)
}
