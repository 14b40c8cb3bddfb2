"""Requests of the OpenAI protocol, as environments of verifiers make them, become conversations with exact tokens."""

import asyncio
import json
from itertools import count
from types import SimpleNamespace

import pytest

from solera.errors import SoleraError
from solera.records import Prompt, Reward
from solera.tasks.tool_calls import format_of
from solera.tasks.verifiers_talk import Talk
from solera.tasks.verifiers_task import MOST, PYTHON, VerifiersTask
from solera.tasks.verifiers_worker import Stage, tasks_of
from tests.tasks.chatting import TEMPLATES, TOOLS, codec_of, small_tokenizer
from tests.tasks.test_conversation import Scripted

CALLS = {
    "hermes": 'So:\n<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
    "text": 'So:\n<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
    "llama": '{"name":"add","parameters":{"a":1,"b":2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]',
}


def talked(name: str, texts: list[str], after: list[list[dict]], tools=TOOLS):
    """A conversation in which the environment sends back what it was given, with its own messages after it."""
    template = TEMPLATES[name]
    tokenizer = small_tokenizer(template)
    codec = codec_of(tokenizer, template)
    script = Scripted(tokenizer, *texts)
    talk = Talk(codec, format_of(codec), script)

    async def run() -> list[dict]:
        messages, given = [{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}], []
        for added in [*after, []]:
            given.append(await talk.answer({"messages": messages, "tools": tools}))
            said = json.loads(json.dumps(given[-1]["message"]))  # an SDK adds and removes empty fields
            messages = [*messages, {**said, "content": said["content"] or None, "refusal": None}, *added]
        return given

    given = asyncio.run(run())
    return given, talk.chat.rollout(Prompt("p", script.given[0]), Reward(1.0)), script, tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "gemma3", "smollm2"])
def test_a_call_and_its_result(name):
    """The policy's tokens are trained on as they were sampled; where the template does not rewrite, in one sequence."""
    template = TEMPLATES[name]
    calls = CALLS[template.calls or "text"]
    result = [{"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}]
    given, rollout, script, tokenizer = talked(name, [calls, "It is 3."], [result])
    (call,) = given[0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert given[0]["message"]["content"] == ("So:" if "So:" in calls else "") and len(call["id"]) == 9
    assert given[0]["finish_reason"] == "tool_calls" and given[1]["finish_reason"] == "stop"
    assert given[1]["message"] == {"role": "assistant", "content": "It is 3."}
    spans = [
        (tuple(sequence.token_ids_T[:start].tolist()), tokenizer.decode(sequence.token_ids_T[start:stop]))
        for sequence in rollout.sequences for start, stop, _ in sequence.spans
    ]  # fmt: skip
    end = tokenizer.eos_token
    assert spans == [(script.given[0], calls + end), (script.given[1], f"It is 3.{end}")]
    assert "3" in tokenizer.decode(script.given[1]).split(calls)[-1]
    if not template.rewrites:
        assert len(rollout.sequences) == 1


def test_a_call_that_cannot_be_read_and_a_turn_that_is_cut_off_are_text():
    broken = "<tool_call>{'name'</tool_call>"
    given, rollout, _, _ = talked(
        "qwen2_5", [broken, CALLS["hermes"] + "\\"], [[{"role": "user", "content": "Again."}]]
    )
    assert given[0]["message"] == {"role": "assistant", "content": broken} and given[0]["finish_reason"] == "stop"
    assert "tool_calls" not in given[1]["message"] and given[1]["finish_reason"] == "length"
    assert len(rollout.sequences) == 1 and rollout.facts.turns == 2


def test_a_history_that_the_environment_changes_starts_another_sequence():
    """It replaces what the policy said. The tokens that were sampled stay what is trained on."""
    template = TEMPLATES["qwen2_5"]
    tokenizer = small_tokenizer(template)
    codec = codec_of(tokenizer, template)
    script = Scripted(tokenizer, "one", "two")
    talk = Talk(codec, format_of(codec), script)
    ask = {"role": "user", "content": "Count."}

    async def run() -> None:
        await talk.answer({"messages": [ask]})
        await talk.answer({"messages": [ask, {"role": "assistant", "content": "Blocked"}, ask]})

    asyncio.run(run())
    rollout = talk.chat.rollout(Prompt("p", script.given[0]), Reward(1.0))
    texts = [tokenizer.decode(sequence.token_ids_T) for sequence in rollout.sequences]
    assert len(texts) == 2 and texts[0].endswith("one<|im_end|>")
    assert "Blocked" in texts[1] and "one" not in texts[1] and texts[1].endswith("two<|im_end|>")


def test_half_a_surrogate_pair_in_a_message_is_shown_as_a_question_mark():
    codec = codec_of(small_tokenizer(TEMPLATES["qwen2_5"]), TEMPLATES["qwen2_5"])
    script = Scripted(codec.tokenizer, "x")
    asyncio.run(Talk(codec, format_of(codec), script).answer({"messages": [{"role": "user", "content": "Hi \ud83d"}]}))
    assert "Hi ?" in codec.tokenizer.decode(script.given[0])


class Declared:
    """A set of tasks that says whether it is endless, as those of verifiers do."""

    def __init__(self, endless: bool) -> None:
        self.INFINITE = endless

    def __iter__(self):
        return count() if self.INFINITE else iter(range(1500))


class Undeclared:
    def __iter__(self):
        return count()


@pytest.mark.parametrize(
    ("tasks", "used"),
    [([*range(1500)], 1500), (Declared(False), 1500), (Declared(True), 1000), (Undeclared(), 1000), (range(3), 3)],
)
def test_only_an_endless_set_of_tasks_is_cut(tasks, used):
    environment = SimpleNamespace(taskset=tasks)
    assert tasks_of(environment, MOST) == Stage(environment, MOST, print).tasks == [*range(used)]


def test_pictures_and_a_missing_package_are_refused_in_one_line(monkeypatch, tmp_path):
    codec = codec_of(small_tokenizer(TEMPLATES["qwen2_5"]), TEMPLATES["qwen2_5"])
    talk = Talk(codec, format_of(codec), Scripted(codec.tokenizer, "x"))
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(SoleraError, match="something other than text"):
        asyncio.run(talk.answer({"messages": [picture]}))
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    with pytest.raises(SoleraError, match=f"No such file.*: set {PYTHON}"):
        VerifiersTask("glossary", None, codec)
