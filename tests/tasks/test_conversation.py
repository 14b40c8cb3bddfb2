"""Conversations keep the exact tokens, whatever the chat template does to the history."""

import asyncio
from random import Random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from solera.engines.in_process import InProcessEngine
from solera.errors import SoleraError
from solera.models.language_model import LanguageModel
from solera.records import Completion, EpisodeFacts, Prompt, Reward, Sampling, Segment, Sequence, Span
from solera.store.encoding import decode, encode
from solera.tasks.conversation import Conversation, Limits
from solera.tasks.episodes import attempt_all
from solera.tasks.tools import Result
from solera.training.supply import Outcomes
from tests.tasks.chatting import TEMPLATES, TOOLS, check, codec_of, converse, small_tokenizer

ASK = [{"role": "user", "content": "What is 17 * 23?"}]
THOUGHT = "<think>\nhm\n</think>\n\n391"


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_sampled_tokens_are_trained_on_exactly_or_in_another_sequence(name, kind):
    template = TEMPLATES[name]
    codec = codec_of(small_tokenizer(template, kind), template)
    sequences = []
    for seed in range(60):
        rollout, author, shown = converse(Random(seed), codec, template)
        check(rollout, author, shown, codec.tokenizer)
        sequences.append((len(rollout.sequences), len(author.asked)))
    assert any(turns > 1 == several for several, turns in sequences)  # continued
    assert any(several > 1 for several, _ in sequences) == template.rewrites


class Scripted:
    """Returns given texts one after the other, ended by the end token unless they end with a backslash."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts, self.given = tokenizer, list(texts), []

    async def __call__(self, token_ids, *, max_tokens=None, stop=(), temperature=None, room=None):
        self.given.append(token_ids)
        text = self.texts.pop(0)
        ids = self.tokenizer.encode(text.removesuffix("\\"), add_special_tokens=False)
        ids += [] if text.endswith("\\") else [self.tokenizer.eos_token_id]
        reason = "length" if text.endswith("\\") else "stop"
        ids = ids[:room]
        logp_T = np.zeros(len(ids), np.float32)
        return Completion(np.array(ids, np.int32), logp_T, ((len(ids), 0),), reason, trained=temperature != 0)


def chat(name: str, *texts: str, messages=ASK, **settings):
    template = TEMPLATES[name]
    tokenizer = small_tokenizer(template)
    script = Scripted(tokenizer, *texts)
    return Conversation(codec_of(tokenizer, template), script, messages, **settings), script, tokenizer


def seen(script: Scripted, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in script.given]


def test_the_text_in_between_is_the_templates(tmp_path):
    """By hand from Qwen 2.5's template: a turn that ended by itself, and one that was cut off and is closed."""
    talk, script, tokenizer = chat("qwen2_5", "391", "no\\", "yes", messages=[{"role": "system", "content": "S"}, *ASK])

    async def run():
        for answer in ("right?", "sure?"):
            await talk.say()
            talk.add({"role": "user", "content": answer})
        await talk.say()

    asyncio.run(run())
    start = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhat is 17 * 23?<|im_end|>\n<|im_start|>assistant\n"
    second = start + "391<|im_end|>\n<|im_start|>user\nright?<|im_end|>\n<|im_start|>assistant\n"
    third = second + "no<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert seen(script, tokenizer) == [start, second, third]
    rollout = talk.rollout(Prompt("p", script.given[0]), Reward(1.0))
    assert rollout.facts == EpisodeFacts(turns=3, ending="done")
    (sequence,) = rollout.sequences
    assert [tokenizer.decode(sequence.token_ids_T[a:b]) for a, b, _ in sequence.spans] == [
        "391<|im_end|>", "no", "yes<|im_end|>",
    ]  # fmt: skip
    assert rollout.finish_reason == "stop"


def test_stripped_reasoning_starts_another_sequence():
    """Qwen 3 shows earlier reasoning while tools are called, and drops it at the next question."""
    talk, script, tokenizer = chat("qwen3", THOUGHT, THOUGHT, "so", tools=TOOLS)

    async def run():
        await talk.say()
        talk.add({"role": "tool", "content": "391"})
        await talk.say()
        talk.add({"role": "user", "content": "sure?"})
        await talk.say()

    asyncio.run(run())
    first, second, third = seen(script, tokenizer)
    assert second.startswith(first + THOUGHT + "<|im_end|>\n<|im_start|>user\n<tool_response>\n391")
    assert "<think>" not in third.partition("<|im_start|>assistant")[2]
    rollout = talk.rollout(Prompt("p", script.given[0]), Reward(1.0))
    assert [len(sequence.spans) for sequence in rollout.sequences] == [2, 1]
    assert rollout.facts.retokenised == 2 * (len(tokenizer.encode(THOUGHT)) + 1)
    outcomes = Outcomes()
    outcomes.count([rollout], 1)
    metrics = outcomes.take()
    assert (metrics["rollout/sequences"], metrics["turns/mean"]) == (2, 3)
    assert metrics["tokens/retokenised"] == rollout.facts.retokenised
    assert outcomes.take() == {}


