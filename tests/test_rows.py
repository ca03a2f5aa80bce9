"""Rows: picked pages read the tokens they name, and no more."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.values import Rows


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_picked_pages_hold_the_tokens_of_those_pages(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    count, grain, width = 4, 8, 6
    length = torch.randint(1, width * grain + 1, (count,), generator=g, dtype=torch.int32)
    table = torch.randperm(count * width, generator=g).view(count, width).int()
    rows = Rows(table, length, grain)
    picks = [torch.randperm(int(f), generator=g)[: int(torch.randint(0, int(f) + 1, (1,), generator=g))].sort().values for f in rows.filled]
    pick = torch.full((count, max(max(map(len, picks)), 1)), -1, dtype=torch.int32)
    for r, p in enumerate(picks):
        pick[r, : len(p)] = p
    chosen = rows.pages(pick)
    assert chosen.length.dtype == torch.int32 and chosen.table.dtype == torch.int32
    for r, p in enumerate(picks):
        ordinals = torch.div(torch.arange(int(length[r])), grain, rounding_mode="floor")
        assert torch.equal(chosen.slots(r), rows.slots(r)[torch.isin(ordinals, p)])
