"""The environment of the agent demo: what is in the boxes, and how the model that comes with it begins."""

import asyncio
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from solera.engines.in_process import InProcessEngine
from solera.models import loading
from solera.records import Completion, Sampling
from solera.tasks.boxes import Boxes, OneTurn, draw_trail
from solera.tasks.episodes import attempt_all


@pytest.fixture(scope="module")
def loaded():
    return loading.load("embedded_agent", torch.device("cpu"))


def test_only_the_last_box_of_a_trail_holds_its_code():
    lengths = Counter()
    for seed in range(300):
        trail = draw_trail(Random(seed), held_out=False)
        opened, said = [], trail.start
        while said.split()[-2] == "box":
            opened.append(int(said.split()[-1]))
            said = trail.contents[opened[-1]]
        assert (tuple(opened), said) == (trail.boxes, trail.code)
        assert trail.contents.count(trail.code) == 1 and not trail.held_out
        lengths[len(opened)] += 1
    assert set(lengths) == {1, 2, 3} and min(lengths.values()) > 60


class Script:
    """Writes given texts."""

    def __init__(self, codec, *texts: str) -> None:
        self.codec, self.texts = codec, list(texts)

    async def __call__(self, token_ids, **settings):
        ids = [*self.codec.encode(self.texts.pop(0)), *self.codec.end_token_ids[:1]]
        return Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), ((len(ids), 0),), "stop")


def call(box: object) -> str:
    return f'<tool_call>{{"name": "open", "arguments": {{"box": {box}}}}}</tool_call>'


def test_the_code_is_rewarded_and_a_call_that_fails_is_told(loaded):
    codec = loaded[1]
    task = Boxes(codec)
    prompt = next(p for p in map(task.prompt, range(99)) if p.key.count("-") == 1)
    boxes, code = prompt.key.split("/")[1].split("-"), prompt.key.split("/")[2]
    for last, reward in ((f"code {code}", 1.0), ("code 7", 0.0), (f"code {code} ", 0.0)):
        script = Script(codec, call(boxes[0]), call("x"), call(boxes[1]), last)
        rollout = asyncio.run(task.run(prompt, script))
        assert (rollout.reward, rollout.facts.calls, rollout.facts.errors) == (reward, 3, 1)
        assert len(rollout.sequences) == 1
        text = codec.decode(rollout.sequences[0].token_ids_T)
        assert f"<tool>see box {boxes[1]}<assistant>" in text and "<tool>error: the call is not valid JSON" in text
        assert f"<tool>code {code}<assistant>" in text
    assert asyncio.run(OneTurn(codec).run(prompt, Script(codec, call(boxes[0])))).facts.ending == "turns"


def test_the_model_begins_with_some_success_and_one_turn_has_none_to_speak_of(loaded):
    """What a training run needs: most calls are valid, and some episodes of several turns succeed. In one turn, a
    guess is right once in 90 times."""
    model, codec = loaded
    engine = InProcessEngine(model, codec.end_token_ids, 512, torch.float32, spell=codec.decode)
    found = {}
    for task in (Boxes(codec), OneTurn(codec)):
        attempts = [(prompt, number) for number, prompt in enumerate(task.held_out(512))]
        made = attempt_all(task, engine, attempts, Sampling(1.0, 16))
        found[type(task)] = np.mean([rollout.reward for rollout in made])
        calls, errors = (sum(getattr(r.facts, name) for r in made) for name in ("calls", "errors"))
        assert calls > 100 and errors < 0.05 * calls
    assert 0.04 < found[Boxes] < 0.14
    assert found[OneTurn] < 0.035  # 1/90 and five standard errors
