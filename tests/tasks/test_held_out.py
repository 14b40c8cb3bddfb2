"""Held-out prompts by their tokens; rows of files and sums are in tests/store/test_lines.py."""

import pytest

from solera.config import TaskConfig, resolve_task
from solera.tasks.countdown import Countdown, is_held_out
from solera.tasks.gym import Gym
from solera.tasks.held_out import HeldOut
from tests.tasks.parts import Letters


class Chatting(Letters):
    chats = True


class Trimming(Chatting):
    """Many a chat template takes a message without the space around it."""

    def chat_text(self, messages):
        return super().chat_text([message | {"content": message["content"].strip()} for message in messages])


@pytest.mark.parametrize("codec", [Letters(), Chatting()], ids=["text", "chat"])
@pytest.mark.parametrize("task", [TaskConfig("countdown"), TaskConfig("mixture", parts=("countdown", "arithmetic"))])
def test_countdown_is_told_from_its_tokens(codec, task):
    task = resolve_task(task)
    held_out = HeldOut(task, codec, 40, None)
    problems = Countdown(codec, 3, resolve_task(TaskConfig("countdown")).template, seed=5)
    assert all(held_out(prompt.token_ids) for prompt in problems.held_out(40))
    assert not any(held_out(problems.prompt(index).token_ids) for index in range(40))


def test_an_example_in_the_template_holds_nothing_out():
    codec = Letters()
    (example,) = Countdown(codec, 3, "{prompt}", seed=0).held_out(1)
    template = f"As in: {example.data['prompt']} Now: {{prompt}}"
    held_out = HeldOut(resolve_task(TaskConfig("countdown", template=template)), codec, 40, None)
    problems = Countdown(codec, 3, template, seed=0)
    assert not held_out(problems.prompt(0).token_ids)
    assert held_out(problems.held_out(2)[1].token_ids)


@pytest.mark.parametrize("codec", [Letters(), Trimming()], ids=["text", "chat"])
@pytest.mark.parametrize("task", [TaskConfig("gym:gcd"), TaskConfig("mixture", parts=("countdown", "gym:gcd"))])
def test_evaluated_problems_of_reasoning_gym_are_told_from_their_tokens(codec, task):
    """And no others: a hash of their text would refuse one in four of any."""
    template = resolve_task(TaskConfig("gym:gcd")).template
    problems = Gym("gcd", None, codec, template, seed=5)
    longest = sorted(len(prompt.token_ids) for prompt in problems.held_out(30))[15]
    held_out = HeldOut(resolve_task(task), codec, 30, longest)
    evaluated = Gym("gcd", None, codec, template, 7, longest).held_out(30)
    assert len(evaluated) == 30
    assert all(held_out(prompt.token_ids) for prompt in evaluated)
    assert not any(held_out(problems.prompt(index).token_ids) for index in range(60))
    assert not any(held_out(codec.encode(f"What is {number}?")) for number in range(60))


def test_countdown_has_as_many_held_out_problems_as_there_are():
    """Counted by hand: each pair of numbers, each operation both ways round, whole results from 1 to 990."""
    pairs = [(a, b) for a in range(1, 100) for b in range(a, 100)]
    results = {(a, b, t) for a, b in pairs for t in (a + b, b - a, a * b, *([b // a] if b % a == 0 else []))}
    problems = {f"{a} {b} = {t}" for a, b, t in results if 0 < t <= 990}
    held_out = {problem for problem in problems if is_held_out(problem)}
    task = Countdown(Letters(), 2, "{prompt}", seed=0)
    several = task.held_out(1488)
    assert {prompt.data["answer"] for prompt in several} == held_out
    assert len(several) == len(held_out) == 1487
    assert [prompt.key for prompt in several[:100]] == [prompt.key for prompt in task.held_out(100)]
