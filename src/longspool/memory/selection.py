"""What a decoding step reads of the settled zone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..roles import Select
from ..values import Rows
from .pools import piece
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory


def selected(group: Sequence[LayerMemory], q: Tensor, rows: Rows, view: LayerView) -> Rows:
    """All of rows, or while decoding what the layer's Select takes of them; whole pages where the codec can't be read in pieces."""
    plan = group[0].plan
    select = plan.one(Select)
    if select is None or view.step.phase == "prefill":
        return rows
    picked = select.select(q, rows, view)
    _count_read(group, select, picked, rows)
    return picked.uncut(rows) if picked.grain < rows.grain == piece(plan) else picked


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
