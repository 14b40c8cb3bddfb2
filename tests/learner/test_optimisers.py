"""AdamW with 16-bit weights and 8-bit moments, against AdamW in float64."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from solera.config import LearnConfig
from solera.learner import optimisers
from solera.learner.optimisers import LeanAdamW


def parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.to(torch.bfloat16))


def adamw(weight, gradients, rate, betas, decay):
    """AdamW as Loshchilov and Hutter write it (Algorithm 2), in float64."""
    weight, m, v = weight.copy(), np.zeros_like(weight), np.zeros_like(weight)
    for step, grad in enumerate(gradients, 1):
        m, v = betas[0] * m + (1 - betas[0]) * grad, betas[1] * v + (1 - betas[1]) * grad**2
        m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        weight = weight - rate * m_hat / (np.sqrt(v_hat) + 1e-8) - rate * decay * weight
    return weight


def take_steps(optimiser, parameters, gradients, rate=1e-3, scale=1.0):
    for grads in gradients:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = (grad * scale).to(torch.bfloat16)
        optimiser.step(rate, optimiser.norm(scale), scale)


@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.95), 0.0), ((0.9, 0.95), 0.1), ((0.9, 0.99), 0.0)])
def test_fifty_steps_are_those_of_adamw_in_float64(betas, decay):
    """64 weights of all sizes, each 4,096 times with the same gradients but other noise.

    Stated tolerance: the mean of each weight has moved as in float64, to 1.5 % of the largest movement. (Noise of 12 %
    in the second moment makes its inverse root 3/8·0.12² = 0.5 % too large on average; the mean has noise too.)
    A single weight differs by its rounding to bfloat16, a walk of 50 steps with variance rate·distance each, and by a
    quarter of the largest movement for its moments. All gradients of a block are within the 4 decades that codes span.
    """
    rng, copies, rate = np.random.default_rng(0), 4096, 1e-3
    start = torch.from_numpy(rng.normal(size=64) * 10.0 ** rng.uniform(-3, 0, 64)).bfloat16()
    trend = rng.choice([-1.0, 1.0], 64) * 10.0 ** rng.uniform(-3.5, 0, 64)
    gradients = [
        torch.from_numpy(trend * (1 + rng.normal(size=64))).bfloat16().repeat(copies, 1) for _ in range(50)
    ]  # fmt: skip
    p = parameter(start.repeat(copies, 1))
    optimiser = LeanAdamW([p], LearnConfig(betas=betas, weight_decay=decay, grad_clip=1e9), seed=0)
    take_steps(optimiser, [p], [[grad] for grad in gradients], rate)
    begun = start.double().numpy()
    expected = adamw(begun, [grad[0].double().numpy() for grad in gradients], rate, betas, decay)
    moved, made = expected - begun, p.detach().double().numpy()
    assert np.abs(moved).max() > 20 * rate
    assert made.mean(0) - expected == pytest.approx(0, abs=0.015 * np.abs(moved).max())
    largest = np.abs(begun) + np.abs(moved)
    noise = np.sqrt(50 * rate * largest * 2.0**-7)
    assert (np.abs(made - expected) <= 5 * noise + 0.25 * np.abs(moved).max()).all()


def test_a_change_far_below_the_steps_of_bfloat16_is_made_on_average():
    """Rate 1e-5, weights of 1, whose neighbours are 1/256 below: with a constant gradient AdamW moves by its rate each
    step. 100 steps: 1e-3, a quarter of the distance. Rounding to the nearest would never move."""
    p = parameter(torch.ones(2**16))
    optimiser = LeanAdamW([p], LearnConfig(grad_clip=1e9), seed=0)
    take_steps(optimiser, [p], [[torch.ones(2**16)]] * 100, rate=1e-5)
    moved = 1 - p.detach().double()
    deviation = math.sqrt(1e-3 * (2.0**-8 - 1e-3) / 2**16)
    assert moved.mean().item() == pytest.approx(1e-3, abs=5 * deviation + 1e-5)
    assert torch.equal(moved * 2**8, (moved * 2**8).round())


def test_a_weight_with_a_gradient_far_below_its_blocks_moves_less_never_more():
    """AdamW moves every weight with a constant gradient by its rate. A second moment below 0.6·2⁻³¹ of the block's
    largest is stored as that, which is 1/59,862 in the root: a gradient ten times smaller moves a weight by a tenth of
    the rate, on average, once the moments come from their codes."""
    p = parameter(torch.zeros(256, 256))
    grad = torch.ones(256, 256)
    grad[:, 1:] = 1 / 598_620
    optimiser = LeanAdamW([p], LearnConfig(grad_clip=1e9), seed=0)
    take_steps(optimiser, [p], [[grad]] * 60, rate=1e-3)
    before = p.detach().float().clone()
    take_steps(optimiser, [p], [[grad]] * 10, rate=1e-3)
    moved = (before - p.detach().float()).double().mean(0) / 10e-3
    assert moved[0].item() == pytest.approx(1, abs=0.01)
    assert moved[1:].mean().item() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (257,), (3, 1000), (700, 7)])
def test_every_weight_makes_its_first_step_whatever_the_size_of_its_tensor(shape, monkeypatch):
    """By hand: AdamW's first step is −rate·sign(gradient). From 0, bfloat16 has a number within 2⁻⁷ of that."""
    monkeypatch.setattr(optimisers, "CHUNK", 512)
    p = parameter(torch.zeros(shape))
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    take_steps(LeanAdamW([p], LearnConfig(grad_clip=1e9), seed=0), [p], [[grad]], rate=0.01)
    torch.testing.assert_close(p.detach().float(), -0.01 * grad.float().sign(), rtol=2.0**-7, atol=0)


