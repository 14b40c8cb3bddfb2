"""Malformed configs and command lines by the hundred: each is refused in one line that names its place, with status 2,
before torch is loaded, and leaves nothing behind. (Malformed data and rewards: tests/tasks/test_malformed.py.)"""

import dataclasses
import random
import re
import typing
from pathlib import Path

import pytest
import tyro

from solera.cli import main, train
from solera.cli.values import complaint
from solera.config import Config, ObjectiveConfig, Text, dump
from solera.lab import laboratory
from solera.objectives.table import RANGES, TABLE, resolve
from solera.run import evaluating

FIELDS = [
    (section.name, field.name, typing.get_type_hints(section.default_factory)[field.name])
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.default_factory)
]
NO_VALUE = ["1979-05-27", "07:32:00", "{ a = 1 }", "[[1]]", "[{ a = 1 }]"]
NO_NUMBER = ['"1"', '""', "true", "nan", "inf", "-inf", "1e999", "[1]", "[]", f"1{'0' * 400}"]
WRONG = {
    bool: ["0", "1", '"true"', "[true]", '""', "nan"],
    int: [*NO_NUMBER, "1.0", "9223372036854775808", "-9223372036854775809", f"0x{'f' * 20}", f"0x{'f' * 5000}"],
    float: NO_NUMBER,
    str: ["1", "1.5", "true", '["a"]', '""', r'"\u0000"', r'"a\nb"', r'"\u001b[31m"', '"""\n\n"""'],
    tuple: ["1", '"a"', "[true]", "[nan]", "[1, [2]]", "[inf, 0.9]", '["a", 1]', '[""]', "[{}]"],
}
"""TOML values that are none of the type."""


def kind(hint: typing.Any) -> type:
    """The type below annotations and `| None`; a choice of words is text."""
    origin = typing.get_origin(hint)
    if origin is None:
        return str if hint is Text else hint
    if origin is typing.Literal:
        return str
    return tuple if origin is tuple else kind(next(a for a in typing.get_args(hint) if a is not type(None)))


def wrong_types() -> list[tuple[str, str, str]]:
    """Where a choice of words may also be a number, a number is right."""
    return [
        (section, name, value)
        for section, name, hint in FIELDS
        for value in WRONG[kind(hint)] + NO_VALUE
        if not (kind(hint) is str and float in typing.get_args(hint) and value in ("1", "1.5"))
    ]


def written(section: str, name: str, value: str) -> list[tuple[str, int]]:
    """The ways of writing a field in TOML, and the line each has it on."""
    return [
        (f"# a comment\n\n[{section}]\n{name} = {value}\n", 4),
        (f"\n{section}.{name} = {value}\n", 2),
        (f'["{section}"]\n"{name}"={value}\n', 2),
        (f"\r\n\r\n  [ {section} ] # {name} = 1\r\n\t{name}\t= {value}\r\n", 4),
    ] + ([(f"\n\n{section} = {{ {name} = {value} }}", 3)] if "\n" not in value else [])


