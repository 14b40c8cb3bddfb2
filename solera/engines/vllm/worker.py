"""The code that runs inside vLLM's processes: a weight-transfer backend, and two questions that a worker answers.

vLLM finds it through `plugin.py`. No other module imports vllm.

What is proven by what:

- An update is checked before the model is touched: the names and shapes that a Hugging Face model of this config has,
  the type, finite values, and the digest of every tensor that arrived. If anything is wrong, the update is refused and
  the old weights go on serving.
- With LoRA, an update holds adapters only. They are added to a base that the trainer has sent before, whose digest the
  update names. Their digests are of what arrived.
- After loading, the digest of every tensor that the model still holds under its own name, shape and type is taken from
  the model's memory. vLLM fuses some tensors (query, key, value; gate, up) and packs matrices on a CPU. For these, the
  digest is of what arrived and was loaded from.
- That the server generates with these weights, fused and packed ones included, is proven by the canary of each sync
  (`training/delivery.py`). That no stale prefix cache is read is proven by `client.py`.
"""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from solera.engines.vllm.receiving import RECEIVE, join
from solera.models.digest import describe, digest_of
from solera.models.merging import Base, adapter_shapes, merge


class RefusedError(ValueError):
    """An update that was not applied. The old weights go on serving."""


class WorkerExtension:
    """Questions that the client asks through `/collective_rpc` (`--worker-extension-cls`)."""

    def solera_facts(self) -> dict[str, Any]:
        """What this server runs, to compare with the run's own model and settings."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model, cache, hf = config.model_config, config.cache_config, config.model_config.hf_config
        names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
        return {
            "model": {name: getattr(hf, name, None) for name in names},
            "dtype": str(model.dtype),
            "max_length": model.max_model_len,
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "generation_config": model.generation_config,
            "block": cache.block_size if cache.enable_prefix_caching else None,
            "slots": config.scheduler_config.max_num_seqs,
            "backend": getattr(config.weight_transfer_config, "backend", None),
        }

    def solera_held(self) -> dict[str, Any]:
        """Which weights this worker holds, and why it refused the last update, if it did."""
        transfer: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {
            "label": transfer.label, "tensors": transfer.tensors, "refused": transfer.refused,
            "base": transfer.base_digest,
        }  # fmt: skip

    def solera_keep_base(self, info: str) -> str | None:
        """Keep weights that adapters will be added to; `info` is an `Update` as JSON. Returns why it does not, or
        `None`."""
        transfer: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        return transfer.keep_base(Update(**json.loads(info)))


@dataclass
class Init(WeightTransferInitInfo):
    """Where to meet the trainer, for a transport that needs a meeting."""

    meeting: dict[str, Any] = field(default_factory=dict)


@dataclass
class Update(WeightTransferUpdateInfo):
    """One update: its label, how it travels, and what should arrive: name, shape, type and digest of each tensor."""

    label: str = ""
    transport: str = ""
    source: dict[str, Any] = field(default_factory=dict)
    tensors: list[list[Any]] = field(default_factory=list)
    base: str = ""
    """Adapters only: the digest of the weights that they are added to."""
    scale: dict[str, float] = field(default_factory=dict)
    """Adapters only: the factor of each layer's adapters."""