def test_the_norm_is_summed_in_float32_and_limits_the_gradient():
    """A million ones have norm 1,000; bfloat16 cannot count beyond 256. A gradient that is limited to half its size
    makes the same moments as one of half the size."""
    states = []
    for grad, limit in ((1.0, 500.0), (0.5, 1e9)):
        p = parameter(torch.zeros(1000, 1000))
        optimiser = LeanAdamW([p], LearnConfig(grad_clip=limit), seed=0)
        p.grad = torch.full((1000, 1000), grad, dtype=torch.bfloat16)
        norm = optimiser.norm(1.0)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(1000 * grad, rel=1e-6)
        assert optimiser.norm(2.0**15).item() == pytest.approx(1000 * grad * 2.0**-15, rel=1e-6)
        optimiser.step(0.01, norm, 1.0)
        states.append(optimiser.state_dict()["state"][0])
    for name in ("first_scale", "second_scale"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-6, atol=0)


def test_the_scale_of_the_loss_leaves_no_trace():
    """Powers of two are exact in bfloat16: weights and moments are the same bits."""
    made = []
    for scale in (1.0, 2.0**15, 2.0**-4):
        ps = [parameter(torch.randn(300, generator=torch.Generator().manual_seed(3)))]
        optimiser = LeanAdamW(ps, LearnConfig(grad_clip=1.0), seed=5)
        grads = [[torch.randn(300, generator=torch.Generator().manual_seed(k)).bfloat16()] for k in range(5)]
        take_steps(optimiser, ps, grads, scale=scale)
        made.append((ps[0].detach(), optimiser.state_dict()["state"][0]))
    for weight, state in made[1:]:
        assert torch.equal(weight, made[0][0])
        assert all(torch.equal(state[name], made[0][1][name]) for name in ("first_code", "second_code"))


def some_steps(seed: int, first: int, last: int, state=None, weights=None) -> tuple[torch.Tensor, dict]:
    start = torch.randn(1000, generator=torch.Generator().manual_seed(9)) if weights is None else weights
    p = parameter(start)
    optimiser = LeanAdamW([p], LearnConfig(), seed)
    if state is not None:
        optimiser.load_state_dict(state)
    grads = [[torch.randn(1000, generator=torch.Generator().manual_seed(k))] for k in range(first, last)]
    take_steps(optimiser, [p], grads)
    return p.detach(), optimiser.state_dict()


def test_the_seed_decides_and_the_state_continues_bit_for_bit(tmp_path):
    whole, _ = some_steps(0, 0, 10)
    assert torch.equal(whole, some_steps(0, 0, 10)[0])
    assert not torch.equal(whole, some_steps(1, 0, 10)[0])
    half, state = some_steps(0, 0, 5)
    torch.save({"optimiser": state, "weights": half}, tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(whole, some_steps(0, 5, 10, read["optimiser"], read["weights"])[0])


def test_weights_without_a_gradient_and_without_moments_stay():
    ps = [parameter(torch.randn(300)), parameter(torch.randn(300))]
    before = [p.detach().clone() for p in ps]
    optimiser = LeanAdamW(ps, LearnConfig(), seed=0)
    ps[0].grad = torch.zeros_like(ps[0])
    optimiser.step(0.1, optimiser.norm(1.0), 1.0)
    assert all(torch.equal(p, old) for p, old in zip(ps, before, strict=True))
    assert all(p.grad is None for p in ps)
    assert optimiser.steps == 1


class Counting(TorchDispatchMode):
    """Counts the bytes of all storages that operations make and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(storage)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, size: int) -> None:
        self.alive -= size


def test_six_bytes_per_weight_and_a_bounded_rest(monkeypatch):
    """2 for the weight, 2 for the gradient, 2 for the moments and two float32 scales for 256 weights. What a step needs
    beside that depends on the chunk, not on the model: less than 80 bytes for each of its numbers."""
    monkeypatch.setattr(optimisers, "CHUNK", 4096)
    shapes = [(500, 256), (1000, 128), (256,)]
    count = sum(math.prod(shape) for shape in shapes)
    with Counting() as counted:
        ps = [parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
        optimiser = LeanAdamW(ps, LearnConfig(), seed=0)
        for p in ps:
            p.grad = torch.ones_like(p)
        held = counted.alive
        assert held == 6 * count + 2 * 4 * count // 256
        counted.peak = counted.alive
        optimiser.step(1e-3, optimiser.norm(1.0), 1.0)
        assert counted.peak - held < 80 * 4096
        assert counted.alive == held - 2 * count  # no gradient is left
