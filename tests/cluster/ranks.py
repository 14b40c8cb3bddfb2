"""Ranks for tests: they stay up while one learner after the other is made on them, and they show their gradient."""

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from solera.cluster import sending
from solera.cluster.passing import Sent, Way
from solera.config import LearnConfig, LoraConfig, ObjectiveConfig
from solera.models import loading
from solera.models.digest import describe
from solera.models.language_model import LanguageModel, with_capped_scores
from solera.objectives.objective import compose
from solera.objectives.table import resolve
from solera.records import TensorSpec
from solera.sharded.learner import ShardedLearner
from solera.sharded.model import gathered, gathered_together, gathering_mesh
from solera.sharded.processes import Processes
from solera.sharded.rank import GroupPeers, LearnerSpec, Rank, Seat, make_rank
from solera.sharded.ranks import Ranks
from tests.conftest import END, VOCABULARY
from tests.learner.test_invariance import TEMPERATURE


def llama(tied: bool = False, dtype: torch.dtype = torch.float64, state: dict[str, Any] | None = None) -> LanguageModel:
    """A random Llama, the same in every process. Eleven tokens cannot be divided evenly by two or three ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.3, eos_token_id=END,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LanguageModel(LlamaForCausalLM(config).to(dtype).eval())
    if state is not None:
        with torch.no_grad():
            for name, parameter in model.parameters().items():
                parameter.copy_(state[name])
    return model


def embedded() -> LanguageModel:
    return loaded_whole(loading.Source("embedded"))


def loaded_whole(source: loading.Source) -> LanguageModel:
    return source.load(torch.device("cpu"))[0]


def read_whole(folder: Path) -> LanguageModel:
    """A model of a folder without a tokenizer, as transformers loads it."""
    return LanguageModel(with_capped_scores(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval())


def adapted_llama() -> LanguageModel:
    """The same with LoRA adapters that change its output."""
    model = loading.with_adapter(llama(), LoraConfig(rank=2, alpha=4.0), "nowhere", seed=0)
    model.module.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def spec_of(objective: ObjectiveConfig, load=llama, **learn) -> LearnerSpec:
    config = LearnConfig(**{"lr": 0.0, "grad_clip": 1e9, "warmup": 0, **learn})
    return LearnerSpec(load, compose(resolve(objective)), config, "test", TEMPERATURE, 8, 10, torch.float32)


class Reusable:
    """A rank that becomes a new learner with each `begin`."""

    def __init__(self, seat: Seat) -> None:
        self.peers = GroupPeers(seat)

    def begin(self, spec: LearnerSpec) -> None:
        self.rank = Rank(spec, self.peers)

    def gradient(self) -> torch.Tensor:
        model = self.rank.learner.model
        return torch.cat([model.whole(p.grad).flatten() for p in model.parameters().values()])

    def whole(self) -> dict[str, torch.Tensor]:
        """All weights, put together by torch."""
        return {name: p.detach().full_tensor() for name, p in self.rank.learner.model.parameters().items()}

    def frozen(self) -> tuple[TensorSpec, ...]:
        """Describes the weights that are not trained, put together by torch."""
        named = self.rank.learner.model.module.named_parameters()
        return describe((name, p.full_tensor()) for name, p in named if not p.requires_grad)

    def peak(self) -> int:
        """Most bytes of memory that this process has held since `forget_peak`."""
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    def forget_peak(self) -> int:
        """Returns the bytes of memory that it holds now."""
        Path("/proc/self/clear_refs").write_text("5")
        return self.peak()

    def parts(self) -> int:
        """Elements of the weights that this rank holds."""
        return sum(p.to_local().numel() for p in self.rank.learner.model.parameters().values())

    def slow_down(self, seconds: float) -> None:
        """Let each layer take so much longer, as on a slower machine."""
        for layer in self.rank.learner.model.module.model.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))

    def gathered(self, shape: tuple[int, ...], dtype: str) -> dict[str, torch.Tensor]:
        """A tensor that is divided among the ranks, put together by us and by torch."""
        torch.manual_seed(0)
        mesh = DeviceMesh.from_group(self.peers.of_tensors, "cpu")
        whole = torch.randn(shape).to(getattr(torch, dtype))
        divided = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        other = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
        partly = DTensor.from_local(whole, mesh, [Partial()])
        gathering = gathering_mesh(mesh)
        assert gathering.device_type == "cpu"
        return {
            "whole": whole, "ours": gathered(divided, gathering), "torch's": divided.full_tensor(),
            "sum": gathered(partly, gathering),
            "together": gathered_together([divided, other, divided], torch.bfloat16, gathering),
        }  # fmt: skip

    def visible(self) -> str:
        """The GPUs that this process may use."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def read(self, given: bytes) -> int:
        return len(given)

    def compute(self, seconds: float) -> float:
        """Use this rank's processor, without a word to the others."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            torch.ones(100, 100) @ torch.ones(100, 100)
        return seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank, name)


def noting_rank(spec: LearnerSpec, file: Path, seat: Seat) -> Rank:
    """A rank that writes down how it sends each message."""
    pack = sending.packed

    def packed_and_noted(tensor: torch.Tensor, how: Way, group: str) -> Sent:
        with file.open("a") as noted:
            print(how, file=noted)
        return pack(tensor, how, group)

    sending.packed = packed_and_noted
    return make_rank(spec, seat)


def start(count: int, timeout: float = 60.0) -> Ranks:
    return Ranks(Processes(count, Reusable, timeout), timeout)


def begin(ranks: Ranks, spec: LearnerSpec) -> ShardedLearner:
    ranks.call("begin", [(spec,)] * ranks.count)
    return ShardedLearner(spec, ranks)


def gradient(ranks: Ranks) -> torch.Tensor:
    return ranks.call("gradient", [()] * ranks.count)[0]


tied_llama = partial(llama, True)
float32_llama = partial(llama, True, torch.float32)