OUT_OF_RANGE = {
    "run.steps": ["0", "-1"], "run.seed": ["-1"], "run.threads": ["-1", "1025", "1000000000"],
    "run.name": ['"."', '".."', '"a/b"', '"/a"', '"a b"', '"a*"', f'"{"x" * 201}"', '"a\\\\b"', '"~"'],
    "task.name": ['"sums"', '"json"', '"Arithmetic"'], "task.level": ["0", "5", "-1"],
    "reward.functions": ['["exakt"]', '["a.py"]', '[":f"]', '["a:"]', '["nowhere.py:f"]', '["exact", "exact"]',
    '["a.py:1"]'],
    "reward.weights": ["[1]", "[1.0, 2.0]"], "reward.timeout": ["0", "-1.5"],
    "reward.truncated_reward": ["0"], "reward.overlong_buffer": ["-1", "17"],
    "reward.overlong_penalty": ["2", "0", "-1"],
    "sampling.temperature": ["0", "-0.0", "-1", "1e-320"], "sampling.max_tokens": ["0", "-1"],
    "sampling.top_p": ["0", "0.99", "1.01", "-1"], "collect.prompts": ["0", "-1"],
    "collect.group_size": ["1", "0", "-8"],
    "collect.offset": ["-1"], "collect.refill_rounds": ["-1", "5"], "learn.lr": ["-1e-4", "1", "1e300"],
    "learn.warmup": ["-1"], "learn.betas": ["[0.9, 1.0]", "[-0.1, 0.9]", "[1, 1]", "[0.9]", "[0.9, 0.9, 0.9]"],
    "learn.weight_decay": ["-0.1"], "learn.grad_clip": ["0", "-1"], "learn.passes": ["0", "-3"],
    "learn.minibatches": ["0", "33"], "learn.micro_batch_tokens": ["0", "-1"], "learn.pack_tokens": ["-1"],
    "learn.logit_chunk": ["0"], "engine.max_rows": ["0", "-1"], "sync.period": ["0", "-10"], "evaluate.every": ["-1"],
    "evaluate.problems": ["0", "-1"], "evaluate.temperature": ["-0.1"], "evaluate.top_p": ["0", "0.5", "1.5", "-1"],
    "evaluate.samples": ["0", "2"], "checkpoint.every": ["-1"], "checkpoint.keep": ["0", "-1"],
    "task.held_out_share": ["0", "1", "-0.1", "0.5"], "task.path": ['"d.jsonl"'], "task.prompt": ['"p"'],
    "task.answer": ['"a"'], "task.held_out_path": ['"h.jsonl"'],
    "objective.name": ['"gropo"', '"GRPO"', '"rec"'], "objective.ref_period": ["5", "0"], "objective.ref_ema": ["0.5"],
    "objective.delta": ["0.1"], "objective.kl": ['"k3"'], "objective.ring_low": ["0.5"],
}  # fmt: skip
"""Values of the right type that cannot be, or cannot be beside the defaults."""


def out_of_range() -> list[tuple[str, str, str]]:
    return [(*place.split("."), value) for place, values in OUT_OF_RANGE.items() for value in values]


def idle_objective_fields() -> list[tuple[str, str, str]]:
    """Every field of every objective that does not act in it: (objective, field, a value of the right type)."""
    idle = []
    for name in TABLE:
        acting = resolve(ObjectiveConfig(name))
        for section, field, hint in FIELDS:
            if section == "objective" and field not in ("name", "unknown_behaviour", "ref_period", "ref_ema"):
                (choice, *_) = typing.get_args(hint)
                value = {bool: "true", int: "1", float: "0.5", str: f'"{(typing.get_args(choice) or ("",))[0]}"'}
                if getattr(acting, field) is None:
                    idle.append((name, field, value[kind(hint)]))
    return idle


def bad_constants() -> list[tuple[str, str, str]]:
    """Every objective's own constants beyond their range."""
    found = []
    for name in TABLE:
        acting = resolve(ObjectiveConfig(name))
        for field, (low, high, _) in RANGES.items():
            if getattr(acting, field) is not None:
                found += [(name, field, str(-1 if low < 1 else 0))] + ([(name, field, "1.5")] if high <= 1 else [])
    return found


COMBINATIONS = [
    ("sync = { rule = 'never', period = 5 }", "sync.period"),
    ("evaluate = { samples = 4 }", "evaluate.samples"),
    ("evaluate = { temperature = 1.0, top_p = 0 }", "evaluate.top_p"),
    ("learn.minibatches = 3\ncollect.prompts = 2", "learn.minibatches"),
    ("reward = { functions = ['exact'], weights = [1, 2] }", "reward.weights"),
    ("reward = { overlong_buffer = 32 }\nsampling.max_tokens = 31", "reward.overlong_buffer"),
    ("task = { name = 'jsonl' }", "task.path"),
    ("task = { name = 'jsonl', path = 'd', level = 2 }", "task.level"),
    ("task = { name = 'jsonl', path = 'd', held_out_path = 'h', held_out_share = 0.5 }", "task.held_out_path"),
    ("task = { name = 'jsonl', path = 'nowhere.jsonl' }", "nowhere.jsonl"),
    ("task = { name = 'jsonl', path = '.' }", r"\."),
    ("objective = { name = 'grpo', refill = true }\ncollect.offset = 1", "objective.refill"),
    ("objective = { name = 'grpo', zero_variance_mask = false, refill = true }", "objective.refill"),
    ("objective = { name = 'grpo', beta = 0.1, ref_period = 2, ref_ema = 0.5 }", "objective.ref_period"),
    ("objective = { name = 'grpo', beta = 0.1, kl = 'k1', kl_weight = 'none' }", "objective.kl"),
    ("objective = { name = 'rec_ring_is_wide', ring_low = 0.1 }", "objective.ring_low"),
    ("objective = { name = 'rec_ring_is_wide', ring_high = 0.1 }", "objective.ring_high"),
    ("objective = { name = 'opmd_pairwise', aggregation = 'token_mean' }", "objective.aggregation"),
    ("objective = { name = 'red_weight_adaptive', aggregation = 'sequence_mean' }", "objective.adaptive_temperature"),
    ("objective = { name = 'mis', weight_low = 9, weight_high = 2 }", "objective.weight_low"),
    ("model.path = 'no/such/folder'", "no such folder"),
    ("model.path = 'embeded'", "did you mean embedded"),
    ("model.path = '.'", "no config.json"),
    (f"model.path = '{'x' * 5000}'", "no such folder"),
]

