"""What the tests of selecting methods share: a view of rows over a pool, and what a run selected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from longspool.memory import LayerView, Ledger, Pool
from longspool.method import Method
from longspool.roles import Seen, Select
from longspool.values import Rows, Shape, Step
from toolbox import Job, Rig, Trace, causal, masked_logits

SHAPE = Shape(1, 4, 2, 16, 64, 10, 4096, 0.25, (None,))


@dataclass
class Sight:
    """Rows over summaries, as `select` is shown them; requests have spans[b] to spans[b + 1] queries."""

    store: Pool
    spans: tuple[int, ...]
    layer: int = 0
    shape: Shape = SHAPE
    counted: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def step(self) -> Step:
        n, requests = self.spans[-1], len(self.spans) - 1
        return Step(torch.zeros(n), torch.zeros(n), self.spans, (1,) * requests, "decode", (True,) * requests)

    def summary(self, name: str) -> Tensor:
        return self.store[name]

    def count(self, method: Method, request: int = 0, **amounts: float) -> None:
        self.counted[request] |= amounts


def summarised(method: Select, keys: Sequence[Tensor], page: int) -> tuple[Pool, Rows]:
    """Rows of keys [n, D], which are summarised page by page."""
    store = Pool(method.fields(SHAPE, page), page, "device", Ledger(), 1 << 24)
    tables = []
    for k in keys:
        count = -(-len(k) // page)
        pages = torch.from_numpy(store.take(count)[::-1].copy())
        padded = torch.nn.functional.pad(k, (0, 0, 0, count * page - len(k)), value=99.0).view(count, page, -1)
        fill = torch.full((count,), page, dtype=torch.int32)
        fill[-1] = len(k) - (count - 1) * page
        method.summarise(store, pages.long(), fill, padded.transpose(1, 2).contiguous())
        tables.append(pages.to(torch.int32))
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    return store, Rows(table, torch.tensor([len(k) for k in keys], dtype=torch.int32), page)


def places(rows: Rows, picked: Rows, row: int) -> list[int]:
    """The in-row indices of the tokens that were picked of a row, from what the tables say."""
    per, tokens = rows.grain // picked.grain, []
    pages = rows.table[row].tolist()
    for entry in picked.table[row, : int(picked.filled[row])].tolist():
        start = pages.index(entry // per) * rows.grain + entry % per * picked.grain
        tokens += range(start, min(start + picked.grain, int(rows.length[row])))
    assert len(tokens) == int(picked.length[row])
    return tokens


class Watched:
    """A run of which every selection is written down, and the same attention computed apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: type[Select], recipe: str, ids: list[int], prompt: int, chunk: int) -> None:
        self.seen: dict[tuple[int, int], tuple[list[list[int]], list[list[int]]]] = {}
        """By layer and position: for each KV head the positions that had settled, and those that were picked."""
        select = method.select

        def watched(own: Select, q: Tensor, rows: Rows, view: LayerView) -> Seen:
            seen = select(own, q, rows, view)
            picked = seen.rows
            held = view.memories[0].positions()
            self.seen[view.layer, int(view.step.pos[0])] = (
                [held[h][: int(rows.length[h])].tolist() for h in range(rows.count)],
                [held[h][places(rows, picked, h)].tolist() for h in range(rows.count)],
            )
            return seen

        monkeypatch.setattr(method, "select", watched)
        rig = Rig()
        self.model, self.ids = rig.model, ids
        self.logits, self.memory = rig.run(Job(rig.plan(recipe), ids, prompt, chunk))

    @property
    def picked(self) -> list[list[list[int]]]:
        return [picked for _, picked in self.seen.values()]

    def expected(self) -> Tensor:
        """Attention in float64 over what was selected and what had not settled."""

        def seen(layer: int, trace: Trace) -> Tensor:
            mask = causal(len(self.ids)).repeat(4, 1, 1)
            for (own, at), (settled, picked) in self.seen.items():
                for h in range(4) if own == layer else ():
                    mask[h, at, sorted(set(settled[h // 2]) - set(picked[h // 2]))] = False
            return mask

        return masked_logits(self.model, self.ids, seen)[0]
