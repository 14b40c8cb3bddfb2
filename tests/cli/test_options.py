"""Help as a person reads it in a terminal of 80 columns."""

import dataclasses
import random
import re

import pytest
import tyro

from solera.bench.options import BenchOptions
from solera.cli.generate import GenerateOptions
from solera.cli.values import _known, complaint
from solera.config import SyncConfig, apportion
from solera.lab.options import LabOptions
from tests.command import solera

FLAGS = tyro.conf.FlagCreatePairsOff
COMMANDS = ["", "train", "eval", "data", "data stats", "data verify", "data import", "data export", "data reward",
            "sweep", "report", "algorithms", "bench", "lab"]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_is_wider_than_the_terminal(command):
    done = solera(*command.split(), "--help", COLUMNS="80")
    assert done.returncode == 0 and not done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_can_be_printed_in_ascii(command):
    done = solera(*command.split(), "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_description_is_as_wide_as_the_terminal_and_stands_between_usage_and_options():
    narrow, wide = (solera("train", "--help", COLUMNS=columns).stdout for columns in ("60", "100"))
    assert narrow.startswith("usage: solera train [FILE.toml] [-h] [OPTIONS]\n\nTrain a model. ")
    for shown, columns in ((narrow, 60), (wide, 100)):
        first, second, *_ = shown.split("\n\n")[1].splitlines()
        assert len(first) <= columns < len(f"{first} {second.split()[0]}")
    assert narrow.index("with all its fields.") < narrow.index("options ─")


def test_help_can_be_asked_for_one_section():
    whole, shown = (solera("train", "recipes/demo.toml", *asked).stdout for asked in (["--help"], ["-h", "sync"]))
    assert "Sections: run, model, lora, task, reward," in whole
    assert set(re.findall(r"--([a-z_]+\.[a-z_]+)", shown)) == {
        f"sync.{field.name}" for field in dataclasses.fields(SyncConfig)
    }
    assert shown.startswith("usage: solera train [FILE.toml] [-h] [OPTIONS]\n\n╭─ options")
    assert "on-policy. (default: 10)" in " ".join(shown.replace("│", " ").split())
    wrong = solera("train", "--help", "snyc")
    assert wrong.returncode == 2
    assert wrong.stderr == "solera: --help snyc: unknown section; did you mean sync? (see solera train --help)\n"


def test_the_help_of_a_field_is_one_paragraph():
    """The source breaks it after "the number of"."""
    shown = solera("train", "--help", COLUMNS="80").stdout
    assert "The number of responses generated at once and the number of tokens in" in shown


def test_an_option_that_turns_something_off_says_so():
    shown = " ".join(solera("bench", "--help", COLUMNS="80", PYTHONIOENCODING="ascii").stdout.replace("|", " ").split())
    assert "--no_compile `--no_compile` does not compile our layers." in shown
    assert "compiled on a GPU, as in a run. --trl_step" in shown


def test_shares_are_said_to_be_in_proportion():
    """2 and 1 of a batch of 6 are 4 and 2."""
    shown = " ".join(
        solera("train", "--help", COLUMNS="120", PYTHONIOENCODING="ascii").stdout.replace("|", " ").split()
    )
    assert "Relative share of each origin (`mixed`):" in shown
    assert apportion(6, [2, 1]) == apportion(6, [0.5, 0.25]) == [4, 2]


@pytest.mark.parametrize("file", ["recipes/demo.toml", f"{'a long name/' * 20}run.toml"])
def test_a_file_behind_the_options_is_shown_where_it_belongs(file):
    done = solera("train", "--run.seed", "7", file, "--run.steps", "3", COLUMNS="60")
    quoted = f"'{file}'" if " " in file else file
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"; the file comes first: solera train {quoted} --run.seed 7 --run.steps 3 (see " in done.stderr


def test_a_second_file_and_other_stray_words_are_not_called_the_file():
    assert "comes first" not in solera("train", "recipes/demo.toml", "recipes/demo.toml").stderr
    assert "comes first" not in solera("train", "--run.seed", "7", "stray").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run.steps", "9", "--resume", "runs/first"], "runs/first: no config.toml, so there is no run to resume"),
        (["--resume", "runs/a b", "--run.steps", "9"], "runs/a b: no config.toml, so there is no run to resume"),
        (["recipes/demo.toml", "--resume"], "--resume needs a run's folder, such as runs/NAME"),
        (["--resume", "--run.name", "a"], "--resume needs a run's folder, such as runs/NAME"),
    ],
)
def test_a_resume_needs_the_folder_of_a_run(arguments, said):
    done = solera("train", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"solera: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        ("--sync.period", ["x"], "'x' but must be a whole number"),
        ("--run.steps", ["1.5"], "'1.5' but must be a whole number"),
        ("--learn.lr", ["a b"], "'a b' but must be a number"),
        ("--evaluate.threshold", ["x"], "'x' but must be a number"),
        ("--draw.max_age", ["x"], "'x' but must be a whole number"),
        ("--reward.weights", ["1", "x"], "['1', 'x'] but must be a list, each a number"),
        ("--learn.betas", ["1", "x"], "['1', 'x'] but must be a list, each a number"),
        ("--sync.period", ["9" * 5000], "too long a text but must be a whole number"),
        ("--draw.max_age", ["9" * 5000], "too long a text but must be a whole number"),
    ],
)
@pytest.mark.parametrize("environment", [{}, {"PYTHONIOENCODING": "ascii"}])
def test_what_is_no_number_is_told_so_in_the_words_of_a_file(option, values, said, environment):
    done = solera("train", option, *values, COLUMNS="70", **environment)
    assert done.returncode == 2
    assert done.stderr == f"solera: {option} is {said} (see solera train --help)\n"