GOOD = dump(Config())


def broken_toml() -> list[bytes]:
    """Files that are not TOML."""
    lines = ["[run", "run]", "[[run]", "[run]]", "[]", "[run.]", "[.run]", "[run] steps = 1", "steps", "steps =", "= 1",
             "steps = = 1", "steps = 1 2", "steps = 01", "steps = 1_", "steps = +-1", "steps = 0b2", "steps = 1e",
             "name = 'a", 'name = "a', 'name = "\\x"', 'name = "\\ud800"', 'name = """a', "name = a", "name = True",
             "betas = [0.9, 0.9", "betas = [0.9 0.9]", "run = { steps = 1", "run = { steps = 1, }",
             "run = { steps = 1\n}",
             "run.steps = 1\nrun.steps = 2", "[run]\nsteps = 1\nsteps = 1", "[run]\n[run]", "run = {}\n[run]",
             "run = {}\nrun.steps = 1", "run = 1\nrun.steps = 1", "[[run]]\n[run]", "{}", '{"run": {"steps": 1}}',
             "run:\n  steps: 1",
             "steps = 1979-13-01", "steps = 25:00:00", "\x00", "[run]\nname = 'a\x00b'", "\x1b", "# \x01",
             "[run]\nsteps = 1\x0b",
             "\ufeff\ufeff[run]", "steps = \u0661", "steps = \uff11", "a = " + "[" * 100_000, "a = " + "{ a = " * 5000,
             f"[run]\nsteps = {'9' * 5000}", ".", "..", "a..b = 1", "'a'b = 1", "run.'''a''' = 1"]  # fmt: skip
    broken = [line.encode() for line in lines]
    for junk in (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xff\xfe[\x00r\x00", b"\xf8\x88\x80\x80\x80"):
        broken += [junk, b"[run]\nname = '" + junk + b"'", b"# " + junk]
    rng = random.Random(0)
    keys = [n for n in range(len(GOOD)) if GOOD[n] == "="]
    for place in rng.sample(keys, 20):
        broken += [(GOOD[:place] + GOOD[place + 1 :]).encode(), GOOD[: place + 1].encode()]
    return broken


UNKNOWN = [
    ("[lern]\nlr = 1.0", 1, "did you mean learn"), ("\n[runs]", 2, "did you mean run"), ("a = 1", 1, "use one of run"),
    ("momentum = 0.9", 1, "use one of run"), ("\n'' = 1", 2, "unknown table"), ('"a\\nb" = 1', 1, "unknown table"),
    ("[run]\n[run.sub]\na = 1", 2, "run.sub"), ("[[run]]\nsteps = 1", 1, "run is a table"), ("run = 1", 1,
    "run is a table"),
    ("\n[[learn]]\n[[learn]]", 2, "learn is a table"), ("run = 'x'", 1, "run is a table"), ("run = []", 1,
    "run is a table"),
    ("[run]\nsteps.more = 1", 2, "run.steps"), ("run.steps.more.and.more = 1", 1, "run.steps"),
    ("[run]\n'st eps' = 1", 2, "run.st eps"), ('[run]\n"\\u001b" = 1', 1, "run."), ("[a.b.c]", 1, "unknown table"),
    ("[learn]\nlr = 1e-4\n\n[run]\nlr = 1e-4", 5, "run.lr"), ("[run]\nStepS = 1", 2, "run.StepS"),
]  # fmt: skip


def misspelt() -> list[tuple[str, str, str]]:
    """Every field with a letter doubled: the right one is suggested."""
    return [(section, name[:-1] + 2 * name[-1], name) for section, name, _ in FIELDS if len(name) > 2]


def wrong_options() -> list[list[str]]:
    rng, found = random.Random(1), []
    values = {bool: ["yes", "1", ""], int: ["x", "1.5", "", "nan", "9" * 30, "9" * 5000],
    str: ["", "a\nb", "\udcff", "\0"],
              float: ["x", "", "nan", "inf", "-inf", "1e999", "1,5"], tuple: ["nan", ""]}  # fmt: skip
    for section, name, hint in FIELDS:
        option = {"model.path": "--model", "task.name": "--task", "objective.name": "--objective"}.get(
            f"{section}.{name}", f"--{section}.{name}"
        )
        if option != "--store.data":  # names of files, which are looked for later
            found += [[option, value] for value in rng.sample(values[kind(hint)], min(3, len(values[kind(hint)])))]
        if kind(hint) is not tuple or name == "betas":
            found.append([option])
        found.append([f"{option}x", "1"])
    found = rng.sample(found, 80)  # tyro takes a fifth of a second for each
    found += [["--run.steps", "1", "2"], ["-x"], ["--run"], ["--run.steps=x"], ["extra.toml", "more"], ["", "a"]]
    found += [["--learn.betas", "0.9"], ["--learn.betas", "0.9", "0.9", "0.9"], ["--learn.betas", "a", "b"]]
    found += [
        ["--reward.weights", "a"],
        ["--reward.weights", "nan"],
        ["--reward.functions", "exakt"],
        ["--no-run.steps"],
    ]
    return found


def test_there_are_at_least_a_thousand():
    made = [wrong_types(), out_of_range(), idle_objective_fields(), bad_constants(), COMBINATIONS, broken_toml()]
    made += [UNKNOWN, misspelt(), wrong_options(), WRONG_COMMANDS]
    assert sum(map(len, made)) >= 1000


class AcceptedError(Exception):
    """A malformed input went through."""


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """The line that the command says of these arguments, beside which nothing may appear."""
    monkeypatch.chdir(tmp_path)

    def accept(*_, **__):
        raise AcceptedError

    monkeypatch.setattr(train, "_train_with", accept)
    monkeypatch.setattr(evaluating, "evaluate_models", accept)
    monkeypatch.setattr(laboratory, "run", accept)

    def run(*arguments: str) -> str:
        before = sorted(Path().rglob("*"))
        assert main(list(arguments)) == 2
        said = capfd.readouterr()
        assert not said.out
        assert re.fullmatch(r"solera: [^\x00-\x1f]{10,900}\n", said.err), said.err
        assert "Traceback" not in said.err
        assert sorted(Path().rglob("*")) == before
        return said.err

    return run


@pytest.fixture
def refused_file(refused):
    def run(content: str | bytes) -> str:
        Path("run.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return refused("train", "run.toml")

    return run


def test_a_value_of_another_type_is_named_with_its_line(refused_file):
    for number, (section, name, value) in enumerate(wrong_types()):
        ways = written(section, name, value)
        toml, line = ways[number % len(ways)]
        said = refused_file(toml)
        assert said.startswith(f"solera: run.toml:{line}: {section}.{name} "), (toml, said)


def test_a_value_out_of_range_is_named_with_its_line(refused_file):
    for number, (section, name, value) in enumerate(out_of_range()):
        ways = written(section, name, value)
        toml, line = ways[number % len(ways)]
        said = refused_file(toml)
        assert said.startswith(f"solera: run.toml:{line}: {section}.{name}"), (toml, said)


def test_a_field_that_does_not_act_is_named_with_its_line(refused_file):
    for objective, field, value in idle_objective_fields() + bad_constants():
        said = refused_file(f'[objective]\nname = "{objective}"\n{field} = {value}')
        assert said.startswith(f"solera: run.toml:3: objective.{field} "), (objective, field, said)
        assert re.search(r"remove it|must be|choose", said), said


@pytest.mark.parametrize(("toml", "says"), COMBINATIONS)
def test_an_impossible_combination_is_refused(refused_file, toml, says):
    assert re.search(says, refused_file(toml))


def test_what_is_no_toml_is_refused_with_its_place(refused_file):
    for content in broken_toml():
        said = refused_file(content)
        assert said.startswith("solera: run.toml:"), content[:80]
        assert re.search(r"run\.toml:\d+: |line \d+|end of document|nested too deep|digits", said), (content[:80], said)


def test_what_is_not_known_is_refused_with_a_suggestion(refused_file):
    for toml, line, says in UNKNOWN:
        said = refused_file(toml)
        assert said.startswith(f"solera: run.toml:{line}: ") and says in said, (toml, said)
    for section, wrong, right in misspelt():
        assert f"run.toml:2: unknown field {section}.{wrong}; did you mean {right}?" in refused_file(
            f"[{section}]\n{wrong} = 1"
        )


def test_files_that_cannot_be_read(refused, tmp_path):
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("nowhere.toml", "loop.toml", "/proc/self/mem", "no/such/file.toml", "x" * 300, "a\0b"):
        assert "cannot be read" in refused("train", name)
    assert "folder.toml is a folder" in refused("train", "folder.toml")


def test_windows_files_are_read_as_any_other(tmp_path, monkeypatch, refused_file):
    with pytest.raises(AcceptedError):
        refused_file(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())


def test_an_option_in_place_of_a_files_value_is_not_blamed_on_the_file(refused, tmp_path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 5\n")
    assert refused("train", "run.toml", "--run.steps", "0").startswith("solera: run.steps is 0")


def test_wrong_options_are_refused(refused):
    for arguments in wrong_options():
        said = refused("train", *arguments)
        option = arguments[0].split("=")[0]
        if len(arguments) <= 2 and re.match(r"--\w+\.\w+$", option):
            assert option.removeprefix("--").removesuffix("x")[:-1] in said, (arguments, said)


def option_of(section: str, name: str) -> str:
    short = {"model.path": "--model", "task.name": "--task", "objective.name": "--objective"}
    return short.get(f"{section}.{name}", f"--{section}.{name}")


LONG = ["x" * 5000, "9" * 5000, "a b " * 2000, "\u00e4" * 3000]


def wrong_values() -> list[list[str]]:
    """For every option: a value too many, none, and values that are long, empty or of another kind."""
    found = []
    for section, name, hint in FIELDS:
        option, of = option_of(section, name), kind(hint)
        if of is not tuple:
            found += [[option], [option, "1.0", "2.0"], [option, "1", LONG[0]], [f"{option}=1", "2"]]
        if of in (int, float, bool):
            found += [[option, value] for value in ("", "x", "1 2", "-x", LONG[0], LONG[2], LONG[3])]
        if of is int:
            found += [[option, "1.5"], [option, LONG[1]]]
        if typing.get_origin(of_choices(hint)) is typing.Literal:
            found += [[option, value] for value in ("", "x", *LONG)]
    return found + [
        ["--learn.betas", *values] for values in (["0.9"], ["0.9", "0.9", "0.9"], ["a", "b"], [LONG[0]] * 2)
    ]


def of_choices(hint):
    return next((one for one in typing.get_args(hint) if typing.get_origin(one) is typing.Literal), hint)


def test_every_option_is_named_where_its_values_are_wrong():
    for arguments in wrong_values():
        said = complaint(Config(), arguments, tyro.conf.FlagConversionOff)
        option = arguments[0].partition("=")[0]
        assert said is not None and said.startswith((f"{option} is ", f"{option} takes ")), (arguments, said)
        assert len(said) < 300


def test_the_command_says_the_same_in_one_line(refused):
    for arguments in random.Random(2).sample(wrong_values(), 30):
        assert refused("train", *arguments).startswith(f"solera: {arguments[0].partition('=')[0]} "), arguments
    for text in LONG:
        for option in ("--model", "--task", "--objective", "--run.name", "--task.path", "--reward.functions"):
            said = refused("train", option, text)
            assert option.removeprefix("--").partition(".")[0] in said.split("xxx")[0], said


def test_right_values_are_no_complaint():
    right = "--run.steps 5 --learn.betas 0.9 0.99 --learn.lr=1e-4 --model.compile False --collect.overlap None"
    right += (
        " --model a/b --model.path c --reward.weights --task.level None --sync.rule never --learn.weight_decay -0.5"
    )
    assert complaint(Config(), right.split(), tyro.conf.FlagConversionOff) is None


WRONG_COMMANDS = [
    ["trian"], [""], ["--train"], ["-"], ["train ", "x"], ["TRAIN"], ["--resume", "x"], ["\n"],
    ["train", "--resume"], ["train", "--resume", "a", "b"], ["train", "x.toml", "--resume", "a"],
    ["algorithms", "gropo"], ["algorithms", "grpo", "topr"], ["algorithms", ""], ["algorithms", "--x"],
    ["algorithms", "a\nb"],
    ["report"], ["report", "nowhere"], ["report", "."], ["report", "--out"], ["report", "a", "--groups", "x"],
    ["report", "a", "--groups", "-1"], ["report", "a", "--groups", "1.5"], ["report", "a", "--x"], ["report", ""],
    ["report", "/dev/null"], ["report", "a", "--groups", "9" * 500],
    ["eval"], ["eval", "--samples", "4"], ["eval", "nowhere"], ["eval", "no/such/folder"], ["eval", "."], ["eval", ""],
    ["eval", "embedded", "--samples", "0"], ["eval", "embedded", "--samples", "x"], ["eval", "embedded", "--k", "2"],
    ["eval", "embedded", "--samples", "4", "--k", "0"], ["eval", "embedded", "--samples", "4", "--k", "5"],
    ["eval", "embedded", "--samples", "4", "--k", "x"], ["eval", "embedded", "--temperature", "nan"],
    ["eval", "embedded", "--temperature", "-1"], ["eval", "embedded", "--temperature", "inf"],
    ["eval", "embedded", "--top_p", "0.5"],
    ["eval", "embedded", "--problems", "0"], ["eval", "embedded", "--problems", "9" * 40],
    ["eval", "embedded", "--threads", "-1"],
    ["eval", "embedded", "--threads", "99999"], ["eval", "embedded", "--seed", "-1"],
    ["eval", "embedded", "--device", "tpu"],
    ["eval", "embedded", "--threshold", "nan"], ["eval", "embedded", "--threshold", "inf"],
    ["eval", "embedded", "--json"],
    ["eval", "embedded", "--json", "."], ["eval", "embedded", "--json", "no/such/file"],
    ["eval", "embedded", "--json", ""],
    ["eval", "embedded", "--checkpoints"], ["eval", "embedded", "--task", "sums"],
    ["eval", "embedded", "--task", "jsonl"], ["eval", "embedded", "--task.level", "9"],
    ["eval", "embedded", "--learn.lr", "1"],
    ["eval", "embedded", "--max_tokens", "0"], ["eval", "embedded", "--x"], ["eval", "x" * 5000],
    ["eval", "embedded", "--json", "x" * 300], ["eval", "embedded", "--json", "/proc/x"],
    ["lab", "magic"], ["lab", "--seed", "x"], ["lab", "--seed", "-1"], ["lab", "--seed", "9" * 40],
    ["lab", "--objectives", "gropo"],
    ["lab", "--objectives"], ["lab", "--lags"], ["lab", "--lags", "-1"], ["lab", "--lags", "x"],
    ["lab", "--lags", "9" * 40],
    ["lab", "--group_size", "1"], ["lab", "--group_size", "x"], ["lab", "--group_size", "9" * 20],
    ["lab", "--clip", "0"], ["lab", "--clip", "nan"],
    ["lab", "--clip", "inf"], ["lab", "--clip", "9"],
    ["lab", "--x"], ["lab", "bias", "bias", "magic"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG_COMMANDS, ids=lambda arguments: ascii(" ".join(arguments))[:40])
def test_wrong_commands_are_refused(refused, arguments):
    refused(*arguments)
