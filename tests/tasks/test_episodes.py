"""Episodes: what a task may make of the engine's text, and what a failure costs."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from solera.config import ObjectiveConfig
from solera.engines.in_process import InProcessEngine
from solera.errors import BadRequestError, SoleraError, StopRunError
from solera.models import loading
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import Completion, PolicyVersion, Prompt, Reward, Rollout, Sampling, Sequence, Span
from solera.store.ledger import Ledger
from solera.tasks.episodes import Episode, Failed, Guard, attempt, attempt_all
from solera.training.collation import collate
from solera.training.supply import LockStep

SAMPLING = Sampling(1.0, 4)
PROMPT = Prompt("p/0", (2, 3))

NOW = PolicyVersion("test", 0)


class Counted:
    """An engine whose tokens tell the number of the request, and that remembers the seeds."""

    def __init__(self):
        self.seeds = []

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.seeds.append(seed)
        number = len(self.seeds)
        ids, logp = np.array([10 * number, 10 * number + 1], np.int32), np.array([-0.5, -number], np.float32)
        return Completion(ids, logp, ((1, 3), (1, 4)), "stop", "me", sampling)


def run(episode, guard: Guard | None = None, engine=None):
    class Task:
        async def run(self, prompt, generate):
            return await episode(prompt, generate)

    return asyncio.run(attempt(Task(), engine or Counted(), PROMPT, SAMPLING, 5, guard or Guard()))


def ids_of(completion: Completion) -> tuple[int, ...]:
    return tuple(completion.token_ids_T.tolist())


@pytest.mark.parametrize("order", [("bad", "slow"), ("slow", "bad"), ("slow", "slow", "bad", "good")])
def test_the_first_failure_ends_all_episodes_at_once(order):
    class Task:
        async def run(self, prompt, generate):
            if prompt.key == "slow":
                await asyncio.sleep(20)
                raise RuntimeError("the slow one")
            if prompt.key == "bad":
                raise ValueError("the first one")
            return Rollout.of(prompt, await generate(prompt.token_ids), rewards=(Reward(1.0),))

    began = time.monotonic()
    with pytest.raises(ValueError, match="the first one"):
        attempt_all(Task(), Counted(), [(Prompt(key, (1,)), 0) for key in order], SAMPLING)
    assert time.monotonic() - began < 10


def test_no_episodes_at_all():
    assert attempt_all(None, Counted(), [], SAMPLING) == []


def test_a_rewritten_history_is_checked_in_quadratic_time():
    """Every turn begins another sequence of all text so far, as for a template that strips earlier reasoning."""

    def seconds(turns: int) -> float:
        episode, text, sequences = Episode(None, PROMPT, SAMPLING, 0), PROMPT.token_ids, []
        for _ in range(turns):
            written = Completion(np.arange(100, dtype=np.int32), np.zeros(100, np.float32), ((100, 0),), "stop", "me")
            given = (*text, *range(5, 105))
            episode.turns.append((given, written))
            sequences.append((given, written))
            text = (*given, *ids_of(written))
        rollout = Rollout.of_sequences(PROMPT, *sequences, rewards=(Reward(1.0),))
        start = time.process_time()
        assert episode.checked(rollout) is rollout
        return time.process_time() - start

    assert seconds(160) < max(32 * seconds(40), 0.5)  # quadratic is 16 times, cubic 64 times and over 2 seconds


async def two_turns(prompt, generate):
    first = await generate(prompt.token_ids)
    second = await generate((*prompt.token_ids, *ids_of(first), 7))
    return first, second


async def both(prompt, generate):
    first, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, first, (7,), second, rewards=(Reward(1.0),))


async def only_the_first(prompt, generate):
    first, _ = await two_turns(prompt, generate)
    return Rollout.of(prompt, first)


async def only_the_last(prompt, generate):
    first, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, (*ids_of(first), 7), second)


async def as_two_sequences(prompt, generate):
    first, second = await two_turns(prompt, generate)
    given = (*prompt.token_ids, *ids_of(first), 7)
    sequences = (Sequence.turns((prompt.token_ids, first)), Sequence.turns((given, second)))
    return Rollout(prompt.key, sequences, (), "me")


async def with_text_after_it(prompt, generate):
    first, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, first, (7,), second, (8, 9))


async def another_authors(prompt, generate):
    return Rollout(prompt.key, (Sequence(np.array([2, 3, 4]), (Span(2, 3, 0),), None),), origin="human")


@pytest.mark.parametrize(
    "episode", [both, only_the_first, only_the_last, as_two_sequences, with_text_after_it, another_authors]
)
def test_a_rollout_of_what_was_given_and_written_is_taken(episode):
    assert isinstance(run(episode), Rollout)


async def other_text_between(prompt, generate):
    first, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, first, (8,), second)


async def without_the_first_turn(prompt, generate):
    _, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, second)


async def without_the_text_between(prompt, generate):
    first, second = await two_turns(prompt, generate)
    return Rollout.of(prompt, first, second)


async def another_prompt(prompt, generate):
    return Rollout.of(replace(prompt, token_ids=(2, 4)), await generate(prompt.token_ids))


async def longer_prompt(prompt, generate):
    return Rollout.of(prompt, (5,), await generate(prompt.token_ids))


async def another_token(prompt, generate):
    written = await generate(prompt.token_ids)
    return Rollout.of(prompt, replace(written, token_ids_T=written.token_ids_T + 1))


async def cut_short(prompt, generate):
    written = await generate(prompt.token_ids)
    return Rollout.of(
        prompt, Completion(written.token_ids_T[:1], written.behaviour_logp_T[:1], ((1, 3),), "stop", "me")
    )


async def other_probabilities(prompt, generate):
    written = await generate(prompt.token_ids)
    return Rollout.of(prompt, replace(written, behaviour_logp_T=written.behaviour_logp_T - 1))


async def other_versions(prompt, generate):
    written = await generate(prompt.token_ids)
    return Rollout.of(prompt, replace(written, versions=((2, 3),)))


async def never_written(prompt, generate):
    return Rollout.of(prompt, Completion([5], [-1.0], ((1, 3),), "stop", "me"))


async def says_it_wrote_what_was_given(prompt, generate):
    first, _ = await two_turns(prompt, generate)
    ids = np.array([*prompt.token_ids, *ids_of(first), 7], np.int32)
    logp = np.append(first.behaviour_logp_T, np.float32(-1))
    return Rollout(prompt.key, (Sequence(ids, (Span(2, 3, 3), Span(3, 4, 4), Span(4, 5, 4)), logp),), (), "me")


async def says_it_wrote_a_token_earlier(prompt, generate):
    written = await generate(prompt.token_ids)
    ids = np.array([*prompt.token_ids, *ids_of(written)], np.int32)
    return Rollout(prompt.key, (Sequence(ids, (Span(1, 2, 3), Span(2, 3, 4)), written.behaviour_logp_T),), (), "me")


@pytest.mark.parametrize(
    "episode",
    [
        other_text_between, without_the_first_turn, without_the_text_between, another_prompt, longer_prompt,
        another_token, cut_short, other_probabilities, other_versions, never_written, says_it_wrote_what_was_given,
        says_it_wrote_a_token_earlier,
    ],
)  # fmt: skip
def test_a_rollout_of_something_else_is_refused(episode):
    with pytest.raises(SoleraError, match=r"^prompt 'p/0': the rollout does not match what the engine received"):
        run(episode)


def test_the_first_token_that_differs_is_named():
    with pytest.raises(SoleraError, match=r"token 4 of the rollout is 8, the engine had 7"):
        run(other_text_between)


async def nothing(prompt, generate):
    await generate(prompt.token_ids)


async def of_another_key(prompt, generate):
    return Rollout.of(replace(prompt, key="other"), await generate(prompt.token_ids))


async def text(prompt, generate):
    await generate("12+34=")


async def no_tokens(prompt, generate):
    await generate(())


@pytest.mark.parametrize(
    ("episode", "complaint"),
    [
        (nothing, "run returned a NoneType; it must return a solera.Rollout"),
        (of_another_key, "a rollout of another prompt, 'other'"),
        (text, r"the input of generate is text; .* codec.encode\(text\)"),
        (no_tokens, "the input of generate is empty"),
    ],
)
def test_mistakes_of_a_task_are_one_line(episode, complaint):
    with pytest.raises(SoleraError, match=complaint):
        run(episode)


@pytest.mark.parametrize("kind", [list, np.array])
def test_generate_takes_any_run_of_whole_numbers(kind):
    async def episode(prompt, generate):
        return Rollout.of(prompt, await generate(kind(prompt.token_ids)))

    assert run(episode).sequences[0].token_ids_T.tolist() == [2, 3, 10, 11]


class Failing:
    """Raises in the episodes of the prompts that `fails` names, after a turn, `times` times each."""

    def __init__(self, fails, times=10**6):
        self.fails, self.times = fails, times
        self.seen = {}

    def prompt(self, index):
        return Prompt(f"p/{index}", (2, 3 + index % 5))

    async def run(self, prompt, generate):
        first = await generate(prompt.token_ids)
        number = self.seen[prompt.key] = self.seen.get(prompt.key, -1) + 1
        if self.fails(prompt.key, number) and self.times:
            self.times -= 1
            raise ValueError("the tool is down")
        return Rollout.of(prompt, first, rewards=(Reward(float(number % 2)),))


@pytest.fixture
def engine():
    model, codec = loading.load("embedded", torch.device("cpu"))
    return InProcessEngine(model, codec.end_token_ids, 1024, torch.float32)


def collected(tmp_path, engine, task, guard, prompts=4):
    store = Ledger(tmp_path / "store.db")
    supply = LockStep(
        task, engine, store, sampling=SAMPLING, group_size=4, reserve=0, seed=0, guard=guard
    )  # fmt: skip
    supply.wait(prompts, NOW)
    return store.draw(prompts, 4), supply


def test_a_failing_episode_costs_one_episode(tmp_path, engine):
    """Its group is drawn with the others and learned from without it; nobody else writes anything else."""
    said = []
    guard = Guard("missing", say=said.append)
    groups, supply = collected(tmp_path, engine, Failing(lambda key, n: (key, n) == ("p/1", 2)), guard)
    assert supply.take_metrics()["episodes/failed"] == 1
    assert "episodes/failed" not in supply.take_metrics()
    (line,) = said
    assert line.startswith("an episode failed: prompt 'p/1': ValueError: the tool is down; it has no reward")
    (tmp_path / "whole").mkdir()
    others, _ = collected(tmp_path / "whole", engine, Failing(lambda key, n: False), Guard())
    for group, other in zip(groups, others, strict=True):
        for number, (rollout, same) in enumerate(zip(group.rollouts, other.rollouts, strict=True)):
            if (group.prompt_key, number) == ("p/1", 2):
                assert rollout.length == 0
            else:
                assert rollout.sequences[0].token_ids_T.tolist() == same.sequences[0].token_ids_T.tolist()
    batch = collate(groups, compose(resolve(ObjectiveConfig("reinforce"))), now=0, lineage="", seed=0)
    assert len(batch.rollouts) == 15 and len(batch.uses) == 16
    # Group p/1 is compared as (0, 1, 1): the mean is 2/3, so that its advantages are −2/3, 1/3, 1/3.
    assert batch.reward_B[batch.group_B == 1].tolist() == [0, 1, 1]
    assert batch.advantage_B[batch.group_B == 1].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    assert batch.metrics["reward/mean"] == pytest.approx(8 / 15)


def test_a_failing_episode_may_have_a_fixed_reward_for_what_it_wrote(tmp_path, engine):
    task, guard = Failing(lambda key, n: (key, n) == ("p/1", 2)), Guard(-0.5)
    groups, _ = collected(tmp_path, engine, task, guard)
    failed = groups[1].rollouts[2]
    assert failed.rewards == (Reward(-0.5, "failed", "collect.errors"),)
    assert failed.length > 0
    batch = collate(groups, compose(resolve(ObjectiveConfig("reinforce"))), now=0, lineage="", seed=0)
    assert batch.reward_B[batch.group_B == 1].tolist() == [0, 1, -0.5, 1]


def test_the_history_of_an_episode_that_fails_late_is_kept():
    async def episode(prompt, generate):
        await two_turns(prompt, generate)
        raise ValueError

    failed = run(episode, Guard(2.0))
    assert failed.tokens == 4
    (sequence,) = failed.rollout.sequences
    assert sequence.token_ids_T.tolist() == [2, 3, 10, 11, 7, 20, 21]
    assert sequence.spans == (Span(2, 3, 3), Span(3, 4, 4), Span(5, 6, 3), Span(6, 7, 4))
    assert (failed.rollout.lineage, failed.rollout.reward) == ("me", 2.0)


def test_an_episode_that_fails_before_its_first_turn_has_an_empty_response():
    async def episode(prompt, generate):
        raise ValueError

    for guard in (Guard("missing"), Guard(1.0)):
        member = run(episode, guard).member()
        assert (member.length, member.prompt_key, len(member.rewards)) == (0, "p/0", 1)


def test_a_retry_has_random_numbers_of_its_own(tmp_path, engine):
    """The first try is what it was, and so is every other episode; a second try writes something else."""
    task = Failing(lambda key, n: key == "p/1", times=3)
    groups, supply = collected(tmp_path, engine, task, Guard("stop", retries=3))
    assert "episodes/failed" not in supply.take_metrics()
    (tmp_path / "whole").mkdir()
    others, _ = collected(tmp_path / "whole", engine, Failing(lambda key, n: False), Guard())
    texts = [[r.sequences[0].token_ids_T.tolist() for g in some for r in g.rollouts] for some in (groups, others)]
    assert [a == b for a, b in zip(*texts, strict=True)].count(False) <= 3
    engine = Counted()

    async def twice(prompt, generate):
        await two_turns(prompt, generate)
        if len(engine.seeds) < 6:
            raise ValueError
        return await only_the_first(prompt, generate)

    run(twice, Guard("stop", retries=2), engine)
    assert engine.seeds[0] == 5
    assert len(set(engine.seeds)) == len(engine.seeds) == 8


def test_retries_end():
    async def episode(prompt, generate):
        tried.append(1)
        raise ValueError("again")

    tried = []
    with pytest.raises(ValueError, match="again"):
        run(episode, Guard("stop", retries=2))
    assert len(tried) == 3
    assert isinstance(run(episode, Guard("missing", retries=1)), Failed)
    assert len(tried) == 5


def test_where_a_whole_batch_fails_the_run_stops(tmp_path, engine):
    for errors in ("missing", 0.0):
        with pytest.raises(ValueError, match="the tool is down"):
            collected(tmp_path, engine, Failing(lambda key, n: True), Guard(errors))


def test_a_prompt_whose_episodes_all_fail_does_not_stop_the_run(tmp_path, engine):
    task = Failing(lambda key, n: key in ("p/1", "p/4", "p/6"))
    groups, supply = collected(tmp_path, engine, task, Guard("missing"))
    assert [sum(rollout.length > 0 for rollout in group.rollouts) for group in groups] == [4, 0, 4, 4]
    for _ in range(6):  # one group at a time, as where a batch is topped up
        supply.store.draw(9, 4)
        supply.wait(supply.position + 1, NOW)
    assert supply.take_metrics()["episodes/failed"] == 12


def test_failures_of_the_engine_and_of_reward_functions_stop_the_run():
    """Neither is one episode's failure, even where the task has caught it."""

    class Broken:
        async def generate(self, token_ids, sampling, seed):
            raise MemoryError("full")

    async def hides_it(prompt, generate):
        try:
            await generate(prompt.token_ids)
        except MemoryError:
            raise ValueError("no answer") from None

    for episode in (both, hides_it):
        with pytest.raises(MemoryError, match="full"):
            run(episode, Guard("missing", retries=2), Broken())

    async def ungradable(prompt, generate):
        raise StopRunError("reward rewards.py:f raised")

    with pytest.raises(StopRunError):
        run(ungradable, Guard("missing", retries=2))


