"""Text from token ids: the tokenizer's own, whichever way it is put together."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from solera.models import codec as codec_module
from solera.models.codec import TokenizerCodec

END = 260


@pytest.fixture
def byte_level() -> PreTrainedTokenizerFast:
    """Every single byte, a few merges, tokens that hold a space or letters no byte is written as, an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["Ġt", "he", "Ġthe", "ÃĤ"]
    vocabulary = {token: n for n, token in enumerate([*letters, *merged])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "Ĥ")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("two words"), AddedToken("日本")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def test_bytes_put_together_are_what_the_tokenizer_decodes(byte_level):
    """Also where they are no text: characters cut off, in the wrong order, or with bytes that none begins with."""
    codec, rng = TokenizerCodec(byte_level, (END,)), np.random.default_rng(0)
    assert byte_level.convert_tokens_to_ids("<end>") == END
    for length in rng.integers(0, 12, 5_000):
        ids = rng.integers(0, 266, length)  # three beyond the last token
        kept = ids[:-1] if length and ids[-1] == END else ids
        wanted = byte_level.backend_tokenizer.decode(kept.tolist(), skip_special_tokens=False)
        assert codec.decode(ids.astype(np.int32)) == wanted


def test_texts_come_back(byte_level):
    byte_level.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec = TokenizerCodec(byte_level, (END,))
    for text in (" the thé", "日本 two words 語<end>!", "½ € \n\t\0", ""):
        assert codec.decode(np.array(codec.encode(text), np.int32)) == text


def test_tokens_beyond_the_tokenizers_own_are_found_once(byte_level, monkeypatch):
    """A model may have some hundred more than its tokenizer: each is nothing, and none has all spelt again."""
    codec, spelt = TokenizerCodec(byte_level, (END,)), []
    monkeypatch.setattr(
        "solera.models.codec._bytes_of", lambda token, usual=codec_module._bytes_of: spelt.append(1) or usual(token)
    )
    assert codec.decode(np.zeros(0, np.int32)) == ""
    for beyond in range(300, 330):
        assert codec.decode(np.array([0, beyond], np.int32)) == codec.decode(np.array([0], np.int32))
    assert len(spelt) < 1000


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_many_texts_are_encoded_as_each_alone(byte_level, whole, padded, monkeypatch):
    """Also by a tokenizer that pads a batch to its longest text, and by one that adds tokens around a text."""
    monkeypatch.setattr(codec_module, "AT_ONCE", 7)
    fast = byte_level.backend_tokenizer
    fast.post_processor = processors.TemplateProcessing("<end> $A <end>", special_tokens=[("<end>", END)])
    if padded:
        fast.enable_padding(pad_id=3)
    codec, rng = TokenizerCodec(byte_level, (END,)), np.random.default_rng(0)
    texts = ["".join(rng.choice(list(" the日本<end>½"), length)) for length in (0, 1, 40, *rng.integers(0, 20, 30))]
    wanted = [tuple(fast.encode(text, add_special_tokens=whole).ids) for text in texts]
    assert codec.encode_each(texts, whole) == wanted
    assert (wanted[0] == (END, END)) == whole  # what is added is seen
    assert codec.encode_each([], whole) == []
