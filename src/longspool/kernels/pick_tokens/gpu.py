"""pick_tokens on the GPU: the choice by topk_rows' kernel, the look-up by torch where the tables are."""

from __future__ import annotations

from torch import Tensor

from ..topk_rows import gpu as topk_rows
from .ref import slots_of


def can(score: Tensor, *rest: object) -> str | None:
    return topk_rows.unreachable(score)


def run(score: Tensor, table: Tensor, length: Tensor, page: int, k: Tensor) -> tuple[Tensor, Tensor]:
    many = score.shape[0] // max(table.shape[0], 1)
    index, n = topk_rows.run(score, length.repeat_interleave(many), k)
    return slots_of(index.to(table.device), table.repeat_interleave(many, 0), page), n.to(table.device)
