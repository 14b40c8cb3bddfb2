"""`solera data`: rollouts and rewards in and out of a run's store, while it runs or after."""

import sys
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from solera.cli.options import Parser, wrapped
from solera.errors import SoleraError, counted
from solera.folder.files import writable
from solera.folder.paths import CHECKPOINTS, CONFIG

HELP = """Rollouts and rewards in and out of a run's store, while the run goes on or after. RUN is a run's folder, or
one that `solera generate` has made.

  solera data stats RUN          what the store holds, as tables and a picture
  solera data verify RUN         whether the store is whole
  solera data import RUN FILE    rollouts of models, people, other runs
  solera data export RUN FILE    every rollout with rewards and tokens
  solera data reward RUN --id 1017 --value 1    a reward that came later
  solera data reward RUN FILE                   many of them

A FILE holds one JSON object a line, or is called *.parquet. `import` also takes the folder of another run, or of
`solera generate`, and reads its store.
"""
STATS_HELP = """Tables by origin, age (in batches, as of now), reward and number of uses: how many rollouts there are
and of how many prompts, how many wait for a reward, the mean reward of the others, how many were learned from, and how
often in all. Probes, which nothing learns from, are left out."""
EXPORT_HELP = """One JSON object a line for each rollout: id, key, origin, rewards and, of each sequence, token ids, the
spans that a policy wrote and their log-probabilities. `import` takes such lines, `reward` their ids. Probes, which
nothing learns from, are left out."""
IMPORT_HELP = """One JSON object a line: prompt (text or chat messages), response (text), and where known reward (a
number), model (who wrote it) or origin (human, model:NAME, file:NAME), finish_reason (stop or length), key (rollouts of
one key are compared), response_ids and logp (token ids and their log-probabilities). Or several responses, a list of
texts or objects, and rewards, a number or null for each. Or what `export` writes. A Parquet file has these as columns.
A file can be imported again: what is there already stays as it is, its changed rewards are revised. All or none."""
VERIFY_HELP = """Read all of the store and check the file itself, the checksum of every rollout, reward and use, and
that none of them is missing; then compare it with the run's newest checkpoint. Each fault names the rollout and what is
wrong with it. The exit status is 1 if there is one."""
REWARD_HELP = """A reward takes the place of what its part held; the rollout's reward is the sum of its parts. The
task's own grader gives the part called reward, which is meant where none is named; functions of reward.functions give
parts of their own names. In a file, one JSON object a line: id, value, and where wanted part and source. All lines or
none. Ids stand in what `export` writes."""


def run(arguments: list[str]) -> int:
    chosen = _parser().parse_args(arguments)
    return {"stats": _stats, "verify": _verify, "import": _import, "export": _export, "reward": _reward}[chosen.action](
        chosen
    )


