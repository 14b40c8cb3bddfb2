"""AdamW in two amounts of memory (`learn.memory`)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from solera.config import LearnConfig
from solera.errors import SoleraError
from solera.learner.short_numbers import BLOCK, SIGNED, UNSIGNED, decode, encode, to_bfloat16
from solera.streams import stream_seed

EPSILON = 1e-8
"""Added to the root of the second moment, as in torch's AdamW."""
CLIP_EPSILON = 1e-6
"""Added to the norm that a gradient is divided by, as in torch's `clip_grad_norm_`."""
CHUNK = 1 << 24
"""Numbers that `LeanAdamW` updates at once, a multiple of BLOCK. This limits its temporary memory: about 60
bytes for each, 1 GB in all. A GPU with compilation needs 8 bytes for each."""


class Optimiser(Protocol):
    """What a learner needs of an optimiser."""

    @property
    def steps(self) -> int:
        """Optimiser steps so far."""
        ...

    @property
    def missing_bytes(self) -> int:
        """Memory that the first step will take for moments."""
        ...

    def clear(self) -> None:
        """Remove all gradients."""
        ...

    def norm(self, scale: float) -> Tensor:
        """The norm of the whole gradient, in float32. The gradients are still multiplied by `scale`."""
        ...

    def step(self, rate: float, norm: Tensor, scale: float) -> None:
        """Update the weights. `norm` is what `norm(scale)` returned."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FullAdamW:
    """torch's AdamW. Weights, gradients and moments have the type of the weights, which is float32."""

    def __init__(self, parameters: Sequence[Tensor], config: LearnConfig) -> None:
        self._parameters = parameters
        self._limit = config.grad_clip
        self._adamw = torch.optim.AdamW(
            parameters, lr=0.0, betas=config.betas, eps=EPSILON, weight_decay=config.weight_decay, fused=True
        )

    @property
    def steps(self) -> int:
        states = list(self._adamw.state.values())
        return int(states[0]["step"]) if states else 0

    @property
    def missing_bytes(self) -> int:
        return 0 if self._adamw.state else 2 * sum(p.nbytes for p in self._parameters if p.requires_grad)

    def clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def norm(self, scale: float) -> Tensor:
        assert scale == 1, "masters in float32 have their gradients without the scale of the loss"
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def step(self, rate: float, norm: Tensor, scale: float) -> None:
        if float(norm) > self._limit:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._limit, norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_other(state, "full")
        self._adamw.load_state_dict(state)


