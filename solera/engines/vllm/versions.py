"""The vLLM releases that Solera was tested with, and everything in which they differ."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from solera.config import InFlight
from solera.errors import SoleraError
from solera.records import Sampling


class Answer(NamedTuple):
    """What a server wrote after a text."""

    token_ids: list[int]
    logp: list[float]
    finish_reason: str
    spans: list[tuple[str, int]] | None
    """The label of the weights that wrote each run of tokens, and its length. `None` if the server does not say."""


class Release(Protocol):
    """How to talk to one release of vLLM."""

    flags: tuple[str, ...]
    """Flags of `vllm serve` that only this release needs."""
    in_flight: tuple[InFlight, ...]
    """What it can do with requests in flight during an update. A release that does not report which weights wrote a
    token must finish all requests first."""
    path: str
    """Where to post a text to continue."""

    def body(self, model: str, token_ids: tuple[int, ...], params: dict[str, Any], salt: str | None) -> dict[str, Any]:
        """The request to continue a text. `salt` keeps the request apart from what the prefix cache holds."""
        ...

    def answer(self, said: Mapping[str, Any]) -> Answer: ...

    def start(self) -> dict[str, Any] | None:
        """The body that begins an update."""
        ...

    def finish(self, label: str) -> dict[str, Any] | None:
        """The body that ends an update: the label of the new weights."""
        ...


class Release32:
    """vLLM 0.32: token ids in and out, with the label of the weights for every token."""

    flags: tuple[str, ...] = ("--enable-scale-out",)
    in_flight: tuple[InFlight, ...] = ("drain", "keep", "abort")
    path: str = "/inference/v1/generate"

    def body(self, model: str, token_ids: tuple[int, ...], params: dict[str, Any], salt: str | None) -> dict[str, Any]:
        request = {"model": model, "token_ids": token_ids, "sampling_params": params}
        return request if salt is None else {**request, "cache_salt": salt}

    def answer(self, said: Mapping[str, Any]) -> Answer:
        (choice,) = said["choices"]
        spans = [(span["version"], span["end"] - span["start"]) for span in choice["weight_versions"] or ()]
        logp = [token["logprob"] for token in (choice["logprobs"] or {}).get("content") or ()]
        return Answer(choice["token_ids"] or [], logp, choice["finish_reason"], spans)

    def start(self) -> None:
        return None

    def finish(self, label: str) -> dict[str, Any]:
        return {"weight_version": label}


class Release24:
    """vLLM 0.24: the completions endpoint, which does not say which weights wrote a token."""

    flags: tuple[str, ...] = ()
    in_flight: tuple[InFlight, ...] = ("drain",)
    path: str = "/v1/completions"

    def body(self, model: str, token_ids: tuple[int, ...], params: dict[str, Any], salt: str | None) -> dict[str, Any]:
        known = {key: value for key, value in params.items() if key != "detokenize"}
        request = {"model": model, "prompt": token_ids, "return_token_ids": True, **known}
        return request if salt is None else {**request, "cache_salt": salt}

    def answer(self, said: Mapping[str, Any]) -> Answer:
        (choice,) = said["choices"]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], None)

    def start(self) -> dict[str, Any]:
        return {"is_checkpoint_format": False}  # our plugin prepares the model itself, after checking the update

    def finish(self, label: str) -> None:
        return None


RELEASES: dict[str, Release] = {"0.32": Release32(), "0.24": Release24()}


def release_of(version: str, where: str) -> Release:
    """The release with this version. Refuses versions that were not tested.

    >>> release_of("0.32.0+cpu", "server").path
    '/inference/v1/generate'
    """
    found = re.match(r"(\d+\.\d+)\.\d+(?![\w.-])", version)
    if found is None or found[1] not in RELEASES:
        tested = " or ".join(f"{name}.0" for name in RELEASES)
        raise SoleraError(f"{where} is vLLM {version}, which Solera was not tested with: use vLLM {tested}")
    return RELEASES[found[1]]


def sampling_params(sampling: Sampling, max_tokens: int, seed: int, end_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """vLLM's settings for one request. Everything that a server could set by default is set here.

    A response ends only with our own end tokens. Text is needed on the server only to find stop strings.
    """
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "max_tokens": max_tokens, "min_tokens": 0, "seed": seed % 2**63, "logprobs": 0,
        "stop_token_ids": list(end_token_ids), "ignore_eos": True, "stop": list(sampling.stop),
        "include_stop_str_in_output": True, "skip_special_tokens": False, "detokenize": bool(sampling.stop),
    }  # fmt: skip