async def out_of_tokens(talk: Conversation) -> None:
    talk.add({"role": "user", "content": "sure? " * 50})
    assert await talk.say() is None and talk.ended == "tokens"


async def greedy(talk: Conversation) -> None:
    talk.add({"role": "user", "content": "sure?"})
    assert await talk.say(temperature=0) is not None


@pytest.mark.parametrize("go_on", [out_of_tokens, greedy])
def test_a_reward_is_for_the_last_trained_turn_of_any_sequence(go_on):
    """Qwen 3's template begins a second sequence, in which nothing is trained on."""
    talk, script, tokenizer = chat("qwen3", "391", THOUGHT, "yes", limits=Limits(tokens=200))

    async def run():
        await talk.say()
        talk.add({"role": "tool", "content": "391"})
        await talk.say()
        await go_on(talk)
        return talk.reward(2.0, "late")

    found = asyncio.run(run())
    trained = sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in ("391", THOUGHT))
    assert found == Reward(2.0, "late", position=trained - 1, sequence=0)
    assert talk.rollout(Prompt("p", script.given[0]), found).sequences[0].length == trained


def test_a_sequence_without_an_answer_has_no_number():
    talk, script, tokenizer = chat("qwen3", THOUGHT, "yes")

    async def run():
        await talk.say()
        talk.add({"role": "user", "content": "sure?"})
        talk._generate = refuse
        with pytest.raises(OSError):
            await talk.say()
        talk.add({"role": "user", "content": "really?"})
        talk._generate = script
        await talk.say()
        return talk.reward(1.0)

    async def refuse(*_, **__):
        raise OSError

    found = asyncio.run(run())
    assert (found.position, found.sequence) == (len(tokenizer.encode("yes")), 1)
    assert len(talk.rollout(Prompt("p", script.given[0]), found).sequences) == 2


def test_without_a_trained_turn_there_is_nothing_to_reward():
    talk, _, _ = chat("qwen3", "391")
    with pytest.raises(SoleraError, match="no turn so far is trained on"):
        talk.reward(1.0)
    asyncio.run(talk.say(temperature=0))
    with pytest.raises(SoleraError, match="no turn so far is trained on"):
        talk.reward(1.0)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_the_tokens_that_transformers_makes(name, kind):
    tokenizer = small_tokenizer(TEMPLATES[name], kind)
    messages = [{"role": "system", "content": "Be  brief. "}, *ASK]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec_of(tokenizer, TEMPLATES[name]).chat(messages) == tuple(wanted)


def test_arguments_of_the_template_are_passed_on():
    template = TEMPLATES["qwen3"]
    codec = codec_of(small_tokenizer(template), template)
    plain = codec.chat_text(ASK)
    assert codec.chat_text(ASK, enable_thinking=False) == plain + "<think>\n\n</think>\n\n"
    assert "# Tools" in codec.chat_text(ASK, TOOLS) and "# Tools" not in plain
    assert codec.chat(ASK, TOOLS) == codec.encode_after((), codec.chat_text(ASK, TOOLS))
    assert codec.chat_text(ASK, add_generation_prompt=False) == plain.removesuffix("<|im_start|>assistant\n")
    talk, script, tokenizer = chat("qwen3", "a", enable_thinking=False)
    asyncio.run(talk.say())
    assert seen(script, tokenizer)[0].endswith("</think>\n\n")
    with pytest.raises(SoleraError, match="the conversation is refused by the model's chat template: Conv"):
        asyncio.run(chat("gemma3", "a", messages=[{"role": "assistant", "content": "a"}])[0].say())
    with pytest.raises(SoleraError, match="a chat message must be a dictionary with a role"):
        chat("gemma3", "a", messages=["hello"])


def exhaust(talk: Conversation) -> int:
    async def run() -> int:
        turns = 0
        while await talk.say() is not None:
            turns += 1
            talk.add({"role": "user", "content": "again"})
            await asyncio.sleep(0.02)
        return turns

    return asyncio.run(run())


def test_limits_end_a_conversation():
    talk, script, _ = chat("smollm2", *["yes"] * 9, limits=Limits(turns=3))
    assert exhaust(talk) == 3
    assert talk.rollout(Prompt("p", script.given[0])).facts.ending == "turns"
    talk, script, _ = chat("smollm2", *["yes"] * 99, limits=Limits(seconds=0.1))
    assert 2 <= exhaust(talk) < 9
    assert talk.ended == "seconds"
    talk, script, _ = chat("smollm2", *["a" * 40] * 9, limits=Limits(tokens=100))
    first = len(talk.codec.chat(ASK))
    assert first < 100
    exhaust(talk)
    assert talk.ended == "tokens"
    (sequence,) = talk.rollout(Prompt("p", script.given[0])).sequences
    assert sequence.spans[-1].stop <= 100 < len(talk.codec.chat(talk.messages))
    with pytest.raises(SoleraError, match="Limits: turns is 0; it must be above 0"):
        Limits(turns=0)


