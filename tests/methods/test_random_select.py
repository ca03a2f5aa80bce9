"""The control: as many tokens as were asked for, each as likely as any other, and others for every token, head and layer."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from longspool.methods.select.random_select import RandomSelect, _drawn, _mixed
from longspool.roles import Seen
from longspool.values import Rows
from toolbox import Job, Rig, words

N, MORE, WINDOW = 200, 10, 16
OLD = (N - WINDOW) // 16 * 16
IDS = words(N + MORE, 32)


class Watched(RandomSelect):
    """Keeps what was selected, by layer."""

    slug: ClassVar[str] = "watched"
    found: ClassVar[list[tuple[int, Rows, Rows]]] = []

    def select(self, q: torch.Tensor, rows: Rows, view: object) -> Seen:
        seen = super().select(q, rows, view)  # type: ignore[arg-type]
        self.found.append((view.layer, rows, seen.rows))  # type: ignore[attr-defined]
        return seen


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("sinks", [0, 20])
def test_reads_its_budget_and_the_sinks(tokens: bool, sinks: int) -> None:
    rig, budget = Rig(), 64
    Watched.found.clear()
    _, memory = rig.run(Job(rig.plan(Watched(budget, WINDOW, sinks=sinks, tokens=tokens)), IDS, N))
    assert memory.actions["watched"] == {"tokens_read": 3 * MORE * 2 * budget, "tokens_stored": 3 * MORE * 2 * OLD}
    chosen = set()
    for layer, rows, picked in Watched.found:
        for r in range(2):
            slots, mine = rows.slots(r), picked.slots(r)
            at = (slots[None] == mine[:, None]).nonzero()[:, 1]
            assert len(at) == budget == len(set(at.tolist())), "each one once, and of this row"
            whole = sinks if tokens else -(-sinks // 16) * 16
            assert set(range(whole)) <= set(at.tolist())
            if not tokens:
                assert all(len([j for j in at.tolist() if j // 16 == p]) in (0, 16) for p in range(OLD // 16))
            chosen.add((layer, r, tuple(sorted(at.tolist()))))
    assert len(chosen) > (3 * MORE * 2 if tokens else 3 * MORE) * 3 // 4, "for each token, head and layer anew"


def test_the_seed_and_nothing_else_changes_the_draw() -> None:
    rig = Rig()
    first, again, other = (rig.run(Job(rig.plan(f"random_select(budget=64, window=16, seed={seed})"), IDS, N))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and float((first - other)[N:].abs().max()) > 1e-3


def test_draws_are_even_and_independent() -> None:
    """Means, and correlations between neighbouring counters and columns, as of 200,000 independent numbers: within 5 deviations."""
    x = _drawn(_mixed(torch.arange(1000)), 200).double()
    assert float(x.min()) >= 0 and float(x.max()) < 1
    n = x.numel()
    assert abs(float(x.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert float((x.mean(0) - 0.5).abs().max()) < 5 * (1 / 12 / 1000) ** 0.5
    assert float((x.mean(1) - 0.5).abs().max()) < 5 * (1 / 12 / 200) ** 0.5
    z = (x - 0.5) * 12**0.5
    for a, b in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[1:, 1:], z[:-1, :-1]), (z[1:, :-1], z[:-1, 1:])):
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5
