"""`solera data`: import, export and check the rollouts and rewards in a run's store, during or after the run."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from solera.cli.options import Parser, wrapped
from solera.errors import SoleraError, counted
from solera.folder.files import writable
from solera.folder.paths import CHECKPOINTS, CONFIG

if TYPE_CHECKING:
    from solera.folder.account import Account

HELP = """Import, export and check the rollouts and rewards in a run's store, during or after the run. RUN is the folder
of a run or of `solera generate`.

  solera data stats RUN          print and plot what the store holds
  solera data verify RUN         check that the store is intact
  solera data import RUN FILE    add rollouts of models, people or other runs
  solera data export RUN FILE    write all rollouts with rewards and tokens
  solera data reward RUN --id 1017 --value 1    add one reward
  solera data reward RUN FILE                   add many rewards

FILE has one JSON object per line, or is a Parquet file (*.parquet). `import` also accepts the folder of another run or
of `solera generate`, and reads its store.
"""
STATS_HELP = """Print tables by origin, age (in batches, as of now), reward and number of uses. Each row shows the
number of rollouts and of prompts, how many rollouts wait for a reward, the mean reward of the others, how many were
used for training, and how often in total. Probes are not included, because training never uses them."""
EXPORT_HELP = """Write one JSON object per line for each rollout: id, key, origin, rewards and, for each sequence, the
token ids, the spans that a policy wrote and their log-probabilities. `import` accepts such lines, and `reward` their
ids. Probes are not included, because training never uses them."""
IMPORT_HELP = """A file has one JSON object per line. Required: prompt (text or chat messages) and response (text).
Optional: reward (a number), model (who wrote it) or origin (human, model:NAME, file:NAME), finish_reason (stop or
length), and key (rollouts with the same key are compared). Instead of response, a line may have response_ids and logp
(token ids and their log-probabilities), or responses (a list of texts or objects) with rewards (a number or null for
each). Lines that `export` wrote are accepted too. A Parquet file has these fields as columns. You can import a file
again: known rollouts stay as they are, and changed rewards are updated. Either all lines are imported or none."""
VERIFY_HELP = """Read the whole store. Check the file itself and the checksum of every rollout, reward and use, and that
none of them is missing. Then compare the store with the run's newest checkpoint, and check that its account of tokens
balances: generated = trained + waiting + being written + dropped + other + lost. Each fault is printed with the rollout
and what is wrong with it. The exit status is 1 if there is a fault."""
REWARD_HELP = """A rollout's reward is the sum of its parts. A new reward replaces the previous value of its part. The
task's own grader writes the part called reward, which is also the default; each function of reward.functions writes a
part of its own name. A file has one JSON object per line: id, value and, optionally, part and source. Either all lines
are written or none. `export` shows the ids."""


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
            ("stats", "print and plot what the store holds", STATS_HELP),
            ("verify", "check that the store is intact", VERIFY_HELP),
            ("import", "add rollouts from a file", IMPORT_HELP),
            ("export", "write rollouts to a file", EXPORT_HELP),
            ("reward", "add or change rewards", REWARD_HELP),
        )
    }
    for one in parsers.values():
        one.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parsers["stats"].add_argument(
        "--plot", type=Path, metavar="FILE.png", help="file for the plot; default: store.png in the run's folder"
    )
    parsers["verify"].add_argument(
        "--held-out", action="store_true",
        help="also check that no response in the store, except the probes, answers a held-out problem; needs the "
        "model's tokenizer, and the task's files if it has any",
    )  # fmt: skip
    parsers["import"].add_argument("file", type=Path, metavar="FILE", help="JSON lines, Parquet, or a folder")
    parsers["import"].add_argument("--origin", help="origin of lines that name none; default: file:NAME")
    parsers["export"].add_argument("file", type=Path, metavar="FILE", help="output file: JSON lines, or *.parquet")
    parsers["export"].add_argument("--text", action="store_true", help="include the text of prompt and response")
    parsers["reward"].add_argument("file", type=Path, metavar="FILE", nargs="?", help="JSON lines, or Parquet")
    parsers["reward"].add_argument("--id", type=int, help="the rollout's id")
    parsers["reward"].add_argument("--value", type=float, help="the reward")
    parsers["reward"].add_argument(
        "--part", help="the part to set, such as style; required if the rollout has parts other than reward"
    )
    parsers["reward"].add_argument("--source", default="person", help="who gave the reward (default: %(default)s)")
    for name in ("import", "reward"):
        parsers[name].add_argument(
            "--skip-bad", type=Path, metavar="FILE", help="import the good lines and write the bad ones to this file"
        )
    return parser


def _stats(chosen: Namespace) -> int:
    from solera.report.holdings import plot_holdings
    from solera.store.database import place_in
    from solera.store.statistics import RolloutCounts, statistics

    found = statistics(place_in(chosen.run))
    width = max([12, *(len(line.name) for lines in found.values() for line in lines)])
    for kind, lines in found.items():
        title = "age now" if kind == "age" else kind
        print(f"{title:{width}}" + "".join(f"{name:>10}" for name in RolloutCounts._fields[1:]))
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
    needs = [Needs(state.version, state.watermark, state.uses, state.account) for state in states]
    found = verify(place_in(chosen.run), *needs)
    accounts = [state.account for state in states if state.account is not None]
    found.complaints += _miscounted(chosen.run, accounts)
    if chosen.held_out:
        from solera.run.leaks import find_leaks

        leaks = find_leaks(chosen.run)
        found.complaints += [f"rollout {id_}: answers a held-out problem of the task" for id_ in leaks.ids]
        responses = counted(leaks.responses, "response")
        if leaks.held_out:
            print(f"{responses} compared with {counted(leaks.held_out, 'held-out problem')}")
        if leaks.by_rule:
            tasks = " or ".join(leaks.by_rule)
            print(f"{leaks.stated} of {responses} state a problem of {tasks}; compared with its rule for held-out ones")
    for complaint in found.complaints:
        print(f"solera: {complaint}", file=sys.stderr)
    unsigned = f" ({found.unsigned} from an earlier version of Solera, with fewer checksums)" if found.unsigned else ""
    faults = counted(len(found.complaints), "fault") if found.complaints else "no faults"
    print(f"{counted(found.rollouts, 'rollout')} checked{unsigned}: {faults}")
    return 1 if found.complaints else 0


def _miscounted(run: Path, accounts: "list[Account]") -> Iterator[str]:
    """Where the file with the engines' counts lags behind an account."""
    from solera.folder.counts import PURPOSES, SAMPLED, Counts
    from solera.folder.paths import TOKENS

    file = run / TOKENS
    if not accounts:
        return
    if not file.is_file():
        yield f"{file} is missing: nobody knows how many tokens were sampled after the checkpoint"
        return
    counts = Counts.read(file)
    other = [((purpose,), accounts[0].other.get(purpose, 0)) for purpose in PURPOSES[1:]]
    for names, said in [(SAMPLED, accounts[0].generated), *other]:
        if (held := counts.sum(*names)) < said:
            yield f"{file}: {held} tokens ({' + '.join(names)}), but the checkpoint has counted {said}"


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
    left = f", {done.held_out} skipped because they answer held-out problems" if done.held_out else ""
    print(f"{counted(done.rollouts, 'rollout')} imported, {done.known} already known, {revised} updated{left}")
    if done.rollouts and config.collect.mode == "stream" and config.draw.policy == "fresh":
        print("note: while streaming, draw.policy = fresh does not train on imported rollouts (docs/store.md)")
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
    from solera.config import LARGEST
    from solera.records import Reward
    from solera.store.exchange import import_rewards, usual_part
    from solera.store.ledger import open_store

    single = chosen.id is not None and chosen.value is not None
    if single == (chosen.file is not None) or (chosen.file is not None and (chosen.id or chosen.value) is not None):
        raise SoleraError("reward: give --id and --value, or a file (see solera data reward --help)")
    if chosen.id is not None and not 0 < chosen.id <= LARGEST:
        raise SoleraError(f"--id is {chosen.id}; it must be a whole number from 1 to {LARGEST}")
    for name in ("part", "source"):
        text = getattr(chosen, name) or ""
        if text.encode(errors="ignore").decode() != text:
            raise SoleraError(f"--{name} is {text!r}; it must be UTF-8 text")
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
        print(f"solera: {counted(len(complaints), 'bad line')} written to {target}", file=sys.stderr)
    return 0
