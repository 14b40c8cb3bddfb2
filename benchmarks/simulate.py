"""How long a step takes, synchronous and streaming, and how to divide the GPUs between learners and engines.

python -m benchmarks.simulate --model 7b --gpus 64 [--gpu h100] [--responses 4096 --mean 2000 --longest 16384]
python -m benchmarks.simulate --tables        the tables of docs/cluster.md, about twelve minutes
"""

import argparse
import dataclasses
from collections.abc import Iterator

from benchmarks.simulator.calibration import ROWS, costs_with, fit
from benchmarks.simulator.costs import GPUS, MODELS, Constants, Costs
from benchmarks.simulator.schedule import Outcome, Split, Work, streaming, synchronous

PERIODS = (1, 2, 4, 10)
SHARES = tuple(n / 16 for n in range(1, 14))
"""Shares of the GPUs that learn, tried one after the other."""
SLOW = (1.0, 1.1, 1.25, 1.5, 2.0)


def splits(costs: Costs, work: Work, gpus: int, slow: float = 1.0) -> Iterator[Split]:
    """Divisions of the GPUs whose learners have enough memory."""
    group = costs.engine_gpus(work.prompt + work.mean)
    for engines in dict.fromkeys((gpus - max(1, round(share * gpus))) // group for share in SHARES):
        learners = gpus - engines * group
        at_once = costs.at_once(learners, work.prompt + work.longest)
        if engines and at_once:
            yield Split(learners, engines, group, at_once, slow)


def best(
    costs: Costs, work: Work, gpus: int, v: int, max_age: int | None = None, slow: float = 1.0
) -> tuple[Split, Outcome] | None:
    """The fastest division of the GPUs for streaming, or `None` if the model does not fit."""
    updates = max(4, 2 * v)
    tried = [(split, streaming(costs, work, split, v, max_age, updates)) for split in splits(costs, work, gpus, slow)]
    return min(tried, key=lambda pair: pair[1].seconds, default=None)


def together(costs: Costs, work: Work, gpus: int, slow: float = 1.0) -> Outcome | None:
    """All GPUs generate, then all learn. `None` if the model does not fit."""
    group = costs.engine_gpus(work.prompt + work.mean)
    at_once = costs.at_once(gpus, work.prompt + work.longest)
    if gpus < group or not at_once:
        return None
    return synchronous(costs, work, Split(0, gpus // group, group, at_once, slow), updates=3)


def table(header: str, rows: list[str]) -> None:
    print(f"\n| {header} |\n|{' --- |' * (header.count('|') + 1)}")
    print("\n".join(f"| {row} |" for row in rows))


def describe(costs: Costs, work: Work, gpus: int, slow: float = 1.0) -> list[str]:
    """Rows of a table: the synchronous step, and the best streaming one for each v."""
    base = together(costs, work, gpus, slow)
    if base is None:
        return ["synchronous | does not fit | | | |"]
    rows = [f"synchronous | {base.seconds:.1f} | 1.00 | all | {base.learning:.0%} | {base.generating:.0%}"]
    for v in PERIODS:
        found = best(costs, work, gpus, v, slow=slow)
        if found:
            split, outcome = found
            rows.append(
                f"streaming, v = {v} | {outcome.seconds:.1f} | {base.seconds / outcome.seconds:.2f} | {_words(split)} |"
                f" {outcome.learning:.0%} | {outcome.generating:.0%}"
            )
    return rows


HEADER = "mode | seconds per update | gain | learners + engines × GPUs each | learners work | engines work"


GRID = (
    f"model | H100 GPUs | synchronous, s | gain at v = {', '.join(map(str, PERIODS))} |"
    " at v = 4: learners + engines × GPUs"
)


def tables() -> None:
    constants = fit(ROWS)
    models = {name: costs_with(constants, "h100", recompute=True)(name) for name in ("7b", "32b", "70b")}
    table(GRID, [f"{name} | {gpus} | {cell(costs, gpus)}" for name, costs in models.items() for gpus in (8, 64, 512)])
    table("one learner takes | synchronous, s | streaming, s | learners + engines × GPUs", list(slowed(models["7b"])))
    table("published | gain | simulated", list(published(constants)))


def typical(gpus: int) -> Work:
    """64 responses for each GPU, of 2,000 tokens on average and at most 16,384."""
    return Work(responses=64 * gpus, prompt=200, mean=2000, longest=16_384)


def slowed(costs: Costs, gpus: int = 64, v: int = 4) -> Iterator[str]:
    """Rows of a table: one learner that is slower than the others."""
    for slow in SLOW:
        base, found = together(costs, typical(gpus), gpus, slow), best(costs, typical(gpus), gpus, v, slow=slow)
        if base and found:
            yield f"× {slow:g} | {base.seconds:.0f} | {found[1].seconds:.1f} | {_words(found[0])}"


def cell(costs: Costs, gpus: int) -> str:
    work = typical(gpus)
    base, found = together(costs, work, gpus), [best(costs, work, gpus, v) for v in PERIODS]
    if base is None:
        return "does not fit | |"
    gains = ", ".join(f"{base.seconds / pair[1].seconds:.2f}" for pair in found if pair)
    return f"{base.seconds:.0f} | {gains or 'does not fit'} | {_words(found[2][0]) if found[2] else ''}"


def _words(split: Split) -> str:
    return f"{split.learners} + {split.engines} × {split.engine_gpus}"


LONG = {"prompt": 200, "mean": 8000, "longest": 27_648}
SHORT = {"prompt": 200, "mean": 1000, "longest": 4096}
VERL = Work(2048, prompt=200, mean=1500, longest=28_672)
PUBLISHED = (
    ("AReaL, 1.5 B, 128 H800, up to 27,648 tokens", "2.77", "1.5b", "h800", 128, Work(8192, **LONG), 1, 4),
    ("AReaL, 7 B, 192 H800, up to 27,648 tokens", "2.27", "7b", "h800", 192, Work(8192, **LONG), 1, 4),
    ("verl, 7 B, 32 H20, up to 28,672 tokens", "1.70 to 2.66", "7b", "h20", 32, VERL, 4, 5),
    ("verl, 7 B, 64 H20", "1.83 to 2.09", "7b", "h20", 64, VERL, 4, 5),
    ("verl, 7 B, 128 H20", "2.35 to 2.67", "7b", "h20", 128, VERL, 4, 5),
    ("NeMo-RL, 32 H100, for 32 B and up to 4,096 tokens", "1.28", "32b", "h100", 32, Work(1024, **SHORT), 1, 1),
    ("NeMo-RL, 16 GB200, for 32 B and up to 4,096 tokens", "0.74", "32b", "gb200", 16, Work(1024, **SHORT), 1, 1),
)
"""Gains that others report. The last two numbers are v and `max_age`.

Batch sizes, v and ages of AReaL and NeMo-RL are ours, and so are all mean lengths and NeMo-RL's model. verl has 512
prompts with 16 responses each between two syncs, in four updates, and half as many more in flight. It publishes 114 s
for an update on 128 GPUs. At 0.4 of their peak that is about 1,700 tokens per prompt and response. With 600 tokens per
response the simulated gains are 0.82 on 32 GPUs and 1.14 on 128."""


def published(constants: Constants) -> Iterator[str]:
    for name, gain, model, gpu, gpus, work, v, max_age in PUBLISHED:
        costs = costs_with(constants, gpu, recompute=True)(model)
        # a synchronous step has all responses between two syncs
        base = together(costs, dataclasses.replace(work, responses=v * work.responses), gpus)
        found = best(costs, work, gpus, v, max_age)
        simulated = f"{base.seconds / (v * found[1].seconds):.2f}" if base and found else "does not fit"
        yield f"{name} | {gain} | {simulated}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--responses", type=int, default=512, help="in a batch")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--mean", type=float, default=2000, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=16_384, help="most tokens of a response")
    parser.add_argument("--slow", type=float, default=1.0, help="one learner computes this many times as long")
    options = parser.parse_args()
    if options.tables:
        return tables()
    costs = costs_with(fit(ROWS), options.gpu, recompute=True)(options.model)
    work = Work(options.responses, options.prompt, options.mean, options.longest)
    table(HEADER, describe(costs, work, options.gpus, options.slow))


if __name__ == "__main__":
    main()
