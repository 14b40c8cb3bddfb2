"""Measure a large store: time to add, time to draw by priority, file size and memory.

    python benchmarks/store_million.py --rollouts 1000000
    python benchmarks/store_million.py --rollouts 50000 --url postgresql+psycopg://USER@HOST/DATABASE

The script adds rollouts in groups of eight, 512 at a time, as a run does. Each has `--tokens` tokens, a fifth of them
in the prompt. Then it draws 512 rollouts by priority, many times; after each draw it records the uses and adds 512 more
rollouts. File size is compared with the raw bytes: four per token id and four per log-probability.
"""

import argparse
import resource
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

from solera.config import DrawConfig
from solera.records import PolicyVersion, Reward, Rollout, Sampling, Sequence, Span, Use
from solera.store.database import place_of
from solera.store.ledger import Ledger
from solera.store.selected import Selected

BATCH, GROUP, DRAWS = 512, 8, 20
LINEAGE = uuid.UUID(int=0).hex
SAMPLING = Sampling(1.0, 256)


def batch(number: int, tokens: int, rng: np.random.Generator) -> list[Rollout]:
    prompt = tokens // 5
    ids_BT = rng.integers(0, 150_000, (BATCH, tokens), dtype=np.int32)
    logp_BT = -rng.exponential(1.0, (BATCH, tokens - prompt)).astype(np.float32)
    return [
        Rollout(
            f"prompt/{number}/{b // GROUP}",
            (Sequence(ids_BT[b], (Span(prompt, tokens, number),), logp_BT[b]),),
            (Reward(float(rng.random() < 0.5)),), LINEAGE, "self", "stop", SAMPLING,
        )
        for b in range(BATCH)
    ]  # fmt: skip


def memory() -> float:
    """Peak memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fill(ledger: Ledger, batches: int, tokens: int, rng: np.random.Generator) -> float:
    """Add the rollouts; return the seconds spent adding."""
    spent = 0.0
    for number in range(batches):
        new = batch(number, tokens, rng)
        start = time.perf_counter()
        ledger.add(new)
        spent += time.perf_counter() - start
    return spent


def draw(ledger: Ledger, batches: int, tokens: int, rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Return seconds and CPU seconds of every draw; the first one reads the whole store."""
    now = batches
    store = Selected(ledger, DrawConfig("offline", order="priority"), 0)
    times, spent = [], []
    for _ in range(DRAWS + 1):
        start, worked = time.perf_counter(), time.process_time()
        groups = store.draw(BATCH // GROUP, GROUP, PolicyVersion(LINEAGE, now))
        times.append(time.perf_counter() - start)
        spent.append(time.process_time() - worked)
        drawn = [rollout for group in groups for rollout in group.rollouts]
        store.record([Use(r.id, now, r.age(now, LINEAGE), 0.5) for r in drawn if r.id is not None])
        ledger.add(batch(now, tokens, rng))
        now += 1
    return times, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--url", help="a PostgreSQL database; by default a SQLite file in a temporary folder")
    chosen = parser.parse_args()
    rng, batches = np.random.default_rng(0), max(1, chosen.rollouts // BATCH)
    with tempfile.TemporaryDirectory() as folder:
        place = place_of(chosen.url, Path(folder) / f"bench-{uuid.uuid4().hex[:8]}" if chosen.url else Path(folder))
        ledger, before = Ledger(place), memory()
        spent = fill(ledger, batches, chosen.tokens, rng)
        added, filled = batches * BATCH, memory()
        print(f"added      {added} rollouts, {added / spent:,.0f} per second")
        print(f"memory     {before:.0f} MiB before, {filled:.0f} MiB after adding")
        if isinstance(place, Path):
            ledger.close()
            raw = added * 4 * (chosen.tokens + chosen.tokens - chosen.tokens // 5)
            size = place.stat().st_size
            print(f"file       {size / 2**20:.0f} MiB, {size / raw:.3f} times the raw bytes of tokens and floats")
            ledger = Ledger(place)
        times, spent = draw(ledger, batches, chosen.tokens, rng)
        print(f"first draw {times[0] * 1e3:.0f} ms, {spent[0] * 1e3:.0f} ms of CPU time (reads the whole store)")
        median, worked = (statistics.median(each[1:]) * 1e3 for each in (times, spent))
        by_priority = f"{BATCH} rollouts by priority in {median:.1f} ms (median of {DRAWS})"
        print(f"draw       {by_priority}, {worked:.1f} ms of CPU time")
        print(f"memory     {memory():.0f} MiB after drawing")
        ledger.close()


if __name__ == "__main__":
    main()
