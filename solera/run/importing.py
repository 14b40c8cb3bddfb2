"""Imports the rollouts that a run begins with (`store.data`, `store.solutions`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from solera.config import Config, DrawConfig, alike
from solera.errors import SoleraError, counted
from solera.models.loading import Reader
from solera.objectives.objective import Objective
from solera.records import Rollout
from solera.run.parts import Parts
from solera.run.solutions import read_solutions
from solera.run.task import line_reader
from solera.store.drawing import absent, draws_from
from solera.store.exchange import COMPLAINTS, ReadLines, check_data_files, read_lines, set_aside
from solera.store.ledger import Ledger
from solera.store.lines import LineReader
from solera.tasks.keys import HeldOutError
from solera.training.collation import need_behaviour


def read_data(parts: Parts) -> list[ReadLines[Rollout]]:
    """Read all files of `store.data`. Refuse rollouts that the run cannot learn from."""
    config = parts.config
    check_data_files(config.store.data, config.store.skip_bad)
    read = {path: _read_file(parts, Path(path)) for path in config.store.data}
    if config.store.solutions is not None:
        read["store.solutions"] = ReadLines(
            read_solutions(parts, config.store.solutions, _reader(parts, Path("solutions")))
        )
    _refuse_unknown(config, parts.objective, {name: lines.good for name, lines in read.items()})
    return list(read.values())


def _reader(parts: Parts, path: Path) -> LineReader:
    vocabulary = parts.model.module.get_input_embeddings().num_embeddings
    return line_reader(parts.config, Reader(parts.codec, vocabulary, parts.model.max_length), path)


def _read_file(parts: Parts, path: Path) -> ReadLines[Rollout]:
    """Read one file, or the store in a folder."""
    skip_bad = parts.config.store.skip_bad
    try:
        lines = read_lines(path, _reader(parts, path), skip_bad is not None)
    except SoleraError as error:
        if skip_bad is not None or isinstance(error, HeldOutError):
            raise
        raise SoleraError(
            f"{error}; correct it, or import only the good lines and write the bad ones to a file: "
            'store.skip_bad = "bad.jsonl"'
        ) from error
    if lines.held_out:
        skipped = counted(lines.held_out, "response" if path.is_dir() else "line")
        parts.say(f"{path}: skipped {skipped}: answers to held-out problems of the task")
    return lines


def import_data(parts: Parts, read: Sequence[ReadLines[Rollout]], store: Ledger) -> None:
    """Put the valid lines of all files into the store, and write the others to `store.skip_bad`."""
    # Once a rollout is in the store, a reward that came since stays.
    store.add_imported(*(lines.good for lines in read), over=not store.watermark())
    skip_bad, say = parts.config.store.skip_bad, parts.say
    if skip_bad is None:
        return
    target = Path(skip_bad)
    set_aside([line for lines in read for line in lines.bad], target)
    complaints = [complaint for lines in read for complaint in lines.complaints]
    for complaint in complaints[:COMPLAINTS]:
        say(complaint)
    if complaints:
        say(f"{counted(len(complaints), 'bad line')} of store.data written to {target}; the others were imported")


def check_shares(draw: DrawConfig, read: Sequence[ReadLines[Rollout]], say: Callable[[str], None]) -> None:
    """Refuse a share for an origin that no file has if a file has an origin without a share: probably a typo.
    Otherwise the rollouts may still arrive while the run is training."""
    origins = {rollout.origin for lines in read for rollout in lines.good}
    if (missing := absent(draw, origins)) is None:
        return
    left_out = sorted(origin for origin in origins if not draws_from(draw, origin))
    if left_out:
        known = f"store.data has {', '.join(sorted(origins))}{alike(missing, left_out, 1)}"
        raise SoleraError(f"draw.shares: no rollouts of origin {missing}; {known}")
    say(f"draw.shares: no rollouts of origin {missing} yet; import them during the run (solera data import)")


def _refuse_unknown(config: Config, objective: Objective, data: Mapping[str, list[Rollout]]) -> None:
    """Refuse text that the objective cannot learn from before the run has a folder. Draws check later imports."""
    for path, rollouts in data.items():
        try:
            need_behaviour([r for r in rollouts if draws_from(config.draw, r.origin)], objective)
        except SoleraError as error:
            raise SoleraError(f"{path}: {error}") from None
