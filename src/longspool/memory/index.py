"""What a Select knows of a layer's settled tokens beside page summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..roles import Select
from ..values import Step
from .view import LayerView

if TYPE_CHECKING:
    from .layer import LayerMemory


def learn(memory: LayerMemory, step: Step) -> None:
    """Let the layer's Select look at what has settled."""
    select = memory.plan.one(Select)
    if select is not None and memory.settled is not None and memory.settled.length.any():
        keep(memory, select.index(memory.index, LayerView(memory.layer, memory.shape, step, memory.rows(), (memory,))))


def keep(memory: LayerMemory, known: dict[str, Tensor]) -> None:
    """Know this from now on."""
    memory.pools.ledger.add("device", weight(known) - weight(memory.index))
    memory.index = known


def weight(index: dict[str, Tensor]) -> int:
    """Bytes of an index."""
    return sum(x.nbytes for x in index.values())


def growth(memory: LayerMemory, tokens: int) -> int:
    """Bytes that the index grows by at most while so many tokens enter."""
    select = memory.plan.one(Select)
    if select is None or memory.settled is None:
        return 0
    most = select.index_bytes(memory.shape, int(memory.settled.length.max()) + len(memory.pos) + tokens)
    return max(most - weight(memory.index), 0)
