"""Reward functions of one's own: found, recognised, and refused in one line."""

import sys

import pytest

from solera.errors import SoleraError
from solera.tasks.functions import check_spec, load

COLUMNS = frozenset(("prompt", "answer", "level"))


@pytest.fixture
def file(tmp_path):
    def write(source: str) -> str:
        (tmp_path / "rewards.py").write_text(source)
        return str(tmp_path / "rewards.py")

    return write


def takes(file, source: str, name: str = "f"):
    return load([f"{file(source)}:{name}"], COLUMNS, "prompt")[0].takes


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(rollout, row): ...", None),
        ("def f(a, b, scale=2): ...", None),
        ("async def f(rollout, row): ...", None),
        ("def f(*both): ...", None),
        ("class C:\n    def __call__(self, rollout, row): ...\nf = C()", None),
        ("def f(completions, **kwargs): ...", {"prompts", "completions", "completion_ids", "answer", "level"}),
        ("def f(prompts, completions): ...", {"prompts", "completions"}),
        ("def f(completions, answer, weight=1): ...", {"completions", "answer"}),
        ("async def f(*, completions, level): ...", {"completions", "level"}),
        ("def f(**kwargs): ...", {"prompts", "completions", "completion_ids", "answer", "level"}),
    ],
)
def test_a_signature_is_recognised_by_its_names(file, source, expected):
    assert takes(file, source) == expected


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def g(rollout, row): ...", "f does not exist; functions of .*: g"),
        ("f = 3", "f is not a function"),
        ("def f(rollout): ...", r"takes \(rollout\); a reward function takes \(rollout, row\)"),
        ("def f(a, b, c): ...", r"takes \(a, b, c\); a reward function takes"),
        ("def f(completions, truth): ...", "missing a required argument: 'truth'; the columns are answer, level"),
        ("def f(completions, /): ...", "completions"),
        ("def f(:", r"cannot be imported: SyntaxError: .*line 1"),
        ("import nowhere_at_all", r"ModuleNotFoundError: No module named 'nowhere_at_all' \(rewards.py, line 1\)"),
        ("\n1 / 0", r"ZeroDivisionError: division by zero \(rewards.py, line 2\)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(file, source, says):
    with pytest.raises(SoleraError, match=says) as refusal:
        takes(file, source)
    assert "\n" not in str(refusal.value)


def test_a_column_that_trl_would_overwrite_is_refused(file):
    with pytest.raises(SoleraError, match="gets 'completions' from Solera: rename that column"):
        load([f"{file('def f(completions, **kw): ...')}:f"], COLUMNS | {"completions"}, "prompt")


def test_two_functions_of_a_file_share_its_module(file):
    path = file("seen = []\ndef f(rollout, row): seen.append(1)\ndef g(rollout, row): return seen")
    f, g = load([f"{path}:f", f"{path}:g"], COLUMNS, "prompt")
    f.call(None, None)
    assert g.call(None, None) == [1]


def test_a_file_is_run_once_until_it_changes(file, tmp_path):
    source = "with open(__file__ + '.runs', 'a') as runs: runs.write('x')\ndef f(rollout, row): ...\n"
    for _ in range(2):
        load([f"{file(source)}:f"], COLUMNS, "prompt")
    assert (tmp_path / "rewards.py.runs").read_text() == "x"
    for _ in range(2):  # what failed is run again: the fault may have lain elsewhere
        with pytest.raises(SoleraError, match="ZeroDivisionError"):
            load([f"{file(source + '1 / 0')}:f"], COLUMNS, "prompt")
    assert (tmp_path / "rewards.py.runs").read_text() == "xxx"


def test_functions_of_packages_are_found_where_the_command_is_called(tmp_path, monkeypatch):
    (tmp_path / "own_package_of_rewards").mkdir()
    (tmp_path / "own_package_of_rewards" / "judge.py").write_text("def f(rollout, row): return 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (function,) = load(["own_package_of_rewards.judge:f"], COLUMNS, "prompt")
    assert function.call(None, None) == 5
    assert function.name == "f"
    with pytest.raises(SoleraError, match=r"own_package_of_rewards\.jury cannot be imported: ModuleNotFoundError"):
        load(["own_package_of_rewards.jury:f"], COLUMNS, "prompt")


@pytest.mark.parametrize(
    ("spec", "says"),
    [("exat", "not one of the graders exact, verbatim, number"), ("", "not one of"), ("a:", "package.module:f"),
     (":f", "package.module:f"), ("a:b c", "package.module:f"), ("nowhere.py:f", "there is no file nowhere.py")],
)  # fmt: skip
def test_what_names_no_function_is_refused_before_any_import(spec, says):
    with pytest.raises(SoleraError, match=says):
        check_spec(spec)


def test_a_file_may_import_files_beside_it(file, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "beside_own_rewards.py").write_text("def f(rollout, row): ...")
    assert takes(file, "from beside_own_rewards import f") is None
    assert sys.path[-1] == str(tmp_path.resolve())
