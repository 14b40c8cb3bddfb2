"""A one-sentence summary of a run, and warnings about it: explicit rules over its metrics."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from solera.diagnosis.verdict import HARMFUL, STATE_WORDS
from solera.errors import counted
from solera.report.run_folder import RunFolder
from solera.report.stalling import ACCURACY, FLAT, NEARLY_ALL, SOLVED
from solera.sync.proof import tolerance

NOTABLE = 0.05
"""Smallest notable change of the accuracy if its intervals were not logged."""
COLLAPSE = 0.1
"""How far the last accuracy may be below the best one."""
FEW_BATCHES = 20
"""Number of batches before which a run gets no warning about not learning."""
END = 10
"""Number of batches at the start and the end of a run that are averaged."""
MUCH_CLIPPED = 0.25
MUCH_MASKED = 0.75
MUCH_TRUNCATED = 0.25
MUCH_ALIKE = 0.5
FAR = 0.5
EVALUATED_BY = {
    "task": (), "reward": ("functions",), "evaluate": ("problems", "temperature", "top_p", "samples", "threshold"),
}  # fmt: skip
"""Settings that an accuracy depends on, by section; empty: all of its fields."""


@dataclass(frozen=True)
class Diagnosis:
    """One sentence of summary, and one sentence per warning."""

    sentence: str
    attention: list[str]


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy at a step, with its interval if it was logged."""

    step: float
    value: float
    low: float | None
    high: float | None

    def above(self, other: "Accuracy") -> bool:
        """Whether it is notably higher: the intervals do not overlap or, without intervals, the values are far
        apart."""
        if self.low is None or other.high is None:
            return self.value - other.value >= NOTABLE
        return self.low > other.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return percent(self.value)
        return f"{percent(self.value)} (95 % interval {percent(self.low).removesuffix(' %')} to {percent(self.high)})"


def diagnose(run: RunFolder) -> Diagnosis:
    """Summarise the run's metrics."""
    if not run.rows:
        return Diagnosis("Nothing has been logged yet.", [])
    told = "; ".join(filter(None, (_progress(run), _accuracy(run), _age(run), _judged(run))))
    return Diagnosis(f"{told[0].upper()}{told[1:]}.", list(_attention(run)))


def compared(runs: Mapping[str, RunFolder]) -> str | None:
    """Name the run with the highest final accuracy, or report that the runs are too close to tell, or evaluated
    differently. `None` if fewer than two were evaluated."""
    ends = {name: found[-1] for name, run in runs.items() if (found := accuracies(run))}
    if len(ends) < 2:
        return None
    one, *others = ends
    if differing := dict.fromkeys(name for other in others for name in _evaluated_differently(runs[one], runs[other])):
        return f"These runs' accuracies do not compare, because these settings differ: {', '.join(differing)}."
    first, second, *_ = sorted(ends, key=lambda name: -ends[name].value)
    if ends[first].above(ends[second]):
        return f"{first} ends highest, at {ends[first]}; {second} follows with {ends[second]}."
    return (
        f"{first} ends at {ends[first]} and {second} at {ends[second]}: too close to tell which is better "
        "(solera eval compares them problem by problem)."
    )


def _evaluated_differently(first: RunFolder, second: RunFolder) -> list[str]:
    """The settings by which their accuracies may be of different problems, or mean different things. A field that only
    one of them has may be new, so it is not compared."""
    differing = []
    for section, names in EVALUATED_BY.items():
        one, other = (run.config.get(section, {}) for run in (first, second))
        known = [name for name in one if name in other and (name in names or not names)]
        differing += [f"{section}.{name}" for name in known if one[name] != other[name]]
    return differing


def accuracies(run: RunFolder) -> list[Accuracy]:
    low, high = (dict(run.points(f"{ACCURACY}_{end}")) for end in ("low", "high"))
    return [Accuracy(step, value, low.get(step), high.get(step)) for step, value in run.points(ACCURACY)]


def percent(share: float) -> str:
    """
    >>> percent(0.2904), percent(1.0)
    ('29 %', '100 %')
    """
    return f"{round(100 * share, 1):g} %"


def _progress(run: RunFolder) -> str | None:
    planned, learned = run.setting("run", "steps"), sum("tokens/trained" in row for row in run.rows)
    if run.finished:
        return None
    return f"not finished, {learned:,} of {planned:,} steps" if type(planned) is int else "not finished"


def _accuracy(run: RunFolder) -> str:
    """How held-out accuracy changed; without evaluations, how the reward changed."""
    found = accuracies(run)
    if not found:
        rewards = [value for _, value in run.points("reward/mean")]
        if not rewards:
            return "neither accuracy nor reward was logged"
        return f"accuracy was not evaluated; reward went from {fmean(rewards[:END]):.3g} to {fmean(rewards[-END:]):.3g}"
    first, last = found[0], found[-1]
    if len(found) == 1:
        return f"held-out accuracy was {last} at step {last.step:.0f}, the only evaluation"
    word = "rose" if last.above(first) else "fell" if first.above(last) else None
    if word is None:
        return f"held-out accuracy did not change notably: {percent(first.value)} at first, {last} at the end"
    return f"held-out accuracy {word} from {percent(first.value)} to {last}"


