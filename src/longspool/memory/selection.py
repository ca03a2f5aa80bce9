"""What a decoding step reads of the settled zone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels import merge
from ..roles import Seen, Select
from ..values import Rows
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory

Part = tuple[Tensor, Tensor]


def selected(group: Sequence[LayerMemory], q: Tensor, rows: Rows, view: LayerView) -> Seen:
    """All of rows, or while decoding what the layer's Select takes of them."""
    select = group[0].plan.one(Select)
    if select is None or view.step.phase == "prefill":
        return Seen(rows)
    seen = select.select(q, rows, view)
    _count_read(group, select, seen.rows, rows)
    return seen


def merged(parts: Sequence[Part], seen: Seen | None) -> Part:
    """What was read exactly, with what a selection estimates of the rest."""
    every = [*parts, *(seen.parts if seen is not None else ())]
    out, lse = merge([o for o, _ in every], [s for _, s in every]) if len(every) > 1 else every[0]
    if seen is not None and seen.rest is not None:
        out, lse = merge([out, seen.rest[0]], [lse, lse + seen.rest[1]])
    return out, lse


def _count_read(group: Sequence[LayerMemory], select: Select, picked: Rows, rows: Rows) -> None:
    """Each request's tokens that the selection reads, of those that it could."""
    share = picked.count // rows.count
    if len(group) == 1:
        group[0].count(select, tokens_read=picked.total, tokens_stored=rows.total * share)
        return
    for memory, read, stored in zip(
        group, picked.length.numpy().reshape(len(group), -1), rows.length.numpy().reshape(len(group), -1), strict=True
    ):
        memory.count(select, tokens_read=int(read.sum()), tokens_stored=int(stored.sum()) * share)
