"""Engine error by hand, and its alarm."""

import numpy as np
import pytest

from solera.diagnosis.mismatch import Mismatch

RATIO, RESPONSE = np.array([0.5, -0.25, 3.0, -0.75]), np.array([0, 0, 1, 2])


def test_only_fresh_responses_count_and_the_alarm_sounds_once():
    """Fresh are responses 0 and 2: (½ + ¼ + ¾)/3 = ½."""
    said = list[str]()
    watch = Mismatch(0.5, said.append)
    assert watch.measure(RATIO, RESPONSE, np.array([True, False, True])) == pytest.approx({"mismatch/logp": 0.5})
    assert not said
    for _ in range(2):
        assert watch.measure(RATIO, RESPONSE, np.array([True, True, True]))["mismatch/logp"] == 1.125
    assert len(said) == 1 and "by 1.1 nats per token on average; rounding explains up to 0.5" in said[0]


def test_without_fresh_responses_nothing_is_said_and_nan_is_an_alarm():
    said = list[str]()
    assert Mismatch(0.5, said.append).measure(RATIO, RESPONSE, np.zeros(3, np.bool_)) == {}
    assert not said
    Mismatch(0.5, said.append).measure(RATIO * np.nan, RESPONSE, np.ones(3, np.bool_))
    assert len(said) == 1


CONTEXTS, WORDS, TOKENS = 20, 12, 60_000


def log_softmax(logits_CV: np.ndarray) -> np.ndarray:
    shifted = logits_CV - logits_CV.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def top_p(logp_CV: np.ndarray, share: float) -> np.ndarray:
    """The likeliest words whose probabilities add up to `share`, renormalised; word by word, from the definition."""
    cut = np.full_like(logp_CV, -np.inf)
    for c, logp in enumerate(logp_CV):
        mass = 0.0
        for word in sorted(range(WORDS), key=lambda w: -logp[w]):
            if mass < share:
                cut[c, word] = logp[word]
            mass += np.exp(logp[word])
    return cut - np.log(np.exp(cut).sum(1, keepdims=True))


def kl(one_CV: np.ndarray, other_CV: np.ndarray) -> float:
    """KL(one‖other), mean over contexts."""
    p = np.exp(one_CV)
    return float((p * np.where(p > 0, one_CV - other_CV, 0)).sum(1).mean())


class Known:
    """Policies of which everything is known: the learner's now, its version three batches ago, and the engine's
    arithmetic, which is a little off the learner's with the same weights."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        now_CV, noise_CV = (self.rng.normal(size=(CONTEXTS, WORDS)) for _ in range(2))
        error_CV = 0.05 * self.rng.normal(size=(CONTEXTS, WORDS))
        self.now, self.engine_now = log_softmax(now_CV), log_softmax(now_CV + error_CV)
        self.old, self.engine_old = (log_softmax(now_CV + 0.4 * noise_CV + e) for e in (0, error_CV))

    def log_ratios(self, sampler_CV: np.ndarray) -> np.ndarray:
        """`log π − b` of tokens drawn from a sampler, as many for each context."""
        ratios = []
        for c, logp in enumerate(sampler_CV):
            word_T = self.rng.choice(WORDS, TOKENS // CONTEXTS, p=np.exp(logp) / np.exp(logp).sum())
            ratios.append(self.now[c, word_T] - logp[word_T])
        return np.concatenate(ratios)


def by_cause(watch: Mismatch, *parts: tuple[np.ndarray, int | None, bool]) -> dict[str, float]:
    """The causes of parts, each with its log-ratios, age and whether its sampler was truncated."""
    ratio_T = np.concatenate([ratios for ratios, _, _ in parts])
    part_T = np.repeat(np.arange(len(parts)), [len(ratios) for ratios, _, _ in parts])
    truncated_P = np.array([cut for _, _, cut in parts])
    found = watch.by_cause(ratio_T, part_T, [age for _, age, _ in parts], truncated_P, np.ones(len(parts)))
    return {name.removeprefix("divergence/by_cause/"): value for name, value in found.items()}


def test_each_cause_is_found_where_it_is_known():
    """Three equal parts: fresh, three batches old, and fresh but sampled with top_p. Each cause divides by three,
    except the engine's error, which is in every token."""
    known = Known()
    cut_CV = top_p(known.engine_now, 0.8)
    found = by_cause(
        Mismatch(1.0, print), (known.log_ratios(known.engine_now), 0, False),
        (known.log_ratios(known.engine_old), 3, False), (known.log_ratios(cut_CV), 0, True),
    )  # fmt: skip
    engine, old = kl(known.engine_now, known.now), kl(known.engine_old, known.now)
    assert found["engine"] == pytest.approx(engine, rel=0.05)
    assert found["lag"] == pytest.approx((old - engine) / 3, rel=0.05)
    assert found["truncation"] == pytest.approx((kl(cut_CV, known.now) - engine) / 3, rel=0.05)
    assert found.keys() == {"engine", "lag", "truncation"}
    # The lag is that of the weights themselves, whatever the engine makes of them.
    assert found["lag"] == pytest.approx(kl(known.old, known.now) / 3, rel=0.1)


def test_the_causes_add_up_to_the_kl_per_token():
    known = Known()
    fresh, old, cut = (known.log_ratios(s) for s in (known.engine_now, known.engine_old, top_p(known.engine_now, 0.5)))
    found = by_cause(Mismatch(1.0, print), (fresh, 0, False), (old, 3, False), (cut, 0, True), (old[:90], None, False))
    parts = [(np.exp(x) - 1 - x).sum() for x in (fresh, old)]
    assert sum(found.values()) == pytest.approx((sum(parts) - cut.sum()) / (3 * TOKENS), rel=1e-9)


def test_by_hand_with_responses_that_stand_for_several():
    """ρ of 2 and ½: 2 − 1 − ln 2 = .3069 and ½ − 1 + ln 2 = .1931. The second part stands for three responses."""
    watch = Mismatch(9.0, print)
    ratio_T, part_T = np.log([2.0, 0.5, 2.0, 2.0]), np.array([0, 0, 1, 1])
    found = watch.by_cause(ratio_T, part_T, [0, 2], np.zeros(2, np.bool_), np.array([1.0, 3.0]))
    assert found == pytest.approx({
        "divergence/by_cause/engine": 0.25, "divergence/by_cause/lag": 3 * 2 * (0.306853 - 0.25) / 8,
    }, rel=1e-5)  # fmt: skip
    assert watch.engine == pytest.approx(0.25)


def test_only_what_can_be_told_is_logged():
    known = Known()
    fresh, old = known.log_ratios(known.engine_now), known.log_ratios(known.engine_old)
    watch = Mismatch(1.0, print)
    assert by_cause(watch, (old, 3, False)) == {}  # nothing of age 0 yet: lag and engine cannot be told apart
    assert by_cause(watch, (old, None, False)) == {}  # another author
    assert by_cause(watch, (fresh, 0, False))["lag"] == 0
    later = by_cause(watch, (old, 3, False))  # the engine's share as it was last measured
    assert later["engine"] == watch.engine and later["lag"] == pytest.approx(kl(known.old, known.now), rel=0.1)
    # Truncated text of an age that nothing untruncated has: lag and truncation cannot be told apart.
    alone = by_cause(watch, (fresh, 0, False), (known.log_ratios(top_p(known.engine_old, 0.8)), 7, True))
    assert alone["unidentified"] == 0.5 and "truncation" not in alone and alone["lag"] == 0
