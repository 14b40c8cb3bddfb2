"""Fit the constants of `costs` to what was measured on one H200 (benchmarks/RESULTS.md)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.costs import GPUS, MODELS, Constants, Costs

START = (2e-5, 0.7, 0.8, 1e-7, 2e-3)
"""Where the search begins: `launch`, `cache_share`, `product_share`, `besides`, `host`."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    seconds: float
    predict: Callable[[Callable[[str], Costs]], float]
    """From the costs of each model."""


def decoding(model: str, rows: int, context: float, seconds: float) -> Row:
    return Row(f"token, {model}, {rows} rows", seconds, lambda costs: costs(model).token(rows, context))


def learning(model: str, tokens: float, at_once: float, seconds: float) -> Row:
    name = f"update, {model}, {tokens:,.0f} tokens, {at_once:,.0f} at once"
    return Row(name, seconds, lambda costs: costs(model).learn(tokens, per_gpu=at_once))


def step(model: str, rows: int, prompt: int, length: int, seconds: float) -> Row:
    """A batch of responses of one length, generated and learned from."""

    def predict(costs: Callable[[str], Costs]) -> float:
        decoded = length * costs(model).token(rows, prompt + length / 2)
        return decoded + costs(model).learn(rows * (prompt + length), per_gpu=49_152)

    return Row(f"step, {model}, {rows} × {length} tokens", seconds, predict)


ROWS = (
    decoding("smollm2", 16, 218, 0.873e-3),
    decoding("smollm2", 64, 218, 0.962e-3),
    decoding("smollm2", 128, 218, 1.175e-3),
    decoding("smollm2", 256, 218, 1.328e-3),
    decoding("smollm2", 512, 218, 1.703e-3),
    decoding("smollm2", 1024, 218, 2.635e-3),
    decoding("1.5b", 512, 218, 1.278 / 256),
    step("1.5b", 128, 90, 1024, 5.3),
    learning("1.5b", 136_900, 49_152, 2.300),
    learning("smollm2", 115_000, 32_768, 0.427),
    learning("smollm2", 117_587, 29_397, 0.388),
    learning("smollm2", 117_587, 24_576, 0.427),
    learning("smollm2", 117_587, 8_192, 1.063),
    learning("smollm2", 231_500, 32_768, 0.721),
)
"""Prompts have 90 tokens. The updates of 115,000, 231,500 and 136,900 tokens are from `solera bench --unmasked`; their
tokens follow from the share of the peak in the table. 24,576 tokens at once were measured twice: 0.408 and 0.446 s. The
whole step was measured before decoding got its own kernels."""


def costs_with(constants: Constants, gpu: str = "h200", recompute: bool = False) -> Callable[[str], Costs]:
    return lambda model: Costs(MODELS[model], GPUS[gpu], constants, recompute)


def errors(rows: tuple[Row, ...], constants: Constants) -> np.ndarray:
    """Logarithm of predicted over measured seconds, row by row."""
    costs = costs_with(constants)
    return np.array([np.log(row.predict(costs) / row.seconds) for row in rows])


def fit(rows: tuple[Row, ...], steps: int = 200) -> Constants:
    """Damped Gauss-Newton on the logarithms, which keeps every constant positive."""
    x, damping = np.log(START), 1.0
    residual = errors(rows, Constants(*np.exp(x)))
    for _ in range(steps):
        slope = np.stack(
            [(errors(rows, Constants(*np.exp(x + h))) - residual) / 1e-4 for h in 1e-4 * np.eye(len(x))], 1
        )
        # the second term keeps constants that no row determines close to where they are
        move = np.linalg.solve(slope.T @ slope + damping * np.eye(len(x)), -slope.T @ residual)
        tried = errors(rows, Constants(*np.exp(x + move)))
        better = tried @ tried < residual @ residual
        x, residual = (x + move, tried) if better else (x, residual)
        damping = damping / 2 if better else min(1e6, damping * 4)
    return Constants(*np.exp(x))