def _age(run: RunFolder) -> str | None:
    if not run.generates:
        return "nothing was generated, all data came from the store"
    oldest = max((age for _, age in run.points("age/max")), default=None)
    if oldest is None:
        return None
    batches = "1 batch" if oldest == 1 else f"{oldest:.0f} batches"
    return f"data was at most {batches} old" if oldest else "data was always fresh"


def _judged(run: RunFolder) -> str | None:
    states = [round(state) for _, state in run.points("improvement/state")]
    if not states:
        return None
    learned, counts = sum("tokens/trained" in row for row in run.rows), Counter(states)
    said = ", ".join(f"{counts[state]} {word}" for state, word in STATE_WORDS.items() if counts[state])
    return f"{len(states)} of {counted(learned, 'update')} {'were' if len(states) > 1 else 'was'} judged: {said}"


def _attention(run: RunFolder) -> Iterator[str]:
    """Warnings, the most important first."""
    found = accuracies(run)
    solved = bool(found) and found[-1].value >= SOLVED
    yield from _course(run, found)
    harmful = [step for step, state in run.points("improvement/state") if round(state) == HARMFUL]
    if harmful:
        found_so = f"{counted(len(harmful), 'update')} judged harmful, the first at step {harmful[0]:.0f}"
        yield f"{found_so}: sync sooner, or lower learn.lr."
    if (faults := run.total("sync/faults")) > 0:
        yield f"Weights had to be sent twice at {counted(round(faults), 'sync')}: the first delivery was damaged."
    if (far := late(run, "mismatch/logp")) is not None and far > _rounding(run):
        yield (
            f"Engine and learner disagree about fresh responses by {far:.2g} nats per token: check for a "
            "different temperature, chat template or precision in the engine."
        )
    if (clipped := late(run, "clip/fraction")) is not None and clipped > MUCH_CLIPPED:
        yield f"The clip removed {percent(clipped)} of the tokens towards the end: sync sooner, or widen the clip."
    if (far := late(run, "divergence/tv_sequence")) is not None and far > FAR:
        yield (
            f"The policy is far from the policies that wrote its data: total variation {far:.2f} towards the "
            "end. Sync sooner."
        )
    if not solved:
        yield from _teaches_little(run)
    if (cut := late(run, "response/truncated")) is not None and cut > MUCH_TRUNCATED:
        yield f"The token limit cut off {percent(cut)} of the responses towards the end: raise sampling.max_tokens."


def _course(run: RunFolder, found: list[Accuracy]) -> Iterator[str]:
    """Collapse, or no learning."""
    if len(found) < 2:
        return
    best, last = max(found, key=lambda one: one.value), found[-1]
    if best.above(last) and best.value - last.value > COLLAPSE:
        yield (
            f"Collapse: accuracy fell from {percent(best.value)} at step {best.step:.0f} to {percent(last.value)}. "
            "Sync sooner, lower learn.lr, or choose an objective that clips."
        )
    elif not last.above(found[0]) and last.value < SOLVED and last.step >= FEW_BATCHES:
        yet = "" if run.finished else " yet"
        yield f"No learning{yet}: accuracy is not notably higher after {last.step:,.0f} steps than before."
    alike = run.points("eval/alike")
    if alike and alike[-1][1] >= MUCH_ALIKE and last.value < SOLVED:
        yield f"The model gives the same answer to {percent(alike[-1][1])} of the held-out problems."


def _teaches_little(run: RunFolder) -> Iterator[str]:
    """Warn about groups in which no response is better than another. If nearly all groups are like this, the run has
    already printed a note."""
    flat = late(run, FLAT)
    if flat is not None and MUCH_MASKED < flat < NEARLY_ALL:
        yield f"{percent(flat)} of the groups had equal rewards towards the end, so nothing is learned from them."


def _rounding(run: RunFolder) -> float:
    """The largest difference between engine and learner that rounding explains. If the number format is unknown, use
    that of the coarsest format."""
    compute, temperature = run.setting("model", "compute"), run.setting("sampling", "temperature")
    if compute in (None, "auto"):
        compute = "float32" if run.setting("run", "device") == "cpu" else "bfloat16"
    return tolerance(f"torch.{compute}", temperature if isinstance(temperature, float) and temperature > 0 else 1.0)


def late(run: RunFolder, metric: str) -> float | None:
    """Mean of the metric over the last quarter of the steps that have it, and over at least `END` steps."""
    values = [value for _, value in run.points(metric)]
    return fmean(values[-max(END, len(values) // 4) :]) if values else None