class LeanAdamW:
    """AdamW with bfloat16 weights and gradients and 8-bit moments: 6.03 bytes per weight instead of 16.

    Each step computes in float32, chunk by chunk. Weights and moments are rounded stochastically. The random numbers
    depend only on the seed, the step, the parameter and the chunk. So a checkpoint needs only the number of steps.
    """

    def __init__(self, parameters: Sequence[Tensor], config: LearnConfig, seed: int, compiled: bool = False) -> None:
        assert all(p.dtype == torch.bfloat16 for p in parameters)
        self._parameters = parameters
        self._config = config
        self._seed = seed
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True) if compiled else _update
        self._states = [_moments(p) for p in parameters]
        self._steps = 0

    @property
    def missing_bytes(self) -> int:
        return 0

    @property
    def steps(self) -> int:
        return self._steps

    def clear(self) -> None:
        for p in self._parameters:
            p.grad = None

    def norm(self, scale: float) -> Tensor:
        flat = [p.grad.reshape(-1) for p in self._parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for grad in flat for part in grad.split(CHUNK)]
        return torch.linalg.vector_norm(torch.stack(norms)) / scale if norms else torch.zeros(())

    @torch.no_grad()
    def step(self, rate: float, norm: Tensor, scale: float) -> None:
        """Frees each gradient once it is used, so that the engine has room before the next update."""
        self._steps += 1
        size, limit = float(norm), self._config.grad_clip
        factor = (limit / (size + CLIP_EPSILON) if size > limit else 1.0) / scale
        constants = self._constants(rate, factor).to(self._parameters[0].device)
        for number, (p, state) in enumerate(zip(self._parameters, self._states, strict=True)):
            if p.grad is not None:
                self._step(number, p, state, constants)
                p.grad = None

    def _constants(self, rate: float, factor: float) -> Tensor:
        """Numbers of this step, as a tensor: a compiled function would be compiled again for every new float."""
        (beta1, beta2), decay = self._config.betas, self._config.weight_decay
        root = math.sqrt(1 - beta2**self._steps)
        return torch.tensor([factor, beta1, 1 - beta1, beta2, 1 - beta2, 1 - rate * decay,
                             rate / (1 - beta1**self._steps), root])  # fmt: skip

    def _step(self, number: int, p: Tensor, state: dict[str, Tensor], constants: Tensor) -> None:
        assert p.grad is not None
        weight, grad = p.detach().view(-1), p.grad.reshape(-1)
        for chunk, start in enumerate(range(0, p.numel(), CHUNK)):
            part = slice(start, start + CHUNK)
            rows = slice(start // BLOCK, (start + CHUNK) // BLOCK)
            padded = [_blocks(x[part]) for x in (weight, grad)]
            noise_NB = self._noise(padded[0], number, chunk)
            self._update(*padded, noise_NB, constants, *(tensor[rows] for tensor in state.values()))
            if padded[0].data_ptr() != weight[part].data_ptr():
                weight[part] = padded[0].view(-1)[: len(weight[part])]

    def _noise(self, like: Tensor, number: int, chunk: int) -> Tensor:
        """63 random bits for each number."""
        generator = torch.Generator(like.device)
        generator.manual_seed(stream_seed(self._seed, self._steps, number, chunk))
        return torch.empty_like(like, dtype=torch.int64).random_(generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "state": dict(enumerate(self._states))}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_other(state, "lean")
        self._steps = state["steps"]
        for number, own in enumerate(self._states):
            for name, tensor in own.items():
                tensor.copy_(state["state"][number][name])


def _refuse_other(state: dict[str, Any], memory: str) -> None:
    """Refuse the state that the other optimiser wrote: someone edited the run's config."""
    written = "full" if "param_groups" in state else "lean"
    if written != memory:
        raise SoleraError(f"learn.memory is {memory}, but the checkpoint was written with {written}: set it back")


def _moments(p: Tensor) -> dict[str, Tensor]:
    """Both moments in the order of `_update`'s arguments. The last block of a parameter may be longer than needed."""
    blocks = -(-p.numel() // BLOCK)
    code, scale = torch.zeros(blocks, BLOCK, dtype=torch.uint8), torch.zeros(blocks, 1)
    return {
        f"{moment}_{name}": tensor.to(p.device, copy=True)
        for moment in ("first", "second")
        for name, tensor in (("code", code), ("scale", scale))
    }


def _blocks(flat: Tensor) -> Tensor:
    """`[n] -> [N, BLOCK]`: a view, or a copy with zeros after its end."""
    missing = -len(flat) % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _update(
    weight_NB: Tensor, grad_NB: Tensor, noise_NB: Tensor, constants: Tensor,
    first_code_NB: Tensor, first_scale_N1: Tensor, second_code_NB: Tensor, second_scale_N1: Tensor,
) -> None:  # fmt: skip
    """One step of AdamW on these blocks, in place. This step uses the moments before they are rounded."""
    factor, beta1, rest1, beta2, rest2, keep, rate, root = constants.unbind()
    grad_NB = grad_NB.float() * factor
    first_NB = beta1 * decode(first_code_NB, first_scale_N1, SIGNED) + rest1 * grad_NB
    second_NB = beta2 * decode(second_code_NB, second_scale_N1, UNSIGNED) + rest2 * grad_NB * grad_NB
    new_NB = weight_NB.float() * keep - rate * first_NB / (second_NB.sqrt() / root + EPSILON)
    weight_NB.copy_(to_bfloat16(new_NB, noise_NB))
    moments = (
        (first_NB, noise_NB >> 16, SIGNED, first_code_NB, first_scale_N1),
        (second_NB, noise_NB >> 36, UNSIGNED, second_code_NB, second_scale_N1),
    )
    for number_NB, bits_NB, largest, code_NB, scale_N1 in moments:
        code, scale = encode(number_NB, bits_NB, largest)
        code_NB.copy_(code)
        scale_N1.copy_(scale)


def optimiser_of(parameters: Sequence[Tensor], config: LearnConfig, seed: int, compiled: bool) -> Optimiser:
    """The optimiser of `learn.memory`."""
    if config.memory == "lean":
        return LeanAdamW(parameters, config, seed, compiled)
    return FullAdamW(parameters, config)