def test_a_text_that_the_model_cannot_read_fails_alone(engine):
    class Task:
        async def run(self, prompt, generate):
            return Rollout.of(prompt, await generate((*prompt.token_ids, prompt.data["further"])), rewards=())

    async def run_(prompt, generate):
        ids = (*prompt.token_ids, prompt.data["further"])
        return Rollout.of(Prompt(prompt.key, ids), await generate(ids))

    task = Task()
    task.run = run_
    prompts = [Prompt(f"p/{n}", (2, 3), {"further": n}) for n in (4, 10**6, -1, 5)]
    attempted = attempt_all(task, engine, [(p, n) for n, p in enumerate(prompts)], SAMPLING, None, Guard("missing"))
    assert [isinstance(each, Failed) for each in attempted] == [False, True, True, False]
    assert isinstance(attempted[1].error, BadRequestError)
    assert "token id 1000000 is not one of the model's" in str(attempted[1].error)


def test_an_episode_that_never_sees_that_its_context_is_full_ends(engine):
    async def endless(prompt, generate):
        ids = prompt.token_ids
        while True:
            completion = await generate(ids)
            ids = (*ids, *ids_of(completion), 5)

    with pytest.raises(SoleraError, match="the context is full, and generate was called 100 times since"):
        run(endless, engine=engine)
