"""Texts that lie in one row are computed as if each stood alone, a shared prefix once, gradients included."""

import pytest
import torch

from solera.models.attention import PackedTexts, Text, filler
from solera.models.tiling import TILE
from tests.conftest import VOCABULARY


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(2, VOCABULARY, (5,), generator=generator)
    tails = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in (3, 1, 6)]
    return prefix, tails


def packed_hidden(model, prefix, tails):
    alone = torch.arange(2, 6)  # a text without a prefix, before the others
    ids = torch.cat([alone, prefix, *tails])
    position = torch.cat([torch.arange(4), torch.arange(5), *(torch.arange(5, 5 + len(tail)) for tail in tails)])
    plan, place = [Text(0, 4), Text(4, 5)], 9
    for tail in tails:
        plan.append(Text(place, len(tail), 4, 5))
        place += len(tail)
    return alone, model.hidden(ids[None], position[None], plan=PackedTexts.of(plan))[0]


def test_hidden_states_and_gradient_are_those_of_each_text_alone(tiny, texts):
    prefix, tails = texts
    plain, planned = tiny.copy(torch.float64), tiny.copy(torch.float64).with_plans()
    for model in (plain, planned):
        model.module.requires_grad_(True)
    alone, packed = packed_hidden(planned, prefix, tails)

    def whole(ids):
        return plain.hidden(ids[None], torch.arange(len(ids))[None])[0]

    expected = torch.cat([whole(alone), whole(prefix), *(whole(torch.cat([prefix, tail]))[5:] for tail in tails)])
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (packed * weight).sum().backward()
    (expected * weight).sum().backward()
    for (name, ours), theirs in zip(planned.parameters().items(), plain.parameters().values(), strict=True):
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() < 1e-6 * theirs.grad.norm(), name  # norms are taken in float32


def test_a_copy_with_plans_leaves_the_original_as_it_was(tiny):
    planned = tiny.copy(torch.float32).with_plans()
    assert planned.takes_plans
    assert not tiny.takes_plans


def test_without_a_plan_it_fails(tiny):
    planned = tiny.copy(torch.float32).with_plans()
    with pytest.raises(TypeError, match="plan"):
        planned.hidden(torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None])


@pytest.mark.parametrize(
    "texts",
    [
        [Text(0, 2), Text(2, 3), Text(5, 2, 0, 2)],  # another text between
        [Text(0, 4), Text(4, 2, 0, 3)],  # a part of a text
        [Text(0, 2, 2, 3), Text(2, 3)],  # what comes later
    ],
    ids=str,
)
def test_a_prefix_that_does_not_stand_right_before_is_refused(texts):
    with pytest.raises(ValueError, match="right before"):
        PackedTexts.of(texts)


def test_every_place_is_in_one_tile_and_keys_know_who_sees_them():
    texts = [Text(0, 130), Text(130, 1, 0, 130), Text(131, 64, 0, 130), Text(195, 5)]
    plan = PackedTexts.of(texts)
    places, seen_until = [], {}
    for first, stop, start, prefix, shared in plan.query_tiles.tolist():
        (text,) = [text for text in texts if text.start <= first < text.start + text.length]
        assert (start, stop, prefix, shared) == (text.start, text.start + text.length, *text[2:])
        places += range(first, min(first + TILE, stop))
    assert sorted(places) == list(range(200))
    for first, stop, last in plan.key_tiles.tolist():
        seen_until |= dict.fromkeys(range(first, min(first + TILE, stop)), last)
    assert seen_until == {place: (131 if place == 130 else 195 if place < 195 else 200) for place in range(200)}


def test_tables_are_padded_to_a_number_of_tiles_if_they_are_not_longer():
    texts = PackedTexts.of([Text(0, 130), Text(130, 1, 0, 130), *filler(131, 200)])
    padded = texts.padded(9)
    assert len(texts.query_tiles) == 6
    assert padded.query_tiles.shape == (9, 5) and not padded.query_tiles[6:].any()
    assert padded.key_tiles.shape == (9, 3) and not padded.key_tiles[6:].any()
    assert torch.equal(padded.query_tiles[:6], texts.query_tiles)
    assert texts.padded(5) is None
