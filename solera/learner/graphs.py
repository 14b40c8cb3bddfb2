"""The learner's pass through a model's body, forward and backward, as two CUDA graphs for each size of a micro-batch.

With a small model the GPU waits for the host, which starts over a thousand kernels a pass and holds Python's lock
meanwhile. A replay starts all of them at once. Micro-batches are padded to few sizes, whether a size is recorded or
not, so a replay starts the same kernels as the pass that it replaces. On a GPU the bits are usually the same, but not
always (docs/engines.md, "Compiling"). The embedding is not recorded, because it may share its weights with the head.
"""

import gc
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from solera.engines.fused import KNOWN
from solera.learner.rows import MicroBatch, places_for
from solera.models.language_model import SHORT, LanguageModel
from solera.models.memory import RECORDED_SHARE, allowed_bytes, recording
from solera.models.tiling import largest_size

MOST_PLACES = places_for(24_576)
"""Most places of a recorded pass. More would take more memory and save no time."""
FEWEST_PLACES = places_for(4096)
"""If not even these can be recorded, most updates would gain nothing."""
WORK = 1.2e11
"""Places times weights of a layer, up to which a GPU waits for the host. A layer of a plain pass takes the host 2.4 ms,
and an H200 computes so much in that time at 300 TFLOP/s: `6 · WORK / 300e12 = 2.4 ms`."""
FIRST_USES = 1
"""Updates that use a size before it is recorded. Recording takes about as long as ten passes."""


def most_places(model: LanguageModel, bytes_per_token: float) -> int:
    """The largest size of a micro-batch that is recorded; 0 if none is. It depends on nothing that changes during a
    run, so a resumed run pads alike."""
    layers: Any = model.body.layers
    dense = all(type(layer).__name__ in KNOWN for layer in layers)  # experts may ask the host how many tokens they get
    if not (dense and model.module.dtype in SHORT):
        return 0
    gradients = sum(parameter.nbytes for parameter in model.parameters().values() if parameter.requires_grad)
    memory = RECORDED_SHARE * allowed_bytes(model.device) - gradients
    return worthwhile(int(min(MOST_PLACES, WORK / _layer_weights(model), memory / bytes_per_token)))


def waits_for_host(model: LanguageModel, tokens: int) -> bool:
    """Whether a plain training pass over so many tokens takes the host longer than the GPU."""
    return model.device.type == "cuda" and tokens * _layer_weights(model) < WORK


def _layer_weights(model: LanguageModel) -> float:
    """Of a layer on average."""
    layers: Any = model.body.layers
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters()) / len(layers)


def worthwhile(places: int) -> int:
    """The largest padded size of at most so many places; 0 if it is too small to be worth it.

    >>> worthwhile(5183), worthwhile(5184), worthwhile(4159), worthwhile(20_000)
    (4160, 5184, 0, 16448)
    """
    size = largest_size(places_for, places)
    return size if size >= FEWEST_PLACES else 0


@dataclass(eq=False)
class Shared:
    """What the passes of all sizes read and write. Only one of them is under way at a time."""

    model: LanguageModel
    parameters: list[nn.Parameter]
    """The trained parameters of the body without its embedding."""
    embedded_LH: Tensor
    hidden_LH: Tensor
    grad_hidden_LH: Tensor
    grad_embedded_LH: Tensor
    grads: list[Tensor]
    """Of `parameters`."""
    turn: int = 0
    """Counts forward and backward passes."""

    @classmethod
    def of(cls, model: LanguageModel, places: int) -> "Shared":
        embedding = {id(parameter) for parameter in model.module.get_input_embeddings().parameters()}
        body = {id(parameter) for parameter in model.body.parameters()} - embedding
        own = [parameter for parameter in model.parameters().values() if parameter.requires_grad]
        parameters = [parameter for parameter in own if id(parameter) in body]
        shape, dtype = (places, model.module.config.get_text_config().hidden_size), model.module.dtype
        outer, inner = (
            [torch.zeros(shape, dtype=kind, device=model.device) for _ in range(2)]
            for kind in (torch.float32 if model.is_wide else dtype, dtype)
        )
        grads = [torch.empty_like(parameter) for parameter in parameters]
        return cls(model, parameters, outer[0], inner[0], inner[1], outer[1], grads)