class SoleraTransfer(WeightTransferEngine):
    """Receives an update as a whole, checks it, and only then loads it."""

    init_info_cls = Init
    update_info_cls = Update

    def __init__(self, config: Any, *rest: Any) -> None:
        super().__init__(config, *rest)
        self.label: str | None = None
        """The label of the last update that was applied."""
        self.tensors: list[list[Any]] = []
        self.refused: str | None = None
        self.group: Any = None
        self.base: dict[str, Tensor] = {}
        """The weights that adapters are added to, in the memory of the host."""
        self.base_digest: str | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        self.group = join(init_info.meeting, self.parallel_config)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the model is touched only after the update was checked."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The whole update (vLLM 0.32)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update, load_weights: Any = None) -> None:
        """The whole update (called directly by vLLM 0.24, whose `load_weights` is not used)."""
        self.refused = None
        try:
            arrived = self._receive(update_info)
            loaded = self._merged(arrived, update_info)
        except Exception as error:
            self.refused = _said(error)
            raise
        self.label = None  # if loading fails, nobody knows what the model holds
        self._load(loaded)
        self.tensors = self._describe(arrived)
        self.label = update_info.label

    def keep_base(self, info: Update) -> str | None:
        """Keep weights, without loading them. Returns why they are refused, or `None`."""
        try:
            self._forget_base()
            arrived = self._receive(info)
        except Exception as error:
            return _said(error)
        self.base = {name: tensor.detach().to("cpu", copy=True) for name, tensor in arrived.items()}
        self.base_digest = digest_of(describe(self.base.items()))
        return None

    def _forget_base(self) -> None:
        self.base, self.base_digest = {}, None

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.24 wants its trainer side here. Ours is `solera.engines.vllm.transport`, which needs no vLLM."""
        raise RuntimeError("weights are sent by solera.engines.vllm.transport")

    @torch.no_grad()
    def _receive(self, info: Update) -> dict[str, Tensor]:
        """Fetch what was sent, and check it."""
        arrived = RECEIVE[info.transport](info.source, info.tensors, self.group, self.model)
        own = self._adapters(info) if info.base else self._parameters()
        if missing := sorted(own.keys() - arrived.keys()):
            raise RefusedError(f"tensor {missing[0]} is missing")
        if extra := sorted(arrived.keys() - own.keys()):
            raise RefusedError(f"tensor {extra[0]} is not one of the model's")
        dtype = next(iter(self.model.parameters())).dtype
        for name, tensor in arrived.items():
            if tuple(tensor.shape) != own[name]:
                raise RefusedError(f"tensor {name} has shape {list(tensor.shape)}, the model's is {list(own[name])}")
            if tensor.dtype != dtype:
                raise RefusedError(f"tensor {name} is {tensor.dtype}, the model computes in {dtype}")
        _refuse_infinite(arrived)
        digests = {name: digest for name, _, _, digest in info.tensors}
        for spec in describe(arrived.items()):
            if spec.digest != digests.get(spec.name):
                raise RefusedError(f"tensor {spec.name} arrived damaged: its digest is not the one that was sent")
        return arrived

    def _adapters(self, info: Update) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the adapters of an update."""
        if info.base != self.base_digest:
            raise RefusedError("the weights that these adapters belong to have not been sent")
        if unknown := sorted(layer for layer in info.scale if f"{layer}.weight" not in self.base):
            raise RefusedError(f"{unknown[0]} has adapters but is not one of the model's layers")
        return adapter_shapes(Base(self.base, info.scale), info.tensors)

    def _merged(self, arrived: dict[str, Tensor], info: Update) -> dict[str, Tensor]:
        """What to load: what arrived, or the base with the adapters that arrived. A base that is not used any more is
        given up."""
        if not info.base:
            self._forget_base()
            return arrived
        merged = merge(Base(self.base, info.scale), arrived)
        _refuse_infinite({f"{layer}.weight": merged[f"{layer}.weight"] for layer in info.scale})
        return merged

    def _parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a Hugging Face model of this config. Tied parameters have one name."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model.config)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def _load(self, arrived: dict[str, Tensor]) -> None:
        config = getattr(self, "model_config", None)  # vLLM 0.24 does not pass it; only its type is needed
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(arrived.items()))
        finalize_layerwise_reload(self.model, config or SimpleNamespace(dtype=next(self.model.parameters()).dtype))
        head = getattr(self.model, "lm_head", None)
        pack = getattr(getattr(head, "quant_method", None), "process_weights_after_loading", None)
        if pack is not None and not next(self.model.parameters()).is_cuda:
            pack(head)  # a head that is tied to the embedding keeps its old packed copy on a CPU otherwise
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def _describe(self, arrived: dict[str, Tensor]) -> list[list[Any]]:
        """Digests from the model's memory where it holds a tensor as it was sent, else of what arrived."""
        own = dict(self.model.named_parameters())
        held = {}
        for name, tensor in arrived.items():
            mine = own.get(name)
            same = mine is not None and (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
            held[name] = mine.data if same and mine is not None else tensor
        return [[spec.name, list(spec.shape), spec.dtype, spec.digest] for spec in describe(held.items())]


def _refuse_infinite(named: dict[str, Tensor]) -> None:
    for name, tensor in named.items():
        if not bool(tensor.isfinite().all()):
            raise RefusedError(f"tensor {name} has values that are not finite")


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
