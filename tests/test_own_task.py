"""A task of one's own: named on the command line, in a file or from Python; and mistakes in it told in one line."""

import functools
import json
import signal
import sqlite3
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

import solera
from solera.config import override
from tests.command import solera as command
from tests.command import start
from tests.test_examples import EXAMPLES, config

sys.path.insert(0, str(EXAMPLES))
from own_task import TwoTries

SHORT = """
    [run]
    name = "x"
    steps = 4
    device = "cpu"
    [collect]
    prompts = 4
    group_size = 4
    [evaluate]
    every = 0
    problems = 8
    [diagnose]
    probe_prompts = 0
    [report]
    tensorboard = false
    page = false
"""
TASKS = f"""
    import sys
    sys.path.insert(0, {str(EXAMPLES)!r})
    from own_task import TwoTries
    import solera

    class Flaky(TwoTries):
        made = 0

        async def run(self, prompt, generate):
            Flaky.made += 1
            fails = Flaky.made % 10 == 9
            rollout = await super().run(prompt, generate)
            if fails:
                raise ConnectionError("the tool is down")
            return rollout

    class Quotes(Flaky):
        async def run(self, prompt, generate):
            try:
                return await super().run(prompt, generate)
            except ConnectionError:
                raise RuntimeError("no closing [/INST] in [the answer] :cat:") from None

    class Forgets(TwoTries):
        async def run(self, prompt, generate):
            first = await generate(prompt.token_ids)
            given = prompt.token_ids
            second = await generate((*given, *first.token_ids_T.tolist(), *given))
            return solera.Rollout.of(prompt, first, given[:-1], second, rewards=(solera.Reward(1.0),))

    class Talks(TwoTries):
        async def run(self, prompt, generate):
            turns, ids = [], prompt.token_ids
            for _ in range(50):
                turns += [await generate(ids), prompt.token_ids * 3]
                ids = (*ids, *turns[-2].token_ids_T.tolist(), *turns[-1])
            right = self._right(turns[0], prompt)
            return solera.Rollout.of(prompt, *turns, rewards=(solera.Reward(float(right)),))

    class Waits(TwoTries):
        def __init__(self, codec):
            super().__init__(codec)
            self.most = codec.max_length

        async def run(self, prompt, generate):
            import asyncio
            assert self.most == 64
            await asyncio.sleep(0.2)
            return await super().run(prompt, generate)

    def brevity(rollout, row):
        return -0.01 * rollout.length

    def right(prompts, completions, answer, **columns):
        assert all(prompt.endswith("=") for prompt in prompts)
        return [float(said == wanted) for said, wanted in zip(completions, answer)]

    class Resets:
        def reset(self):
            return "Go."
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tasks.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "short.toml").write_text(textwrap.dedent(SHORT))
    return tmp_path


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs/x/metrics.jsonl").read_text().splitlines()]


def rewards(folder: Path) -> dict[str, int]:
    with sqlite3.connect(folder / "runs/x/store.db") as store:
        return dict(store.execute("select part, count(*) from rewards group by part").fetchall())


def test_an_episode_that_raises_stops_the_run_with_one_line(folder):
    done = command("train", "short.toml", "--task", "tasks.py:Flaky", cwd=folder)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("solera: prompt 'two_tries/")
    assert "': Flaky.run raised ConnectionError: the tool is down (tasks.py, line 15);" in line


@pytest.mark.parametrize("errors", ["missing", "-1"])
def test_with_collect_errors_it_costs_one_episode(folder, errors):
    done = command("train", "short.toml", "--task", "tasks.py:Flaky", "--collect.errors", errors, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the tool is down") + done.stdout.count("the tool is down") == 1
    # Eight problems are attempted first; of 64 episodes of training the 9th + 10·n-th of all fail: 9 − 8, 19 − 8, …
    failed = [row.get("episodes/failed", 0) for row in metrics(folder)]
    assert failed == [2, 2, 1, 2, 0]
    found = rewards(folder)
    assert found == {"failed": 7, "reward": 57}
    with sqlite3.connect(folder / "runs/x/store.db") as store:
        values = store.execute("select distinct value from rewards where part = 'failed'").fetchall()
        assert values == [(-1.0 if errors == "-1" else 0.0,)]
        used = store.execute("select count(*) from uses").fetchone()
        assert used == (64,)


def test_an_error_and_a_folder_with_brackets_and_colons_are_printed_as_they_are(folder):
    options = ["--collect.errors", "missing", "--run.root", "runs[a]:cat:"]
    done = command("train", "short.toml", "--task", "tasks.py:Quotes", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Quotes.run raised RuntimeError: no closing [/INST] in [the answer] :cat: (tasks.py" in done.stdout
    assert done.stdout.splitlines()[0] == "run    runs[a]:cat:/x"
    assert done.stdout.splitlines()[-1] == "model  runs[a]:cat:/x/model"


def test_a_rollout_that_is_not_what_the_engine_wrote_stops_the_run(folder):
    done = command("train", "short.toml", "--task", "tasks.py:Forgets", cwd=folder)
    assert done.returncode == 2
    assert "the rollout does not match what the engine received and generated (token " in done.stderr


def test_an_episode_that_outgrows_the_context_ends_cut_off(folder):
    done = command("train", "short.toml", "--task", "tasks.py:Talks", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = metrics(folder)
    assert all(row["response/truncated"] == 1 for row in rows if "response/truncated" in row)
    assert any(row.get("tokens/trained", 0) for row in rows)


def test_reward_functions_judge_a_task_of_ones_own_too(folder):
    functions = ["tasks.py:brevity", "exact", "tasks.py:right"]
    done = command(
        "train", "short.toml", "--task", "tasks.py:TwoTries", "--reward.functions", *functions, "--reward.weights",
        "0.5", "1", "2", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rewards(folder) == {"reward": 64, "brevity": 64, "exact": 64, "right": 64}
    row = metrics(folder)[0]
    assert row["reward/right"] == 2 * row["reward/exact"]
    assert row["reward/brevity"] == pytest.approx(-0.005 * row["response/length"])


def test_a_run_with_a_named_task_is_resumed_and_evaluated_from_the_command_line(folder):
    (folder / "waits.toml").write_text((folder / "short.toml").read_text() + '[task]\nname = "tasks.py:Waits"\n')
    started = start("train", "waits.toml", "--run.steps", "12", cwd=folder)
    file = folder / "runs/x/metrics.jsonl"
    while not (file.exists() and file.read_text().count("\n") >= 2):
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=120)[1]
    assert started.returncode == 130
    assert "continue with: solera train --resume runs/x" in said
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    lost = command("train", "--resume", "../runs/x", cwd=elsewhere)
    assert lost.returncode == 2
    assert f"there is no file tasks.py; the run was started in {folder}: run the command there" in lost.stderr
    done = command("train", "--resume", "runs/x", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [row["sync/version"] for row in metrics(folder) if "sync/version" in row] == [0] * 10 + [10] * 2
    done = command("eval", "embedded", "runs/x", "--problems", "5", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = command("eval", "embedded", "--task", "tasks.py:Flaky", "--problems", "20", cwd=folder)
    assert done.returncode == 2 and "Flaky.run raised ConnectionError" in done.stderr
    options = ["--collect.errors", "missing", "--json", "out.json"]
    done = command("eval", "embedded", "--task", "tasks.py:Flaky", "--problems", "20", *options, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--task", "tasks.py:TwoTrys"],
            "task.name: tasks.py:TwoTrys: TwoTrys does not exist; tasks in the file: TwoTries",
        ),
        (["--task", "env:tasks.py:Nope"], "Nope does not exist; environments in the file: Resets"),
        (["--task", "tasks.py:Resets"], "is an environment, not a task: write env:tasks.py:Resets"),
        (["--task", "tsaks.py:TwoTries"], "task.name: tsaks.py:TwoTries: there is no file tsaks.py"),
        (["--task", "nowhere.tasks:TwoTries"], "nowhere.tasks cannot be imported: ModuleNotFoundError"),
        (["--task", "tasks.py"], "file.py:Class"),
        (["--task", "tasks.py:"], "write your own task as file.py:Class"),
        (["--task", "own"], "file.py:Class"),
        (["--task", "tasks.py:brevity"], "task brevity: brevity(codec) raised TypeError"),
        (["--task", "tasks.py:TwoTries", "--task.level", "2"], "task.level is not used by tasks.py:TwoTries"),
        (["--task", "mixture", "--task.parts", "tasks.py:TwoTries"], "cannot be part of a mixture"),
        (["--task", "tasks.py:TwoTries", "--reward.functions", "gym"], "gym is the grader of tasks gym:NAME"),
        (["--collect.errors", "ignore"], "collect.errors"),
        (["--collect.errors", "1e13"], "as a reward it must be between -1e+12 and 1e+12"),
        (["--collect.retries", "-1"], "collect.retries is -1; it must be at least 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(folder, arguments, says):
    done = command("train", "short.toml", *arguments, cwd=folder)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert says in line
    assert not (folder / "runs").exists()


def test_an_error_in_an_environment_names_its_own_line(folder):
    source = "class Box:\n def reset(self):\n  raise RuntimeError('no boxes today')\n def reward(self): return 1.0\n"
    (folder / "box.py").write_text(source)
    done = command("train", "--task", "env:box.py:Box", "--model", "embedded_agent", cwd=folder)
    assert "raised RuntimeError: no boxes today (box.py, line 3)" in done.stderr


def test_a_wrong_value_in_a_file_is_named_with_its_line(folder):
    (folder / "bad.toml").write_text('[collect]\nerrors = "ignore"\n')
    done = command("train", "bad.toml", cwd=folder)
    assert "bad.toml:2: collect.errors is 'ignore' but must be one of stop, missing or a number" in done.stderr
    (folder / "bad.toml").write_text('[run]\nsteps = 3\n[task]\nname = "tasks.py:Nobody"\n')
    assert "bad.toml:4: task.name: tasks.py:Nobody" in command("train", "bad.toml", cwd=folder).stderr


class Synchronous(TwoTries):
    def run(self, prompt, generate):
        return solera.Rollout.of(prompt, generate(prompt.token_ids))


class NoMethods:
    def __init__(self, codec):
        pass


class TextPassed(TwoTries):
    async def run(self, prompt, generate):
        return solera.Rollout.of(prompt, await generate(prompt.data["prompt"]))


class PlainRewards(TwoTries):
    async def run(self, prompt, generate):
        return solera.Rollout.of(prompt, await generate(prompt.token_ids), rewards=(1.0,))


class NoRollout(TwoTries):
    async def run(self, prompt, generate):
        return 1.0


class NotAwaited(TwoTries):
    async def run(self, prompt, generate):
        return solera.Rollout.of(prompt, generate(prompt.token_ids))


class NoPrompt(TwoTries):
    def prompt(self, index):
        return f"{index}+1="


class NothingHeldOut(TwoTries):
    def held_out(self, count):
        return []


def length(rollout, row):
    return float(rollout.length)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"task": Synchronous}, "task: Synchronous: run must be asynchronous: write `async def run"),
        ({"task": functools.partial(Synchronous)}, "task Synchronous: run must be asynchronous"),
        ({"task": NoMethods}, r"task: NoMethods has no prompt\(index\) and no held_out\(count\) and no async run"),
        ({"task": lambda codec: None}, "task NoneType has no prompt"),
        ({"task": TwoTries(None)}, "takes the codec, not an instance: give the class itself, TwoTries"),
        ({"task": 3}, "task must be a class or a function that takes the codec, not an instance"),
        ({"task": lambda: None}, r"task <lambda>: <lambda>\(codec\) raised TypeError"),
        ({"task": TextPassed}, r"TextPassed.run: the input of generate is text; .*codec.encode\(text\)"),
        ({"task": PlainRewards}, r"rewards contains 1.0; each must be a solera.Reward, such as Reward\(1.0\)"),
        ({"task": NoRollout}, "run returned a float; it must return a solera.Rollout"),
        ({"task": NotAwaited}, r"turn 1 is a coroutine: write `await generate\(...\)`"),
        ({"task": NoPrompt}, r"task NoPrompt: prompt\(0\) returned text; it must return a solera.Prompt"),
        ({"task": NothingHeldOut}, r"held_out\(8\) returned no problem"),
        ({"task": "tasks.py:Nobody"}, "task.name: tasks.py:Nobody: there is no file tasks.py"),
        ({"task": "gsm9k"}, "task.name is 'gsm9k'; did you mean gsm8k"),
        ({"rewards": length}, r"rewards must be a list of functions or names, such as rewards=\[length\]"),
        ({"rewards": "exact"}, r"such as rewards=\['exact'\]"),
        ({"rewards": 1.0}, "rewards must be a list of functions or names"),
        ({"rewards": [1.0]}, "rewards contains a float; each must be a reward function or the name of one"),
        ({"rewards": ["exakt"]}, "'exakt' is not one of the graders .*; did you mean exact"),
        ({"objective": "gropo"}, "objective.name is 'gropo'.*did you mean grpo"),
        ({"objective": length}, r"not a function: wrap it in solera.custom_objective\(term\)"),
        ({"objective": 3}, "objective must be a name or the result of solera.custom_objective, not a int"),
        ({"rule": "evry"}, "sync.rule is 'evry' but must be one of every, never, adaptive"),
        ({"rule": 3}, r"rule must be a name or a function of \(state, version, diagnosis\), not a int"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_mistake_in_python_is_one_line(tmp_path, own, says):
    with pytest.raises(solera.SoleraError, match=says) as raised:
        solera.train(config(tmp_path), **own)
    assert "\n" not in str(raised.value)


def test_a_name_is_taken_wherever_an_object_is(tmp_path):
    """A run whose parts were named is the one whose config names them, and any command goes on with it."""
    named = solera.train(
        config(tmp_path / "a"), task="arithmetic", rewards=["exact", length],
        objective="rec_oneside_is", rule="never",
    )  # fmt: skip
    settings = override(config(tmp_path / "b"), "sync", rule="never")
    settings = replace(settings, objective=solera.ObjectiveConfig("rec_oneside_is"))
    settings = replace(settings, reward=solera.RewardConfig(functions=("exact",)))
    given = solera.train(settings, rewards=[length])
    wanted = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in given.metrics]
    assert [{k: v for k, v in row.items() if not k.startswith("time/")} for row in named.metrics] == wanted
    assert json.loads((named.folder / "own_code.json").read_text()) == ["rewards"]
    assert 'name = "rec_oneside_is"' in (named.folder / "config.toml").read_text()


def test_a_task_and_rewards_from_python_together(tmp_path):
    result = solera.train(config(tmp_path), task=TwoTries, rewards=[length, "exact"])
    rows = [row for row in result.metrics if "reward/length" in row]
    assert len(rows) == 6
    assert all(row["reward/length"] == pytest.approx(row["response/length"]) for row in rows)
    assert {"reward/reward", "reward/exact"} <= rows[0].keys()
    (result.folder / "model").rename(result.folder / "was_model")
    with pytest.raises(solera.SoleraError, match="your own code for task, rewards"):
        solera.resume(result.folder, task=TwoTries)
    with pytest.raises(solera.SoleraError, match=r"a name that was given differs from the run's config\.toml"):
        solera.resume(result.folder, task=TwoTries, rewards=[length, "exact"], objective="grpo")