def test_a_full_context_ends_it():
    talk, script, tokenizer = chat("smollm2", "yes", "\\")
    yes = len(tokenizer.encode("yes"))
    assert exhaust(talk) == 1
    rollout = talk.rollout(Prompt("p", script.given[0]))
    assert (rollout.facts.ending, rollout.finish_reason, rollout.length) == ("context", "length", 1 + yes)


@pytest.mark.parametrize("name", TEMPLATES)
def test_behaviour_logp_is_that_of_a_forward_pass_over_the_whole_conversation(name):
    template = TEMPLATES[name]
    tokenizer = small_tokenizer(template)
    codec = codec_of(tokenizer, template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        head_dim=16, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    module = LlamaForCausalLM(config).eval()
    engine = InProcessEngine(LanguageModel(module), codec.end_token_ids, 64, torch.float32, spell=codec.decode)

    class Chatting:
        async def run(self, prompt, generate):
            talk = Conversation(codec, generate, ASK)
            await talk.say(max_tokens=6)
            talk.add({"role": "user", "content": "<think>"})
            await talk.say(temperature=0, max_tokens=4)
            talk.add({"role": "user", "content": "  日本 "})
            await talk.say(temperature=0.7, stop="e")
            return talk.rollout(prompt, Reward(1.0))

    made = attempt_all(Chatting(), engine, [(Prompt("p", codec.chat(ASK)), n) for n in range(8)], Sampling(1.0, 12))
    for rollout in made:
        assert sum(len(sequence.spans) for sequence in rollout.sequences) == 2
        for sequence in rollout.sequences:
            with torch.no_grad():
                logits = module(input_ids=torch.tensor(sequence.token_ids_T[None].astype(np.int64))).logits[0]
            for number, (start, stop, _) in enumerate(sequence.spans):
                warm = sequence.temperatures[number] if sequence.temperatures else rollout.sampling.temperature
                logp = torch.log_softmax(logits[start - 1 : stop - 1].float() / warm, -1)
                wanted = logp.gather(1, torch.tensor(sequence.token_ids_T[start:stop, None].astype(np.int64)))[:, 0]
                np.testing.assert_allclose(sequence.behaviour_logp_T[start:stop], wanted.numpy(), atol=2e-4)


def test_it_is_recorded_who_wrote_which_tokens():
    talk, _, tokenizer = chat("qwen2_5", "call", "again", "well", "done")
    prompt = Prompt("p", talk.codec.chat(ASK))

    async def run():
        await talk.say()
        talk.count_calls([Result("1", False, 0.1), Result("error: no", True, 0.1)])
        talk.add({"role": "tool", "content": "1"}, {"role": "tool", "content": "error: no"})
        await talk.say()
        talk.count_calls([Result("2", False, 0.1)])  # a template without tools: the result is a user message
        talk.add({"role": "user", "content": "<tool_response>2</tool_response>"})
        await talk.say()
        talk.add({"role": "user", "content": "Sure?"})
        await talk.say()
        return talk.rollout(prompt, Reward(1.0))

    (sequence,) = asyncio.run(run()).sequences
    authors = [(author, calls, failed) for author, _, calls, failed in sequence.segments]
    assert authors == [
        ("prompt", 0, 0), ("policy", 0, 0), ("tool", 2, 1), ("policy", 0, 0), ("tool", 1, 0), ("policy", 0, 0),
        ("environment", 0, 0), ("policy", 0, 0),
    ]  # fmt: skip
    ends = np.cumsum([segment.tokens for segment in sequence.segments]).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    assert [bounds[place] for place in (1, 3, 5, 7)] == [span[:2] for span in sequence.spans]
    assert "<tool_response>2</tool_response>" in tokenizer.decode(sequence.token_ids_T[slice(*bounds[4])])


def test_temperatures_of_spans_are_stored():
    ids, spans = np.arange(9, dtype=np.int32), (Span(2, 4, 0), Span(6, 9, 1))
    logp = np.full(5, -0.5, np.float32)
    warm, plain = Sequence(ids, spans, logp, (1.0, 0.3)), Sequence(ids, spans, logp)
    for several in ((warm,), (plain, warm), (plain,)):
        found = decode(encode(several))
        assert [each.temperatures for each in found] == [each.temperatures for each in several]
        assert all(np.array_equal(a.span_logp, logp) and a.spans == spans for a in found)
    assert encode((plain,))[0] == 1  # as before
    told = Sequence(
        ids, spans, logp, (1.0, 0.3), (Segment("prompt", 2), Segment("policy", 2), Segment("tool", 5, 3, 1))
    )
    back = decode(encode((plain, told, warm)))
    assert [each.segments for each in back] == [None, told.segments, None]
    assert [each.temperatures for each in back] == [None, (1.0, 0.3), (1.0, 0.3)]
    for damage in (encode((told,))[:-3], encode((told,)) + b"1"):
        with pytest.raises(SoleraError, match="damaged sequence data"):
            decode(damage)
    with pytest.raises(SoleraError, match="its segments do not add up to its 9 tokens"):
        Sequence(ids, spans, logp, None, (Segment("prompt", 8),))
    with pytest.raises(SoleraError, match="sequence: 1 temperatures for 2 spans"):
        Sequence(ids, spans, logp, (1.0,))