def _parser() -> Parser:
    from argparse import RawDescriptionHelpFormatter

    parser = Parser("solera data", description=wrapped(HELP), formatter_class=RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {
        name: actions.add_parser(name, help=does, description=description)
        for name, does, description in (
            ("stats", "what the store holds, as tables and a picture", STATS_HELP),
            ("verify", "whether the store is whole", VERIFY_HELP),
            ("import", "rollouts from a file", IMPORT_HELP),
            ("export", "rollouts into a file", EXPORT_HELP),
            ("reward", "rewards that came later, or changed", REWARD_HELP),
        )
    }
    for one in parsers.values():
        one.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parsers["stats"].add_argument(
        "--plot", type=Path, metavar="FILE.png", help="default: store.png in the run's folder"
    )
    parsers["import"].add_argument("file", type=Path, metavar="FILE", help="JSON lines, Parquet, or a folder")
    parsers["import"].add_argument("--origin", help="who wrote the lines that name nobody; default: file:NAME")
    parsers["export"].add_argument("file", type=Path, metavar="FILE", help="where they go: JSON lines, or *.parquet")
    parsers["export"].add_argument("--text", action="store_true", help="with the text of prompt and response")
    parsers["reward"].add_argument("file", type=Path, metavar="FILE", nargs="?", help="JSON lines, or Parquet")
    parsers["reward"].add_argument("--id", type=int, help="the rollout's id")
    parsers["reward"].add_argument("--value", type=float, help="what it is worth")
    parsers["reward"].add_argument(
        "--part", help="the part that it is, such as style; needed where the rollout has others than reward"
    )
    parsers["reward"].add_argument("--source", default="person", help="who says so (default: %(default)s)")
    for name in ("import", "reward"):
        parsers[name].add_argument(
            "--skip-bad", type=Path, metavar="FILE", help="take the good lines and set the bad ones aside in this file"
        )
    return parser


def _stats(chosen: Namespace) -> int:
    from solera.report.holdings import plot_holdings
    from solera.store.database import place_in
    from solera.store.statistics import Line, statistics

    found = statistics(place_in(chosen.run))
    width = max([12, *(len(line.name) for lines in found.values() for line in lines)])
    for kind, lines in found.items():
        print(f"{kind:{width}}" + "".join(f"{name:>10}" for name in Line._fields[1:]))
        for line in lines:
            print(f"{line.name:{width}}" + "".join(f"{_shown(value):>10}" for value in line[1:]))
        print()
    print(f"plot {plot_holdings(found, chosen.run.name, chosen.plot or chosen.run / 'store.png')}")
    return 0


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _verify(chosen: Namespace) -> int:
    from solera.folder.checkpoint import checkpoints, read_state
    from solera.store.database import place_in
    from solera.store.verifying import Needs, verify

    states = [read_state(path) for path in checkpoints(chosen.run / CHECKPOINTS)[-1:]]
    needs = [Needs(state.version, state.watermark, state.uses) for state in states]
    found = verify(place_in(chosen.run), *needs)
    for complaint in found.complaints:
        print(f"solera: {complaint}", file=sys.stderr)
    unsigned = f" ({found.unsigned} of them by an earlier Solera, with fewer checksums)" if found.unsigned else ""
    faults = counted(len(found.complaints), "fault") if found.complaints else "no faults"
    print(f"{counted(found.rollouts, 'rollout')} looked at{unsigned}: {faults}")
    return 1 if found.complaints else 0


def _import(chosen: Namespace) -> int:
    from solera.config import load
    from solera.objectives.table import resolve_config
    from solera.store.exchange import check_readable, import_rollouts
    from solera.store.ledger import open_store
    from solera.store.lines import ORIGIN

    if chosen.origin is not None and (chosen.origin == "self" or not ORIGIN.fullmatch(chosen.origin)):
        raise SoleraError(f"--origin is {chosen.origin!r}; it must be human, model:NAME or file:NAME")
    with closing(open_store(chosen.run)) as ledger:
        check_readable(chosen.file)
        config = resolve_config(load(chosen.run / CONFIG))
        from solera.models.loading import load_reader
        from solera.run.task import line_reader

        reader = line_reader(config, load_reader(config.model.path), chosen.file, chosen.origin)
        done = import_rollouts(ledger, chosen.file, reader, chosen.skip_bad)
    revised = counted(done.rewards, "reward")
    left = f", {done.held_out} left out that answer held-out problems" if done.held_out else ""
    print(f"{counted(done.rollouts, 'rollout')} imported, {done.known} known already, {revised} revised{left}")
    return _tell_bad(done.complaints, chosen.skip_bad)


def _export(chosen: Namespace) -> int:
    from solera.store.database import place_in
    from solera.store.exchange import export_rollouts

    place, codec = place_in(chosen.run), None
    writable(chosen.file, str(chosen.file))
    if chosen.text:
        from solera.config import load
        from solera.models.loading import load_reader

        codec = load_reader(load(chosen.run / CONFIG).model.path).codec
    print(f"{counted(export_rollouts(place, chosen.file, codec), 'rollout')} exported to {chosen.file}")
    return 0


def _reward(chosen: Namespace) -> int:
    from solera.records import Reward
    from solera.store.exchange import import_rewards, usual_part
    from solera.store.ledger import open_store

    single = chosen.id is not None and chosen.value is not None
    if single == (chosen.file is not None) or (chosen.file is not None and (chosen.id or chosen.value) is not None):
        raise SoleraError("reward: give --id and --value, or a file (see solera data reward --help)")
    with closing(open_store(chosen.run)) as ledger:
        if single:
            part = chosen.part or usual_part(ledger, chosen.id)
            count, complaints = ledger.revise([(chosen.id, Reward(chosen.value, part, chosen.source))]), []
        else:
            done = import_rewards(ledger, chosen.file, chosen.skip_bad)
            count, complaints = done.rewards, done.complaints
    print(f"{counted(count, 'reward')} written")
    return _tell_bad(complaints, chosen.skip_bad)


def _tell_bad(complaints: list[str], target: Path | None) -> int:
    from solera.store.exchange import COMPLAINTS

    for complaint in complaints[:COMPLAINTS]:
        print(f"solera: {complaint}", file=sys.stderr)
    if len(complaints) > COMPLAINTS:
        print(f"solera: and {len(complaints) - COMPLAINTS} more", file=sys.stderr)
    if complaints:
        print(f"solera: {counted(len(complaints), 'bad line')} set aside in {target}", file=sys.stderr)
    return 0
