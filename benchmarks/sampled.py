#!/usr/bin/env python3
"""Where does the time of a `solera` command go? Looks at the stacks of all threads many times a second.

    python benchmarks/sampled.py [--every 0.02] [--lines 15] [--parts 4] -- train recipes/demo.toml --run.steps 20

The command runs in this process. Afterwards each thread is listed with its seconds by place: the innermost function of
Solera, and the function that was running or waiting in it. With `--parts`, the time of the command is divided into so
many equal parts, which shows what a run does at its start. A thread that waits counts as much as one that works.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from solera import cli

PACKAGE = str(Path(cli.__file__).parents[1])
IMPORTING = "importlib._bootstrap"


class Sampler(threading.Thread):
    """Notes where every other thread is, again and again."""

    def __init__(self, every: float) -> None:
        super().__init__(daemon=True, name="sampler")
        self.every, self.seen = every, list[tuple[float, float, str, str]]()
        """When, how much time the sample stands for, thread, place."""
        self._ended = threading.Event()

    def run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(self.every):
            now = time.perf_counter()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != self.ident:
                    self.seen.append((now, now - last, names.get(ident, "gone"), place_of(frame)))
            last = now

    def end(self) -> None:
        self._ended.set()
        self.join()


def place_of(frame: FrameType) -> str:
    """The innermost function of Solera, and the function that it waits for, or that it imports something."""
    leaf, each, imports = _name(frame), frame, False
    while each is not None and not each.f_code.co_filename.startswith(PACKAGE):
        imports = imports or IMPORTING in each.f_code.co_filename
        each = each.f_back
    own = "outside" if each is None else _name(each)
    return own if own == leaf else f"{own} > {'importing' if imports else leaf}"


def _name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"


def show(seen: list[tuple[float, float, str, str]], lines: int, parts: int) -> None:
    start, end = seen[0][0], seen[-1][0]
    length = max(end - start, 1e-9) / parts
    for part in range(parts):
        inside = [each for each in seen if min(int((each[0] - start) / length), parts - 1) == part]
        print(f"\n===== {part * length:.1f} to {(part + 1) * length:.1f} s")
        by_thread = dict[str, Counter[str]]()
        for _, seconds, thread, place in inside:
            by_thread.setdefault(thread, Counter())[place] += seconds  # type: ignore[assignment]
        for thread, places in sorted(by_thread.items(), key=lambda each: -sum(each[1].values())):
            print(f"{thread}: {sum(places.values()):.2f} s")
            for place, seconds in places.most_common(lines):
                print(f"  {seconds:8.2f}  {place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=0.02, help="seconds between two samples")
    parser.add_argument("--lines", type=int, default=12, help="places of a thread that are printed")
    parser.add_argument("--parts", type=int, default=1, help="parts into which the time is divided")
    parser.add_argument("command", nargs="+", help="arguments of solera, after --")
    given = parser.parse_args()
    sampler = Sampler(given.every)
    sampler.start()
    try:
        return cli.main(given.command)
    finally:
        sampler.end()
        show(sampler.seen, given.lines, given.parts)


if __name__ == "__main__":
    sys.exit(main())
