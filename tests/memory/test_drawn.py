"""The attention that each token has drawn since it came travels with it, whatever becomes of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from longspool.errors import PlanError
from longspool.memory import LayerView
from longspool.memory.file import load, save
from longspool.method import Method, Needs, Paper
from longspool.roles import Evict, Kept, View
from longspool.values import Step
from onelayer import SHAPE, Bench, recipe
from toolbox import Job, Rig, words
from toys import Every, Odd


@dataclass(frozen=True)
class Tally(Method, Evict):
    """Drops nothing, and counts."""

    often: bool = False
    recent: int = 8
    slug: ClassVar[str] = "tally"
    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[dict[str, object]] = {}

    def needs(self) -> Needs:
        return Needs(recent=self.recent, drawn=True)

    def due(self, step: Step) -> bool:
        return self.often or super().due(step)

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        return Kept(tuple(torch.nonzero(row >= 0)[:, 0] for row in pos))


class Books:
    """What each position of each row has drawn, kept in a dict by float64 attention over the tokens that a layer says it holds."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.rows: list[dict[int, float]] = [{} for _ in range(2)]

    def feed(self, n: int, phase: str = "prefill", final: bool = True) -> None:
        bench, first = self.bench, self.bench.seen
        before = [p.tolist() for p in bench.memory.positions()]
        bench.feed(n, phase, final)  # type: ignore[arg-type]
        new = list(range(first, first + n))
        for r, old in enumerate(before):
            at = torch.tensor(old + new)
            hidden = at > torch.tensor(new)[:, None]
            for h in range(3 * r, 3 * r + 3):
                logits = bench.logits(bench.q[first : first + n, h], bench.k[at, r]).masked_fill(hidden, -torch.inf)
                for p, m in zip(at.tolist(), logits.softmax(-1).sum(0).tolist(), strict=True):
                    self.rows[r][p] = self.rows[r].get(p, 0.0) + (m if phase != "verify" else 0.0)

    def check(self) -> None:
        memory = self.bench.memory
        assert memory.drawn is not None
        whole = memory.drawn.whole(memory.longest + len(memory.pos))
        for r, held in enumerate(memory.positions()):
            settled = len(held) - len(memory.pos)
            mine = torch.cat([whole[r, :settled], whole[r, memory.longest :]])
            expected = torch.tensor([self.rows[r][p] for p in held.tolist()], dtype=torch.float64)
            torch.testing.assert_close(mine.double(), expected, atol=1e-4, rtol=1e-4)


CASES = {
    "nothing settles before the end": [Tally()],
    "at every step": [Tally(True)],
    "rows of different lengths": [Tally(), Every(when="chunk")],
    "admission that differs by head": [Odd(), Tally()],
    "heavy hitters while decoding": recipe("h2o(budget=60, window=16, when=16)"),
    "whole pages on the host": [Tally(True), *recipe("headinfer(window=8)")],
    "codes": [Tally(), *recipe("int8(window=8)")],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [(195,), (64, 64, 67), (1, 90, 104)])
def test_travels_with_its_token(name: str, chunks: tuple[int, ...]) -> None:
    books = Books(Bench(*CASES[name]))
    for i, n in enumerate(chunks):
        books.feed(n, final=i == len(chunks) - 1)
        if name != "codes":
            books.check()
    for _ in range(70):
        books.feed(1, "decode")
    if name != "codes":  # whose keys are not those that the books reckon with
        books.check()
    assert books.bench.memory.drawn is not None
    assert books.bench.memory.drawn.nbytes <= 4 * 2 * (books.bench.memory.longest + len(books.bench.memory.pos))


def test_what_is_taken_back_drew_and_gave_nothing() -> None:
    books = Books(Bench(Tally(recent=16)))
    books.feed(100)
    books.feed(1, "decode")
    books.bench.feed(5, "verify")
    books.bench.memory.truncate(101)
    books.bench.seen = 101
    books.check()
    books.feed(1, "decode")
    books.check()


def test_a_need_that_was_not_declared_is_named() -> None:
    memory = Bench().memory
    view = LayerView(0, SHAPE, Step(torch.zeros(1), torch.zeros(1), (0, 1), (1,), "decode", (True,)), memory.rows(), (memory,))
    with pytest.raises(PlanError, match="drawn=True"):
        _ = view.drawn
    with pytest.raises(PlanError, match=r"weights=\('o',\)"):
        view.weights("o")
    with pytest.raises(PlanError, match="text=True"):
        view.pieces(torch.zeros(1, dtype=torch.long))


def test_forks_files_and_drafts_carry_it(tmp_path: Path) -> None:
    """A fork, a file and a draft evict as the memory itself does."""
    rig, other = Rig(), Rig()
    plan = rig.plan("h2o(budget=80, window=16, when=16)")
    ids = words(240, 3)
    expected, _ = rig.run(Job(plan, ids, 200, 64))
    memory = rig.read(plan, ids[:200], 64)
    save(memory, tmp_path / "m", "x")
    again, twin = load(tmp_path / "m", plan, other.pools, other.engine._rotates, "x"), memory.fork()
    rig.drip(memory, words(30, 9))
    torch.testing.assert_close(other.drip(again, ids[200:]), expected[200:], atol=1e-5, rtol=0)
    torch.testing.assert_close(rig.drip(twin, ids[200:]), expected[200:], atol=1e-5, rtol=0)
    draft = rig.plan("vericache(h2o(budget=80, window=16))")
    request = rig.answer(draft, ids[:200], max_tokens=12)
    assert request.error is None and request.actions["vericache"]["drafted"] > 0
    full = rig.read(draft, ids[:200], 64)
    inner = rig.plan("h2o(budget=80, window=16)")
    step = Step(torch.tensor(ids[199:200]), torch.tensor([199]), (0, 1), (200,), "prefill", (True,))
    refitted, direct = full.refit(inner, step), rig.read(inner, ids[:200], 64)
    for layer in range(3):
        assert all(map(torch.equal, refitted.positions(layer), direct.positions(layer)))


def test_is_not_observed_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch: each request's step is watched by itself."""
    from longspool.memory import mass

    seen: list[tuple[str, int]] = []
    real = mass._mass

    def counted(memory, q, lse, step):  # type: ignore[no-untyped-def]
        seen.append((step.phase, int(step.pos[-1])))
        return real(memory, q, lse, step)

    monkeypatch.setattr(mass, "_mass", counted)
    rig = Rig()
    rig.run(Job(rig.plan("h2o(budget=96, window=16)"), words(160), 150, 64))
    assert {phase for phase, _ in seen} == {"prefill"} and len(seen) == 3 * 3
    seen.clear()
    plan = rig.plan("longflow(budget=96, window=16)")
    rig.together([Job(plan, words(160), 130), Job(plan, words(150, 1), 117)])
    assert sorted(set(seen)) == [("decode", 128), ("decode", 144)] and len(seen) == 3 * 3
