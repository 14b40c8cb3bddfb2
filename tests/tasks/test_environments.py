"""Environments: TRL's interface, Gymnasium's, and mistakes in them."""

import asyncio
import json
import random
import sys
import threading
import time
import types
from functools import partial

import pytest

from solera.config import TaskConfig, resolve_task
from solera.errors import SoleraError
from solera.records import Reward
from solera.tasks.conversation import Limits
from solera.tasks.environments import EnvironmentTask, tools_of
from solera.tasks.own import load_task, make_task
from solera.tasks.textarena_games import Game
from tests.tasks.chatting import TEMPLATES, codec_of, small_tokenizer
from tests.tasks.test_conversation import Scripted


class Counter:
    """The interface of TRL's `environment_factory`: it samples its own problem, and scores itself."""

    def reset(self, **kwargs) -> str:
        self.value, self.target = 0, random.randint(1, 1000)
        return f"Count to {self.target}."

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def add(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        self.value += step
        return self.value

    def _hidden(self) -> None: ...


def task_of(environment, name: str = "qwen2_5", **settings) -> tuple[EnvironmentTask, object]:
    template = TEMPLATES[name]
    tokenizer = small_tokenizer(template)
    return EnvironmentTask(codec_of(tokenizer, template), environment, **settings), tokenizer


def call(**arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"


def test_public_methods_are_tools_and_the_environment_scores_itself():
    task, tokenizer = task_of(Counter)
    assert [tool.__name__ for tool in tools_of(Counter())] == ["add"]
    prompt = task.prompt(3)
    target = int(prompt.data["messages"][0]["content"].split()[-1].rstrip("."))
    for last, reward in ((target - 2, 1.0), (target, 0.0)):
        script = Scripted(tokenizer, call(step=1) + call(step=1), call(step=last), "Done.")
        rollout = asyncio.run(task.run(prompt, script))
        assert (rollout.reward, rollout.facts.calls, rollout.facts.turns) == (reward, 3, 3)
        shown = tokenizer.decode(script.given[1])
        assert shown.index("<tool_response>\n1\n") < shown.index("<tool_response>\n2\n")  # one after the other
        assert script.given[0] == prompt.token_ids


def test_members_of_a_group_get_the_same_problem_and_other_random_numbers_go_on():
    task, _ = task_of(Counter)
    random.seed(5)
    wanted = [random.random() for _ in range(3)]
    random.seed(5)
    found, texts = [], set()
    for index in range(3):
        texts.add(task.prompt(index).data["messages"][0]["content"])
        found.append(random.random())
    assert found == wanted and len(texts) == 3
    assert task.prompt(1) == task.prompt(1)
    assert not {p.key for p in task.held_out(20)} & {task.prompt(n).key for n in range(50)}


class OfRow(Counter):
    limits = Limits(turns=2)
    system = "Be brief."

    def reset(self, row):
        self.value, self.target = 0, row["target"]

    def reward(self) -> float:
        return 0.5

    get_reward = None


@pytest.mark.parametrize("whole", [True, False])
def test_rows(whole):
    class Named(Counter):
        def reset(self, target, **kwargs):
            self.value, self.target = 0, target
            return f" Really {kwargs['hint']}!"

    rows = [{"prompt": f"Reach {n}.", "target": n, "hint": "h"} for n in range(64)]
    task, tokenizer = task_of(OfRow if whole else Named, rows=rows)
    held = {prompt.data["target"] for prompt in task.held_out(64)}
    seen = [task.prompt(index).data["target"] for index in range(2 * (64 - len(held)))]
    assert 0 < len(held) < 20 and not held & set(seen)
    assert sorted(seen) == sorted([*set(seen)] * 2) and seen[: len(seen) // 2] != seen[len(seen) // 2 :]
    prompt = task.prompt(0)
    text = f"Reach {prompt.data['target']}."
    assert prompt.data["messages"][-1]["content"] == (text if whole else text + " Really h!")
    script = Scripted(tokenizer, *[call(step=prompt.data["target"])] * 10)
    rollout = asyncio.run(task.run(prompt, script))
    if whole:
        assert prompt.data["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (rollout.reward, rollout.facts.ending, rollout.facts.turns) == (0.5, "turns", 2)
    with pytest.raises(SoleraError, match="1 rows are too few to hold some out"):
        task_of(Counter, rows=rows[:1])


def test_a_prompt_does_not_take_longer_if_there_are_more_rows():
    def seconds(count: int) -> float:
        task, _ = task_of(OfRow, rows=[{"prompt": "Go.", "target": n} for n in range(count)])
        start = time.process_time()
        for index in range(200):
            task.prompt(index)
        return time.process_time() - start

    assert seconds(40_000) < max(8 * seconds(500), 0.5)  # with a shuffle for each prompt, over 2 seconds


def test_the_order_of_rows_is_that_of_earlier_versions():
    task, _ = task_of(OfRow, rows=[{"prompt": "Go.", "target": n} for n in range(40)])
    held = {prompt.data["target"] for prompt in task.held_out(40)}
    for epoch in range(2):
        order = [n for n in range(40) if n not in held]
        random.Random(epoch).shuffle(order)
        count = len(order)
        assert [task.prompt(epoch * count + n).data["target"] for n in range(count)] == order


def test_rows_from_a_file(tmp_path):
    """Columns may have any name, and a split `test` is what is held out."""
    source = tmp_path / "envs.py"
    source.write_text(
        "class Sum:\n def reset(self, row):\n  self.row = row\n  return str(row['messages'])\n"
        " def reward(self): return float(self.row['key'])\n"
    )
    template = TEMPLATES["qwen2_5"]
    tokenizer = small_tokenizer(template)
    rows = [{"key": n, "messages": f"m{n}", "number": -1} for n in range(40)]
    file, folder = tmp_path / "rows.jsonl", tmp_path / "split"
    folder.mkdir()
    for path, part in ((file, rows), (folder / "train.jsonl", rows[:30]), (folder / "test.jsonl", rows[30:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    tasks = [
        make_task(load_task(f"env:{source}:Sum", str(path)), codec_of(tokenizer, template)) for path in (file, folder)
    ]
    for task in tasks:
        prompt, script = task.prompt(2), Scripted(tokenizer, "Hi.")
        rollout = asyncio.run(task.run(prompt, script))
        assert (prompt.data["messages"], prompt.data["number"]) == (f"m{prompt.data['key']}", -1)
        assert script.given == [prompt.token_ids] and f"m{prompt.data['key']}<" in tokenizer.decode(prompt.token_ids)
        assert rollout.reward == prompt.data["key"]
    assert sorted(prompt.data["key"] for prompt in tasks[1].held_out(99)) == list(range(30, 40))
    assert sorted(tasks[1].prompt(n).data["key"] for n in range(30)) == list(range(30))
    held = {prompt.data["key"] for prompt in tasks[0].held_out(99)}
    assert held and not held & {tasks[0].prompt(n).data["key"] for n in range(80)}
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(SoleraError, match=r"rows\.jsonl:2: not JSON"):
        load_task(f"env:{source}:Sum", str(file))
    with pytest.raises(SoleraError, match=r"nowhere\.jsonl: cannot be read"):
        load_task(f"env:{source}:Sum", str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(SoleraError, match=r"task\.path is not used by t\.py:T"):
        resolve_task(TaskConfig("t.py:T", path="x.jsonl"))
    assert resolve_task(TaskConfig("env:t.py:T", path="x.jsonl")).path == "x.jsonl"


class Guess:
    """Gymnasium's interface: every turn is an action."""

    def reset(self, seed=None, options=None):
        self.number, self.tries = seed % 10, 0
        return "Guess a digit.", {}

    def step(self, action):
        self.tries += 1
        right = action == str(self.number)
        hint = "right" if right else "higher" if action < str(self.number) else "lower"
        return hint, 1.0 if right else -0.1, right, self.tries == 3, {}


def test_gymnasium():
    task, tokenizer = task_of(Guess)
    prompt = task.prompt(7)
    script = Scripted(tokenizer, "5", "9", "7", "0")
    rollout = asyncio.run(task.run(prompt, script))
    assert [m["content"] for m in prompt.data["messages"]] == ["Guess a digit."]
    assert "higher" in tokenizer.decode(script.given[1]) and "lower" in tokenizer.decode(script.given[2])
    ends = [span.stop - 1 for span in rollout.sequences[0].spans]
    policy = [n for n, mask in enumerate(rollout.sequences[0].mask_T) if mask]
    assert rollout.rewards == tuple(
        Reward(value, f"turn_{n}", position=policy.index(end), sequence=0)
        for n, (value, end) in enumerate(zip((-0.1, -0.1, 1.0), ends, strict=True), 1)
    )
    assert rollout.reward == pytest.approx(0.8) and rollout.facts.turns == 3
    script = Scripted(tokenizer, *["1"] * 5)
    assert asyncio.run(task.run(prompt, script)).facts.turns == 3


class Halves:
    """Its texts hold halves of surrogate pairs."""

    def reset(self):
        return "Go \ud83d"

    def step(self, action):
        return "on \udc00", 0.0, False, False, {}


def test_half_a_surrogate_pair_in_an_observation_does_not_end_the_episode():
    task, tokenizer = task_of(Halves)
    prompt = task.prompt(0)
    script = Scripted(tokenizer, *["a"] * 10)
    asyncio.run(task.run(prompt, script))
    assert "Go ?" in tokenizer.decode(script.given[0]) and "on ?" in tokenizer.decode(script.given[1])


class SlowStep:
    timeout = 0.3

    def reset(self):
        return "Go."

    async def step(self, action):
        await asyncio.sleep(20)


class SlowStepInThread(SlowStep):
    def step(self, action):
        time.sleep(3)


class SlowReward(SlowStep):
    step = None

    async def get_reward(self):
        await asyncio.sleep(20)


@pytest.mark.parametrize(
    ("environment", "method"), [(SlowStep, "step"), (SlowStepInThread, "step"), (SlowReward, "get_reward")]
)
def test_a_method_that_takes_longer_than_the_timeout_ends_the_episode(environment, method):
    task, tokenizer = task_of(environment)
    prompt = task.prompt(0)
    began = time.monotonic()
    said = f"environment {environment.__name__}: {method} took longer than timeout = 0.3 s"
    with pytest.raises(SoleraError, match=said):
        asyncio.run(task.run(prompt, Scripted(tokenizer, "a")))
    assert time.monotonic() - began < 10


class Asynchronous(Counter):
    async def get_reward(self):
        await asyncio.sleep(0)
        return 0.25


def test_asynchronous_methods_are_awaited():
    task, tokenizer = task_of(Asynchronous)
    assert asyncio.run(task.run(task.prompt(0), Scripted(tokenizer, "Hi."))).reward == 0.25


class Draws:
    """A game as TextArena has them: it draws from Python's global random numbers."""

    rewards = None

    def __init__(self) -> None:
        self.state = self

    def reset(self, num_players, seed):
        self.board = [random.random() for _ in range(5000)]

    def step(self, action):
        self.board = [random.random() for _ in range(5000)]
        return False, {}

    def get_observation(self):
        return 0, [(0, str(sum(self.board)), "board")]


def test_a_game_that_begins_while_another_makes_a_step_is_the_same_as_alone(monkeypatch):
    textarena = types.SimpleNamespace(
        make=lambda name: Draws(), ObservationType=types.SimpleNamespace(PLAYER_ACTION="act")
    )
    monkeypatch.setitem(sys.modules, "textarena", textarena)
    task, _ = task_of(partial(Game, "Draws-v0"))
    alone, (other, _), ended = task._begin(7)[1], task._begin(1), threading.Event()

    def steps():
        while not ended.is_set():
            other.step("x")

    stepping = threading.Thread(target=steps)
    stepping.start()
    began = [task._begin(7)[1] for _ in range(100)]
    ended.set()
    stepping.join()
    assert began == [alone] * 100


class Holding(Counter):
    """It holds something from `reset` on, which `close` frees."""

    held = 0
    fails = False

    def reset(self, **kwargs) -> str:
        Holding.held += 1
        return super().reset()

    def get_reward(self) -> float:
        if self.fails:
            raise ConnectionError("down")
        return 1.0

    def close(self) -> None:
        Holding.held -= 1


class HoldingSteps(Holding):
    get_reward = None

    def step(self, action):
        if self.fails:
            raise ConnectionError("down")
        return "", 1.0, True, False, {}


class Door(Counter):
    def close(self, what: str) -> str:
        """
        Close something.

        Args:
            what: What to close.
        """
        return f"{what} is closed"


@pytest.mark.parametrize("environment", [Holding, HoldingSteps])
def test_an_environment_is_closed_at_the_end_of_an_episode_also_of_one_that_fails(environment, monkeypatch):
    task, tokenizer = task_of(environment)
    prompt = task.prompt(0)
    assert Holding.held == 0 and "close" not in [tool.__name__ for tool in tools_of(environment())]

    class Watching(Scripted):
        async def __call__(self, *arguments, **more):
            assert Holding.held == 1
            return await super().__call__(*arguments, **more)

    assert asyncio.run(task.run(prompt, Watching(tokenizer, "Hi."))).reward == 1 and Holding.held == 0
    monkeypatch.setattr(Holding, "fails", True)
    with pytest.raises(ConnectionError, match="down"):
        asyncio.run(task.run(prompt, Watching(tokenizer, "Hi.")))
    assert Holding.held == 0


def test_a_close_with_parameters_is_a_tool():
    task, tokenizer = task_of(Door)
    assert [tool.__name__ for tool in tools_of(Door())] == ["add", "close"]
    script = Scripted(tokenizer, call(what="The door").replace('"add"', '"close"'), "Done.")
    asyncio.run(task.run(task.prompt(0), script))
    assert "The door is closed" in tokenizer.decode(script.given[1])


class Raising(Counter):
    def get_reward(self):
        raise ConnectionError("down")


class Wordy(Counter):
    def get_reward(self):
        return "good"


def test_mistakes(tmp_path):
    task, tokenizer = task_of(Raising)
    with pytest.raises(ConnectionError, match="down"):
        asyncio.run(task.run(task.prompt(0), Scripted(tokenizer, "Hi.")))
    task, tokenizer = task_of(Wordy)
    with pytest.raises(SoleraError, match="environment Wordy: its reward is text: 'good'; it must be a number"):
        asyncio.run(task.run(task.prompt(0), Scripted(tokenizer, "Hi.")))

    class Empty: ...

    class Unscored:
        def reset(self): ...

    class Silent(Counter):
        def reset(self): ...

    class ClosesLate(Counter):
        async def close(self): ...

    for environment, complaint in (
        (Empty, "environment Empty has no method reset"), (Unscored, "has no method reward"),
        (ClosesLate, "environment ClosesLate: close must not be asynchronous"),
    ):  # fmt: skip
        with pytest.raises(SoleraError, match=complaint):
            task_of(environment)
    with pytest.raises(SoleraError, match="reset returned nothing, and there is no column prompt"):
        task_of(Silent)[0].prompt(0)
    file = tmp_path / "envs.py"
    file.write_text("import random\n" + "class Mine:\n def reset(self): return 'Go.'\n def reward(self): return 1.0\n")
    template = TEMPLATES["smollm2"]
    made = make_task(load_task(f"env:{file}:Mine"), codec_of(small_tokenizer(template), template))
    assert made.prompt(0).key == "Mine/0"
    with pytest.raises(SoleraError, match=r"task.name: env:.*: Yours does not exist"):
        load_task(f"env:{file}:Yours")
    with pytest.raises(SoleraError, match=r"there is no file nowhere\.py"):
        load_task("env:nowhere.py:Mine")
