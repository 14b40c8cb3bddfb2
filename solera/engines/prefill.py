"""Texts that are computed in one pass, and passes of few sizes that are replayed CUDA graphs.

A pass is ten kernels a layer. Started one by one, they take the host longer than the GPU needs for a few thousand
tokens of a small model, and several times as long while a learner's thread holds Python's lock. A graph is one call,
which does not need the lock.

A graph has a fixed number of tokens, so passes are padded. They are padded before their size is recorded, too: a pass
has the same bits with and without a graph, so a run that is resumed is the same as one that was not stopped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from solera.engines.fused import FusedModel
from solera.engines.kv_cache import Places, Prefilling
from solera.engines.pages import NOBODY
from solera.engines.prompts import Group, Stretch
from solera.engines.tables import bucket
from solera.models.attention import PackedTexts, Text, count_up, filler
from solera.models.memory import RECORDING, allowed_bytes, recording, set_aside
from solera.models.pinned import pinned
from solera.models.tiling import largest_size

Numbers = npt.NDArray[np.int64]
FEWEST_TOKENS = 256
"""The smallest pass. Fewer tokens would take as long."""
MOST_BYTES = 3 * 2**28
"""Memory of all graphs. A pass that needs more spends its time on the GPU, not on the host: 768 MiB are 16,384 tokens
of a model of 135 million weights, or 2,048 of one of 8 billion."""
USES = 3
"""Uses of a size after which it is recorded. Recording takes as long as some passes."""
PATIENCE = 30
"""Uses of a size after which recording waits for a learner. Before, a size is recorded when nobody is learning."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Texts that are computed together."""

    texts: Sequence[Text]
    line_4N: Numbers
    """For each token: its id, its position in its text, and where its key and value stay: a page, and a place there."""

    @classmethod
    def of(cls, groups: list[Group], page_tokens: int) -> "Pass":
        """Prompts, each with the texts that continue it."""
        texts, stretches, at = list[Text](), list[Stretch](), 0
        for prompt, responses in groups:
            start, before = at, len(prompt.token_ids)
            texts.append(Text(at, before))
            at += before
            for response in responses:
                texts.append(Text(at, len(response.token_ids), start if before else 0, before))
                at += len(response.token_ids)
            stretches += [prompt, *responses]
        _, length_X, _, before_X = np.array(texts).T
        pages_X = np.array([len(stretch.pages) for stretch in stretches])
        page_P = np.fromiter(chain.from_iterable(stretch.pages for stretch in stretches), np.int64)
        n_N = count_up(length_X)
        line_4N = np.empty((4, at), np.int64)
        line_4N[0] = np.concatenate([stretch.token_ids for stretch in stretches])
        line_4N[1] = n_N + np.repeat(before_X, length_X)
        line_4N[2] = page_P[n_N // page_tokens + np.repeat(pages_X.cumsum() - pages_X, length_X)]
        line_4N[3] = n_N % page_tokens
        return cls(texts, line_4N)

    @property
    def tokens(self) -> int:
        return self.line_4N.shape[1]

    def padded(self, tokens: int) -> "Pass":
        """The same with so many tokens. Those at the end are texts of their own, which write to a place that nobody
        reads."""
        line_4N = np.zeros((4, tokens), np.int64)
        line_4N[2] = NOBODY
        line_4N[:, : self.tokens] = self.line_4N
        return Pass([*self.texts, *filler(self.tokens, tokens)], line_4N)


def size_of(tokens: int) -> int:
    """Tokens of the padded pass: 256, 384, 512, 768, …"""
    return bucket(max(tokens, FEWEST_TOKENS))


def tiles_of(size: int) -> int:
    """Tiles of a padded pass: one for every 16 tokens, but at least 128. Texts of a usual length need fewer."""
    return max(128, size // 16)


class PrefillGraphs:
    """Computes passes of up to `most` tokens with a model in 16 bits, on a GPU."""

    def __init__(self, fused: FusedModel, most: int) -> None:
        self.fused = fused
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.uses = Counter[int]()
        self.records = True
        # No other graphs are recorded on it: some versions of torch take the workspaces of a stream's matrix products
        # away from all graphs recorded on it as soon as one of them is deleted.
        self._stream = torch.cuda.Stream(fused.model.device, priority=-1)
        self._pool = torch.cuda.graph_pool_handle()
        device = fused.model.device
        each = fused.bytes_per_token * 3 // 2  # what is freed in a pass leaves gaps that not everything fits into
        self.most = largest_size(size_of, min(most, min(MOST_BYTES, allowed_bytes(device) // 16) // each))
        self.nbytes = self.most * each
        set_aside(self, self.nbytes)
        self._line = torch.empty(4 * self.most, dtype=torch.int64, device=device)
        self._tile = torch.empty(8 * tiles_of(self.most), dtype=torch.int32, device=device)

    def compute(self, texts: Pass) -> bool:
        """Compute texts, whose keys and values stay in their places. Does nothing and returns False if they are too
        many for a graph: too many tokens, or too many short texts."""
        size = size_of(texts.tokens)
        if size > self.most:
            return False
        texts = texts.padded(size)
        packed = PackedTexts.of(texts.texts).padded(tiles_of(size))
        if packed is None:
            return False
        self._fill(self._line, torch.from_numpy(texts.line_4N))
        self._fill(self._tile, torch.cat([packed.query_tiles.flatten(), packed.key_tiles.flatten()]))
        self.uses[size] += 1
        if size in self.graphs:
            self.graphs[size].replay()
        elif self._should_record(size) and RECORDING.acquire(blocking=self.uses[size] >= PATIENCE):
            try:
                self._record(size)
            finally:
                RECORDING.release()
        else:
            self._run(size)
        return True

    def _fill(self, memory: Tensor, numbers: Tensor) -> None:
        """Copy numbers to where the graphs read them, without waiting for the GPU."""
        memory[: numbers.numel()].copy_(pinned(numbers.flatten(), memory.device), non_blocking=True)

    def _should_record(self, size: int) -> bool:
        return self.records and self.uses[size] >= USES

    def _run(self, size: int) -> None:
        """Compute the pass whose numbers were copied last."""
        token_N, position_N, page_N, at_N = self._line[: 4 * size].view(4, size)
        query_tiles, key_tiles = self._tile[: 8 * tiles_of(size)].split([5 * tiles_of(size), 3 * tiles_of(size)])
        texts = PackedTexts(
            query_end=self._tile[:0], key_end=self._tile[:0], key_K=None,  # which only float32 needs
            query_tiles=query_tiles.view(-1, 5), key_tiles=key_tiles.view(-1, 3),
        )  # fmt: skip
        self.fused.fill(token_N, position_N, Prefilling(texts, Places(page_N, at_N)))

    def _record(self, size: int) -> None:
        """Compute the pass, and record it. It is computed before, so that nothing is compiled while recording."""
        current = torch.cuda.current_stream(self._line.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(size)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self._pool, self._stream):
                if not self.graphs:
                    # The memory of all graphs, as one piece that each divides anew. Otherwise a larger pass would not
                    # find room in the pieces of smaller ones, and take its own beside them.
                    torch.empty(self.nbytes, dtype=torch.uint8, device=self._line.device)
                self._run(size)
        except torch.OutOfMemoryError:
            self.records = False  # passes that are not recorded give their memory back
            return
        self.graphs[size] = graph
