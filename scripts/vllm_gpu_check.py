"""Check the vLLM engine on a machine with a GPU: start a server, sync twice, generate, and compare log-probabilities.

    python scripts/vllm_gpu_check.py MODEL [--transport ipc|file] [--dtype bfloat16] [--args=--enforce-eager ...]

Solera must be installed in the environment of vLLM (`pip install --no-deps -e .`), or vLLM does not find its plugin.
It prints a table: for each version of the weights, the seconds of the sync, the tokens per second, and the difference
between the server's log-probabilities and those of a plain forward pass. It ends with status 1 if a sync is not proven.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from solera.config import Config, EngineConfig, ModelConfig, RunConfig, SamplingConfig, SyncConfig
from solera.engines.pool import EnginePool
from solera.errors import SoleraError
from solera.folder.counts import Counts
from solera.models.language_model import LanguageModel
from solera.protocols import Weights
from solera.records import Completion, Sampling
from solera.run.parts import Parts, load_parts, resolved
from solera.run.serving import open_servers
from solera.sync.proof import tolerance
from solera.tasks.event_loop import EventLoop

NOISE = 0.01
"""Standard deviation of the noise between two versions, relative to each tensor's own."""


def shaken(model: LanguageModel, version: int) -> dict[str, torch.Tensor]:
    """The model's weights, with noise from version 1 on, also in the model itself."""
    noise = torch.Generator(model.device).manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters().values():
            step = torch.randn(parameter.shape, generator=noise, device=model.device, dtype=parameter.dtype)
            parameter.add_(NOISE * bool(version) * parameter.std() * step)
    return {name: parameter.detach() for name, parameter in model.parameters().items()}


@torch.no_grad()
def forward_logp(
    model: LanguageModel, prompt: tuple[int, ...], completion: Completion, temperature: float
) -> np.ndarray:
    tokens = torch.tensor([[*prompt, *completion.token_ids_T.tolist()]], device=model.device)
    logits_TV = model.module(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits_TV, -1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu().numpy()


def measure(engine: EnginePool, parts: Parts, rows: int, sampling: Sampling, events: EventLoop) -> tuple[float, float]:
    """Tokens per second, and the mean difference of log-probabilities."""
    prompts = [parts.task.prompt(index).token_ids for index in range(rows)]

    async def write() -> list[Completion]:
        asked = (engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts))
        return await asyncio.gather(*asked)

    start = time.perf_counter()
    written = events.run(write())
    seconds = time.perf_counter() - start
    apart = [
        np.abs(one.behaviour_logp_T - forward_logp(parts.model, prompt, one, sampling.temperature))
        for prompt, one in zip(prompts[:16], written, strict=False)
    ]
    return sum(len(one.token_ids_T) for one in written) / seconds, float(np.concatenate(apart).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--transport", choices=("ipc", "file", "group"), default="ipc")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--args", action="append", default=[])
    given = parser.parse_args()
    config = Config(
        RunConfig(name="check"), ModelConfig(given.model, given.dtype), sampling=SamplingConfig(0.7, given.tokens),
        engine=EngineConfig("vllm", launch=1, args=tuple(given.args)), sync=SyncConfig(transport=given.transport),
    )  # fmt: skip
    parts = load_parts(resolved(config))
    # The engine's own number format: what a learner would send.
    parts = Parts(
        parts.config, parts.model.for_compute(parts.compute, copied=True), parts.codec, parts.task, parts.compute
    )
    parts.model.module.set_attn_implementation("sdpa")  # for plain forward passes: the packed attention needs a plan
    folder, sampling = Path(tempfile.mkdtemp()), Sampling(0.7, given.tokens)
    spoken = Parts(parts.config, parts.model, parts.codec, parts.task, parts.compute, say=print)
    engine = open_servers(spoken, given.model, 64, folder, Counts())
    allowed, good = tolerance(str(parts.compute).removeprefix("torch."), sampling.temperature), True
    print(f"{'version':>7} {'sync s':>8} {'tokens/s':>9} {'|Δ logp|':>9}  proven")
    try:
        with EventLoop() as events:
            for version in range(3):
                named = shaken(parts.model, version)
                start = time.perf_counter()
                engine.load(Weights("check", version, iter(named.items())))
                seconds = time.perf_counter() - start
                speed, apart = measure(engine, parts, given.rows, sampling, events)
                good &= apart <= allowed
                print(f"{version:>7} {seconds:>8.2f} {speed:>9.0f} {apart:>9.2g}  {apart <= allowed}")
            good &= refuses(engine, parts)
    finally:
        engine.close()
    return 0 if good else 1


def refuses(engine: EnginePool, parts: Parts) -> bool:
    """Whether an update with NaN is refused."""
    spoilt = {name: tensor.detach().clone() for name, tensor in parts.model.parameters().items()}
    next(iter(spoilt.values())).view(-1)[0] = torch.nan
    try:
        engine.load(Weights("check", 9, iter(spoilt.items())))
    except SoleraError as error:
        print(f"an update with NaN: {error}")
        return "not finite" in str(error)
    print("an update with NaN was accepted")
    return False


if __name__ == "__main__":
    sys.exit(main())
