"""Is this server one that the run can use? Its release, model, tokenizer, number type, length and settings."""

from dataclasses import dataclass
from typing import Any

from solera.engines.vllm.http import Http, ServerError
from solera.engines.vllm.plugin import BACKEND, WORKER
from solera.engines.vllm.versions import Release, release_of
from solera.errors import BadRequestError, SoleraError

EXTENSION = f"{WORKER}.WorkerExtension"
NEEDED_FLAGS = (
    "--worker-extension-cls", EXTENSION, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}',
    "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
)  # fmt: skip
"""Flags of `vllm serve` without which a server cannot be used."""
DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Environment variable that opens vLLM's control calls."""


@dataclass(frozen=True)
class Ours:
    """What the run has, to compare with the server."""

    model: dict[str, Any]
    """Fields of the model's config."""
    dtype: str
    max_length: int | None
    """Most tokens that the model can read; `None` means no limit."""
    needed: int
    """Tokens of a prompt and the longest response."""
    sample: str
    """A text, and its tokens."""
    tokens: list[int]


@dataclass(frozen=True)
class Facts:
    """What the server runs."""

    name: str
    """The name under which it serves the model."""
    vocabulary: int
    dtype: str
    max_length: int
    slots: int
    """Responses that it writes at once."""
    block: int | None
    """Tokens of a block of its prefix cache; `None` without one."""


def release_at(http: Http) -> Release:
    return release_of(http.get("/version")["version"], f"vLLM server {http.url}")


def check(http: Http, ours: Ours) -> Facts:
    """Refuse a server that the run cannot use, in one line that says what to change."""
    said, where = _ask(http), f"vLLM server {http.url}"
    served = http.get("/v1/models")["data"][0]
    length = min(said["max_length"], ours.max_length or said["max_length"])
    for holds, complaint in (
        (said["backend"] == BACKEND, f"lacks --weight-transfer-config '{{\"backend\": \"{BACKEND}\"}}'"),
        (said["logprobs_mode"] == "processed_logprobs",
         f"returns {said['logprobs_mode']}, not the probabilities it samples with: start it with --logprobs-mode "
         "processed_logprobs"),
        (said["generation_config"] == "vllm",
         "applies the model's generation_config.json to requests: start it with --generation-config vllm"),
        *((said["model"].get(key) in (value, None), f"serves another model ({served['root']}): its {key} is "
           f"{said['model'].get(key)}, this run's is {value}") for key, value in ours.model.items()),
        (said["dtype"] == ours.dtype,
         f"computes in {_short(said['dtype'])}, this run in {_short(ours.dtype)}: start it with --dtype "
         f"{_short(ours.dtype)}, or set model.compute = {_short(said['dtype'])}"),
        (ours.needed <= length,
         f"reads at most {length} tokens, but a prompt and sampling.max_tokens need {ours.needed}: start it with a "
         "larger --max-model-len, or lower sampling.max_tokens"),
        (_tokens(http, served["id"], ours.sample) == ours.tokens,
         f"has another tokenizer than this run's model ({served['root']})"),
    ):  # fmt: skip
        if not holds:
            raise SoleraError(f"{where} {complaint}")
    vocabulary = said["model"]["vocab_size"]
    return Facts(served["id"], vocabulary, said["dtype"], length, said["slots"], said["block"])


def _ask(http: Http) -> dict[str, Any]:
    """The answers of the server's workers (`worker.py`)."""
    try:
        return http.post("/collective_rpc", {"method": "solera_facts"})["results"][0]
    except (ServerError, BadRequestError) as error:
        if getattr(error, "status", None) in (404, 405):
            raise SoleraError(
                f"vLLM server {http.url} accepts no control calls: start it with {DEV_MODE}=1 in its environment"
            ) from error
        if getattr(error, "status", None) == 401 or not getattr(error, "status", 500):
            raise
        raise SoleraError(
            f"vLLM server {http.url} runs without Solera's plugin: install solera there, and start it with "
            f"--worker-extension-cls {EXTENSION}"
        ) from error


def _tokens(http: Http, name: str, text: str) -> Any:
    return http.post("/tokenize", {"model": name, "prompt": text, "add_special_tokens": False})["tokens"]


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")
