"""Attempts become counts: what passes, what is left out, which seed each has."""

import numpy as np
import pytest

from solera.errors import SoleraError
from solera.evaluate.accuracy import Evaluator
from solera.evaluate.attempts import Exam, attempt_seed, share_alike
from solera.records import Completion, Prompt, Reward, Rollout, Sampling
from solera.streams import stream_seed

HOT = Sampling(1.0, 8)


class Scripted:
    """Engine and task in one: attempt j at problem i gets the rewards written down for it, and takes 1 + i tokens."""

    def __init__(self, script):
        self.script = script
        self.seeds = {}

    @property
    def prompts(self):
        return [Prompt(f"problem/{i}", (5, i)) for i in range(len(self.script))]

    async def generate(self, token_ids, sampling, seed):
        i = token_ids[1]
        self.seeds.setdefault(i, []).append(seed)
        reason = "length" if i == 0 else "stop"
        return Completion(np.full(1 + i, 7, np.int32), np.zeros(1 + i, np.float32), ((1 + i, 0),), reason)

    async def run(self, prompt, generate):
        number = len(self.seeds.get(prompt.token_ids[1], []))
        completion = await generate(prompt.token_ids)
        rewards = self.script[prompt.token_ids[1]][number]
        return Rollout.of(prompt, completion, rewards=tuple(Reward(v, part=f"part{p}") for p, v in enumerate(rewards)))


def exam(script, threshold=0.5, max_rows=100):
    scripted = Scripted(script)
    return scripted, Exam(scripted, scripted, scripted.prompts, threshold, max_rows)


SCRIPT = [
    [(1.0,), (0.0,), (0.5,), (0.25, 0.5)],  # 0.5 reaches the threshold, and so does the sum of two parts
    [(), (0.25,), (), (1.0,)],  # two attempts without a reward
    [(), (), (), ()],
]


def test_attempts_are_counted_by_problem():
    _, three = exam(SCRIPT)
    found = three.attempt(HOT, 4)
    assert [(p.key, p.graded, p.passed, p.reward) for p in found.problems] == [
        ("problem/0", 4, 3, 2.25 / 4),
        ("problem/1", 2, 1, 0.625),
        ("problem/2", 0, 0, None),
    ]
    assert found.ungraded == 6
    assert found.rate_P() == [0.75, 0.5, None]
    assert found.pass_at_P(2) == [1.0, 1.0, None]  # 1 − C(1,2)/C(4,2), 1 − C(1,2)/C(2,2)
    assert found.pass_at_P(3) == [1.0, None, None]
    assert (found.truncated, found.length) == (4 / 12, (4 * 1 + 4 * 2 + 4 * 3) / 12)
    assert found.alike == 4 / 12


def test_the_threshold_decides_what_passes():
    assert [p.passed for p in exam(SCRIPT, threshold=0.75)[1].attempt(HOT, 4).problems] == [2, 1, 0]
    assert [p.passed for p in exam(SCRIPT, threshold=0.0)[1].attempt(HOT, 4).problems] == [4, 2, 0]


def test_turns_hold_whole_problems_and_change_nothing():
    made = []
    _, wide = exam(SCRIPT)
    _, narrow = exam(SCRIPT, max_rows=9)
    assert narrow.attempt(HOT, 4, advance=made.append) == wide.attempt(HOT, 4)
    assert made == [8, 4]


def test_every_attempt_has_a_seed_of_its_own_and_the_first_keeps_it():
    once, exam_once = exam(SCRIPT)
    often, exam_often = exam(SCRIPT)
    exam_once.attempt(HOT)
    exam_often.attempt(HOT, 4)
    assert [seeds[0] for seeds in often.seeds.values()] == [seeds[0] for seeds in once.seeds.values()]
    assert [seeds[0] for seeds in once.seeds.values()] == [stream_seed(i) for i in range(3)]
    assert len({seed for seeds in often.seeds.values() for seed in seeds}) == 12
    assert attempt_seed(1, 0, 0) not in {attempt_seed(0, i, g) for i in range(1000) for g in range(4)}


def test_an_exam_that_nobody_graded_is_refused():
    with pytest.raises(SoleraError, match="graded none of its held-out problems"):
        exam([[()], [()]])[1].attempt(HOT)


def test_metrics_of_one_attempt_a_problem():
    metrics = Evaluator(exam([[(1.0,)], [(0.25,)], [()], [(0.0,)]])[1], HOT, 1, every=0).evaluate()
    scale = 1 + 3.8416 / 3
    half = 1.96 * np.sqrt(1 / 3 * 2 / 3 / 3 + 3.8416 / 36)
    assert metrics == pytest.approx(
        {
            "eval/pass@1": 1 / 3,
            "eval/pass@1_low": (1 / 3 + 3.8416 / 6 - half) / scale,
            "eval/pass@1_high": (1 / 3 + 3.8416 / 6 + half) / scale,
            "eval/reward": 1.25 / 3,
            "eval/alike": 1 / 4,
            "eval/ungraded": 1,
        }
    )


def test_metrics_of_several_attempts_a_problem():
    """Shares 1, ½, 0, ½: s² = ½/3, as of 4·¼/s² = 6 yes-or-no outcomes. Wilson's interval is then ½ ± z/2/√(6 + z²).
    Solved at least once: three of four."""
    script = [[(1.0,), (1.0,)], [(0.0,), (1.0,)], [(0.0,), (0.0,)], [(1.0,), (0.0,)]]
    half = 0.98 / np.sqrt(6 + 3.8416)
    assert Evaluator(exam(script)[1], HOT, 2, every=0).evaluate() == pytest.approx(
        {
            "eval/pass@1": 0.5,
            "eval/pass@1_low": 0.5 - half,
            "eval/pass@1_high": 0.5 + half,
            "eval/reward": 0.5,
            "eval/alike": 2 / 8,
            "eval/pass@2": 3 / 4,
        }
    )


def test_responses_are_alike_whatever_was_asked():
    def answered(question, *answer):
        written = Completion(np.array(answer, np.int32), np.zeros(len(answer), np.float32), ((len(answer), 0),), "stop")
        return Rollout.of(Prompt(f"problem/{question}", (5, question)), written)

    assert share_alike([answered(1, 7, 2), answered(2, 7, 2), answered(3, 7), answered(7, 2)]) == 2 / 4
    assert share_alike([answered(1, 7, 2), answered(2, 7, 2)]) == 1