def test_what_the_checks_refuse_is_what_tyro_refuses():
    """The checks run before tyro: if they disagreed, a correct command could be refused or a mistake pass."""
    rng, values = random.Random(0), ["1", "-1", "0.5", "x", "True", "None", "", "bias", "auto", "-x", "-inf", "nan"]
    for default in (BenchOptions(), LabOptions(), GenerateOptions()):
        names = [name for name in _known(default, FLAGS) if name]
        cases = [[f"--{name}"] for name in names] + [[f"--{name}", rng.choice(values)] for name in names]
        cases += [[f"--{name}={rng.choice(values)}"] for name in names] + [[f"--{name}x", "1"] for name in names]
        cases += [[f"--{rng.choice(names)}", *rng.choices(values, k=2)] for _ in range(20)]
        cases += [["bias"], ["--seed", "3", "bias"], ["magic"], ["-"], ["--", "bias"], ["-x"]]
        for arguments in rng.sample(cases, min(60, len(cases))):
            assert (complaint(default, arguments, FLAGS) is None) is parses(default, arguments), arguments


def parses(default, arguments: list[str]) -> bool:
    try:
        tyro.cli(
            type(default), args=arguments, default=default, use_underscores=True, config=(FLAGS,), console_outputs=False
        )
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--sync.temperature", "1"], "unknown option --sync.temperature; sync has rule, period, metric, "),
        (["train", "--runn.seed", "1"], "unknown option --runn.seed; did you mean --run.seed?"),
        (["train", "--run", "1"], "unknown option --run; run has name, root, steps, "),
        (
            ["train", "--use_vllm", "True"],
            "--use_vllm (see solera train --help; docs/coming-from.md has the",
        ),
        (["eval", "embedded", "--use_vllm", "1"], "unknown option --use_vllm (see solera eval --help)"),
        (["train", "--from", "40"], "--from needs --resume FOLDER (see solera train --help)"),
        (["train", "--learn.max_steps", "9"], "unknown option --learn.max_steps; did you mean --run.steps?"),
        (["train", "--run.name", "-x"], "--run.name takes one value, but none was given"),
        (["train", "a.toml", "b.toml"], "a.toml: cannot be read"),
        (["train", "--collect.errors", "ignore"], "is 'ignore' but must be one of stop, missing or a number"),
        (["bench", "--overlap", "x"], "--overlap is 'x' but must be true or false"),
        (["bench", "--compile"], "unknown option --compile; did you mean --no_compile?"),
        (["eval", "embedded", "--collect.error", "stop"], "did you mean --collect.errors?"),
        (["lab", "magic"], "the argument is ['magic'] but must be a list, each one of bias, groups, "),
        (["lab", "--quick", "magic"], "the argument is ['magic'] but must be a list, each one of bias, groups, "),
        (["lab", "bias", "--quick", "groups"], "these options cannot be parsed: bias --quick groups (see "),
        (["data", "stats", "runs/a", "--plto", "x"], "unknown option --plto; did you mean --plot?"),
        (["data", "frobnicate"], "unknown action 'frobnicate'; use one of stats, verify, import, export, reward"),
    ],
)
def test_a_mistake_in_the_options_is_explained(arguments, says):
    done = solera(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert says in done.stderr
