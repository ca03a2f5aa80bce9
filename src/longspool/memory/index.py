"""What a Select knows and asks beside page summaries: an index of a layer's settled tokens, and scores of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import key_scores
from ..roles import Select
from ..values import Rows, Step

if TYPE_CHECKING:
    from .layer import LayerMemory


def learn(memory: LayerMemory, step: Step) -> None:
    """Let the layer's Select look at what has settled."""
    from .view import LayerView

    select = memory.plan.one(Select)
    if select is not None and memory.settled is not None and memory.settled.length.any():
        memory.keep(select.index(memory.index, LayerView(memory.layer, memory.shape, step, memory.rows(), (memory,))))


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


def scores(memory: LayerMemory, rows: Rows, step: Step, q: Tensor, dims: Tensor | None) -> Tensor:
    """See View.scores. They are computed where the keys are, of keys as they are stored where these are floats."""
    from .fetch import pages_of
    from .near import decoded

    store = memory.store
    pages = memory.encode.plain(store) if store.disk is None else None
    if pages is None:
        ids, rows = pages_of(rows, store.page)
        pages = decoded(memory, ids)
    return key_scores(q.to(pages[0].device), pages[0], rows.table, rows.length, step.spans, dims).to(q.device)


def recent_scores(group: Sequence[LayerMemory], step: Step, q: Tensor, dims: Tensor | None) -> Tensor:
    """See View.recent_scores."""
    from .attend import recent_rows, visible

    rows, members = recent_rows(list(group)), list(group)
    score = key_scores(q, members[0].recent.pool["k"], rows.table, rows.length, step.spans, dims)
    _, hi = visible(members, step)
    if hi is not None:
        past = torch.arange(score.shape[2]) >= hi[:, None]
        score = score.masked_fill(past.to(q.device)[:, None], -torch.inf)
    if step.tree is not None:
        n = int(rows.length[0])
        score[:, :, n - len(q) : n].masked_fill_(~step.tree.to(q.device)[:, None], -torch.inf)
    return score
