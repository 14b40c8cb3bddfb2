"""A sequence classifier as a reward: the values are those of the model alone, one text at a time."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from solera.errors import SoleraError
from solera.models.classifier import Classifier
from tests.tasks.chatting import TEMPLATES, small_tokenizer

TEXTS = ["yes", "no, not at all", "maybe. " * 9, "yes", ""]


def saved(folder, labels: int, chats: bool):
    tokenizer = small_tokenizer(TEMPLATES["qwen2_5"])
    if not chats:
        tokenizer.chat_template = None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, num_labels=labels, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id, id2label={n: f"L{n}" for n in range(labels)},
        label2id={f"L{n}": n for n in range(labels)},
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("labels", [1, 3])
@torch.no_grad()
def test_values_are_those_of_each_text_alone(tmp_path, labels, chats):
    model, tokenizer = saved(tmp_path, labels, chats)
    reward = Classifier(str(tmp_path), None if labels == 1 else "L2", batch=2)
    prompts = ["How?"] * 4 + [[{"role": "user", "content": "How?"}]]
    found = reward(prompts, [*TEXTS[:4], [{"role": "assistant", "content": TEXTS[4]}]])
    for text, value in zip(TEXTS, found, strict=True):
        said = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": text}]
        whole = tokenizer.apply_chat_template(said, tokenize=False) if chats else "How?" + text
        ids = tokenizer.encode(whole, add_special_tokens=False) if chats else [
            *tokenizer.encode("How?", add_special_tokens=False), *tokenizer.encode(text, add_special_tokens=False)
        ]  # fmt: skip
        # The last token that is not padding decides; the end token is the padding here, so it is taken off.
        while ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        logits = model(torch.tensor([ids])).logits[0]
        assert value == pytest.approx((logits[0] if labels == 1 else logits.softmax(-1)[2]).item(), abs=1e-5)
    figures = reward.take_metrics()
    assert figures.pop("classifier/seconds") > 0 and figures == {"classifier/texts": 4, "classifier/cached": 1}
    assert reward(["How?"], ["yes"]) == found[:1] and reward.take_metrics()["classifier/cached"] == 1


def test_mistakes(tmp_path):
    saved(tmp_path / "m", 3, True)
    with pytest.raises(SoleraError, match=r"label is None; it must be one of L0, L1, L2, or its number"):
        Classifier(str(tmp_path / "m"))(["a"], ["b"])
    with pytest.raises(SoleraError, match="label is 'good'"):
        Classifier(str(tmp_path / "m"), "good")(["a"], ["b"])
    with pytest.raises(SoleraError, match="cannot be loaded"):
        Classifier(str(tmp_path / "nowhere"))(["a"], ["b"])