class Pass:
    """Forward and backward pass over a number of places, from static inputs to static outputs. Without CUDA graphs the
    same steps run one by one."""

    def __init__(self, shared: Shared, micro: MicroBatch) -> None:
        assert micro.texts is not None
        places = micro.token_RL.numel()
        embeds = any(parameter.requires_grad for parameter in shared.model.module.get_input_embeddings().parameters())
        self.shared = shared
        # A row of its own length: with the stride of a longer one, torch's compiler would compile again.
        self.embedded_RLH = shared.embedded_LH[:places][None].detach().requires_grad_(embeds)
        self.grad_embedded_RLH = shared.grad_embedded_LH[:places][None]
        self.hidden_RLH, self.grad_hidden_RLH = shared.hidden_LH[:places][None], shared.grad_hidden_LH[:places][None]
        self.position_RL = micro.position_RL.clone()
        self.texts = replace(
            micro.texts, query_tiles=micro.texts.query_tiles.clone(), key_tiles=micro.texts.key_tiles.clone()
        )
        self.given: list[bool] = []
        """Whether embedding and parameters get a gradient."""
        self._result: Tensor | None = None
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    def take(self, micro: MicroBatch) -> None:
        """Take positions and texts of a micro-batch of this size."""
        assert micro.texts is not None
        tiles = self.texts.query_tiles, self.texts.key_tiles
        self.position_RL.copy_(micro.position_RL)
        tiles[0].copy_(micro.texts.query_tiles)
        tiles[1].copy_(micro.texts.key_tiles)
        self.texts = replace(micro.texts, query_tiles=tiles[0], key_tiles=tiles[1])

    def forward(self, embedded_RLH: Tensor) -> tuple[Tensor, int]:
        """Hidden states, and the turn after which the backward pass has to come."""
        self.embedded_RLH.copy_(embedded_RLH)
        if self._graphs is None:
            self._forward()
        else:
            self._graphs[0].replay()
        self.shared.turn += 1
        return self.hidden_RLH.clone(), self.shared.turn

    def backward(self, grad_RLH: Tensor, turn: int) -> list[Tensor | None]:
        """Gradients of what the embedding gave and of the parameters."""
        if turn != self.shared.turn:
            raise RuntimeError("another pass has used the memory of this one since its forward pass")
        self.grad_hidden_RLH.copy_(grad_RLH)
        if self._graphs is None:
            self._backward()
        else:
            self._graphs[1].replay()
        self.shared.turn += 1
        # Autograd may keep what it is given, and the next replay overwrites what is written here.
        written = [self.grad_embedded_RLH, *self.shared.grads]
        return [grad.clone() if given else None for grad, given in zip(written, self.given, strict=True)]

    def record(self, stream: torch.cuda.Stream, pool: Any, warm_up: int) -> None:
        """Record both graphs with the static inputs as they are. The steps run `warm_up` times before, so that nothing
        is compiled and no workspace is taken while recording. Afterwards no tensor is kept in the pool: the next
        recording may use all of it."""
        here = torch.cuda.current_stream(self.embedded_RLH.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                self._forward()
                self._backward()
        here.wait_stream(stream)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, step in zip(graphs, (self._forward, self._backward), strict=True):
            with recording(graph, pool, stream):
                step()
        self._graphs = graphs

    def _forward(self) -> None:
        with torch.enable_grad():
            self._result = self.shared.model.hidden_of(self.embedded_RLH, self.position_RL, self.texts)
        self.hidden_RLH.copy_(self._result.detach())

    def _backward(self) -> None:
        result, self._result = self._result, None
        assert result is not None
        trained, parameters = self.embedded_RLH.requires_grad, self.shared.parameters
        inputs = [self.embedded_RLH, *parameters] if trained else parameters
        found = list(torch.autograd.grad(result, inputs, self.grad_hidden_RLH, allow_unused=True))
        of_embedded = found.pop(0) if trained else None
        if of_embedded is not None:
            self.grad_embedded_RLH.copy_(of_embedded)
        pairs = [(to, grad) for to, grad in zip(self.shared.grads, found, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])
        self.given = [grad is not None for grad in (of_embedded, *found)]


class Replayed(torch.autograd.Function):
    """A pass as one operation: `embedded [1, L, H], parameters … -> hidden [1, L, H]`."""

    @staticmethod
    def forward(ctx: Any, one: Pass, embedded_RLH: Tensor, *parameters: Tensor) -> Tensor:
        hidden_RLH, ctx.turn = one.forward(embedded_RLH)
        ctx.one = one
        return hidden_RLH

    @staticmethod
    def backward(ctx: Any, grad_RLH: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.one.backward(grad_RLH, ctx.turn)


class RecordedBody:
    """Recorded passes through the body of a model whose weights are written in place only. They share their memory, so
    a backward pass has to follow its own forward pass before any other."""

    def __init__(self, model: LanguageModel, most: int) -> None:
        self.most = most
        self.passes: dict[int, Pass] = {}
        """By number of places."""
        self._shared = Shared.of(model, most)
        self._seen = Counter[int]()
        on_gpu = model.device.type == "cuda"
        self._place = (torch.cuda.Stream(model.device), torch.cuda.graph_pool_handle()) if on_gpu else None

    def record(self, micros: list[MicroBatch]) -> None:
        """Record those sizes of an update's micro-batches that have been used before. No autograd graph of the model
        may be alive: its leaves belong to the stream that it was made on."""
        for places, micro in {self._size(micro): micro for micro in micros}.items():
            if not places or places in self.passes:
                continue
            self._seen[places] += 1
            if self._seen[places] > FIRST_USES:
                gc.collect()  # a cycle may keep such a graph alive
                self.passes[places] = self._recorded(micro)

    def hidden(self, micro: MicroBatch) -> Tensor | None:
        """Hidden states `[1, L, H]`. `None` if the micro-batch's size is not recorded."""
        one = self.passes.get(self._size(micro))
        if one is None:
            return None
        one.take(micro)
        return Replayed.apply(one, self._shared.model.embed(micro.token_RL), *self._shared.parameters)

    def _size(self, micro: MicroBatch) -> int:
        """Number of places; 0 if the micro-batch is not padded to a size that is recorded."""
        places = micro.padded_places or 0
        return places if places <= self.most else 0

    @torch.no_grad()
    def _recorded(self, micro: MicroBatch) -> Pass:
        one = Pass(self._shared, micro)
        one.embedded_RLH.copy_(self._shared.model.embed(micro.token_RL))
        if self._place is not None:
            one.record(*self._place, warm_up=1 if self.passes else 2)
        return one
