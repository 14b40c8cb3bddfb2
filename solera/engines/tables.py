"""The tables of continuous decoding: what a step reads and writes, at addresses that stay."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

TOKEN, POSITION, PROMPT_LENGTH, STEP, REQUEST, ALIVE, LIMIT = range(7)
"""Lines of the table of rows: last token and its position, tokens of its prompt that are in memory, which token of
which request is next, whether it goes on, and the most tokens of its response: read by the graphs, so that one serves
long and short ones."""


class RowTable(NamedTuple):
    """The lines of the table by name."""

    token: Tensor
    position: Tensor
    prompt_length: Tensor
    step: Tensor
    request: Tensor
    alive: Tensor
    limit: Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """Everything a step reads and writes, at addresses that stay."""

    slots: int
    requests: int
    limit: int
    columns: int
    row_table: Tensor
    page_table: Tensor
    """The pages of each row: its prompt's, then its response's."""
    uniform_BT: Tensor
    token_BT: Tensor
    logp_BT: Tensor
    length_B: Tensor
    finished_B: Tensor

    @classmethod
    def allocate(cls, device: torch.device, slots: int, requests: int, limit: int, columns: int) -> "Memory":
        make = partial(torch.zeros, device=device)
        return cls(
            slots, requests, limit, columns,
            row_table=make(len(RowTable._fields), slots, dtype=torch.int64),
            page_table=make(slots, columns, dtype=torch.int64),
            uniform_BT=make(requests + 1, limit), token_BT=make(requests + 1, limit, dtype=torch.int32),
            logp_BT=make(requests + 1, limit), length_B=make(requests + 1, dtype=torch.int64),
            finished_B=make(requests + 1, dtype=torch.bool),
        )  # fmt: skip

    def holds(self, requests: int, limit: int, columns: int) -> bool:
        return self.requests >= requests and self.limit >= limit and self.columns >= columns


def bucket(rows: int, most: int | None = None) -> int:
    """The next of 8, 12, 16, 24, 32, 48, …: few sizes, so that few graphs are recorded."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if most is None else min(size, most)
