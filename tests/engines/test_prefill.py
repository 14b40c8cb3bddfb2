"""Passes of prompts: where each token is computed and kept, and what padding adds."""

import numpy as np
import pytest
import torch

from solera.engines import continuous
from solera.engines.continuous import ContinuousDecoder
from solera.engines.decoding import decode
from solera.engines.kv_cache import Places, Prefilling
from solera.engines.pages import NOBODY
from solera.engines.prefill import Pass, size_of, tiles_of
from solera.engines.prompts import Stretch
from solera.models.attention import PackedTexts
from solera.models.tiling import largest_size
from tests.conftest import END
from tests.engines.test_continuous import SAMPLING, assert_same, requests, written

PAGE = 4


def stretch(length: int, first_token: int, pages: list[int]) -> Stretch:
    return Stretch(np.arange(first_token, first_token + length), pages)


def a_pass() -> Pass:
    """A prompt of six tokens with responses of three and five, one of no tokens with a response of two, and one of
    four. Responses may have more pages than they need yet."""
    groups = [
        (stretch(6, 10, [9, 2]), [stretch(3, 20, [5]), stretch(5, 30, [7, 4, 8])]),
        (stretch(0, 0, []), [stretch(2, 40, [6, 3])]),
        (stretch(4, 50, [1]), []),
    ]
    return Pass.of(groups, PAGE)


def test_every_token_has_its_position_page_and_place():
    made = a_pass()
    token, position, page, at = made.line_4N.tolist()
    assert token == [*range(10, 16), *range(20, 23), *range(30, 35), 40, 41, *range(50, 54)]
    assert position == [*range(6), 6, 7, 8, 6, 7, 8, 9, 10, 0, 1, *range(4)]
    assert page == [9, 9, 9, 9, 2, 2, 5, 5, 5, 7, 7, 7, 7, 4, 6, 6, 1, 1, 1, 1]
    assert at == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 0, 1, 2, 3]
    assert [tuple(text) for text in made.texts] == [
        (0, 6, 0, 0), (6, 3, 0, 6), (9, 5, 0, 6), (14, 0, 0, 0), (14, 2, 0, 0), (16, 4, 0, 0),
    ]  # fmt: skip
    assert made.tokens == 20


def test_a_padded_pass_ends_with_short_texts_whose_keys_nobody_reads():
    made = a_pass()
    padded = made.padded(256)
    assert padded.tokens == 256
    assert np.array_equal(padded.line_4N[:, :20], made.line_4N)
    assert padded.texts[: len(made.texts)] == made.texts
    added = padded.texts[len(made.texts) :]
    assert [(text.start, text.length) for text in added] == [(20, 64), (84, 64), (148, 64), (212, 44)]
    assert not any(text.prefix_length for text in added)
    token, position, page, at = padded.line_4N[:, 20:]
    assert not token.any() and not position.any() and not at.any()
    assert set(page.tolist()) == {NOBODY}
    assert made.padded(20).texts == made.texts


def test_few_sizes_of_passes():
    sizes = sorted({size_of(tokens) for tokens in range(1, 16_385)})
    assert sizes == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384]
    assert all(size_of(tokens) >= tokens for tokens in range(1, 16_385))
    assert [largest_size(size_of, limit) for limit in (255, 256, 4095, 4096, 16_384)] == [0, 256, 3072, 4096, 16_384]


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [([60] * 32, True), ([17] * 110, True), ([1] * 120, True), ([500] * 30, True), ([1] * 300, False)],
)
def test_only_many_short_texts_need_more_tiles_than_a_pass_has(lengths, fits):
    groups = [(stretch(length, 0, list(range(1, 130))), []) for length in lengths]
    size = size_of(sum(lengths))
    texts = PackedTexts.of(Pass.of(groups, PAGE).padded(size).texts).padded(tiles_of(size))
    assert (texts is not None) == fits
    if texts is not None:
        assert len(texts.query_tiles) == len(texts.key_tiles) == tiles_of(size)


class Padding(ContinuousDecoder):
    """Pads every pass, as before a graph."""

    def _fill(self, groups) -> None:
        texts = Pass.of(groups, self.pages.tokens)
        texts = texts.padded(size_of(texts.tokens))
        token, position, page, at = texts.line_4N
        self._compute(token, position, Prefilling(PackedTexts.of(texts.texts), Places(*map(self._sent, (page, at)))))


def test_padded_passes_give_the_same_responses(tiny, monkeypatch):
    monkeypatch.setattr("solera.engines.pages.PAGE", 4)
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 30)
    prompts, seeds = requests()
    expected = decode(tiny.copy(torch.float32), prompts, seeds, SAMPLING, (END,))
    decoder = Padding(tiny.copy(torch.float32).with_plans(), (END,), 16)
    assert_same(written(decoder, prompts, seeds, SAMPLING), expected)
    for key, value in decoder.pages.pools:
        assert key[NOBODY, 0].any() and value[NOBODY, 0].any()
        assert not key[NOBODY, 1:].any() and not value[NOBODY, 1:].any()
