"""Layers among whose tokens an Evict chooses together, and prompts that are read in pieces of a method's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from longspool.engine.estimate import need
from longspool.engine.score import teacher_forced
from longspool.errors import PlanError
from longspool.method import Method, Needs, Paper
from longspool.plan import Item, Plan, resolve
from longspool.recipe import parse
from longspool.roles import Evict, Kept, View
from longspool.values import Step
from toolbox import Rig, words
from toys import Every, Heavy

CALLS: list[tuple[str, int, int]] = []


@dataclass(frozen=True)
class Whole(Method, Evict):
    """Keeps all tokens of the layer with the largest keys, and every fourth of the others."""

    often: bool = False
    matrix: str = "o"
    slug: ClassVar[str] = "whole"
    together: ClassVar[bool] = True
    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=8, weights=(self.matrix,))

    def due(self, step: Step) -> bool:
        return self.often or super().due(step)

    def weigh(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> None:
        CALLS.append(("weigh", view.layer, view.held))
        view.note(self)[str(view.layer)] = float(k.norm())

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        CALLS.append(("keep", view.layer, view.held))
        note = view.note(self)
        best = max(note, key=lambda name: note[name])  # type: ignore[arg-type,return-value]
        stride = 1 if best == str(view.layer) else 4
        return Kept(tuple(torch.nonzero(row >= 0)[::stride, 0] for row in pos))


def plan(*items: Item) -> Plan:
    return resolve(items, Rig().model.shape, torch.float32)


@pytest.mark.parametrize(("first", "last"), [(0, None), (1, 2), (0, 1), (2, 2)])
def test_every_layer_is_weighed_before_one_is_cut(first: int, last: int | None) -> None:
    rig = Rig()
    CALLS.clear()
    memory = rig.read(plan(Item(Whole(), first, last)), words(200), 64)
    layers = list(range(first, (2 if last is None else last) + 1))
    assert [call[:2] for call in CALLS] == [("weigh", i) for i in layers] + [("keep", i) for i in layers]
    lengths = [[len(p) for p in memory.positions(i)] for i in range(3)]
    assert sorted(map(tuple, (lengths[i] for i in layers))) == [(56, 56)] * (len(layers) - 1) + [(200, 200)] or len(layers) == 1
    assert all(lengths[i] == [200, 200] for i in range(3) if i not in layers)
    memory.check()


def test_windows_between_them_settle_by_themselves() -> None:
    rig = Rig("gemma2")
    CALLS.clear()
    rig.read(resolve((Item(Whole()),), rig.model.shape, torch.float32), words(200), 64)
    full = [layer for layer, window in enumerate(rig.model.shape.windows) if window is None]
    assert [call[:2] for call in CALLS] == [("weigh", i) for i in full] + [("keep", i) for i in full]


def test_settles_as_ever_where_it_is_not_due_and_again_where_it_is() -> None:
    rig = Rig()
    memory = rig.read(plan(Item(Whole())), words(200), 64)
    CALLS.clear()
    rig.drip(memory, words(80, 1))
    assert not CALLS and int(memory[0].rows().length.max()) > 48
    often = rig.read(plan(Item(Whole(True))), words(100))
    CALLS.clear()
    rig.drip(often, words(3, 1))
    assert [call[0] for call in CALLS] == (["weigh"] * 3 + ["keep"] * 3) * 3
    twin = often.fork()
    torch.testing.assert_close(rig.drip(twin, words(20, 2)), rig.drip(often, words(20, 2)), atol=1e-5, rtol=0)


def test_what_a_step_takes_is_foreseen() -> None:
    """The raw pages of all its layers are there until the last has been weighed."""
    rig = Rig(chunk=128)
    made = resolve((Item(Whole(True)),), rig.model.shape, torch.float16)
    memory = rig.engine.empty(made)
    for first in range(0, 512, 128):
        ask = rig.ask(memory, words(128, first), "prefill", 512)
        foreseen = rig.pools.ledger.now["device"] + memory.growth(ask.step)
        rig.pools.ledger.mark()
        rig.feed(memory, words(128, first), "prefill", 512)
        assert rig.pools.ledger.peak["device"] <= foreseen
    request = rig.request(made, words(500), max_tokens=8)
    memory.free()
    rig.pools.ledger.mark()
    rig.engine.run([request])
    assert request.error is None and rig.pools.ledger.peak["device"] <= need(made, 500, 128, 8)


def test_a_matrix_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="whole asks for a matrix 'q'; there are o"):
        plan(Item(Whole(matrix="q")))
    with pytest.raises(PlanError, match="whole chooses among the tokens of all its layers together, and every layer by layer"):
        plan(Item(Whole()), Item(Every()))
    plan(Item(Whole(), 0, 0), Item(Every(), 1))


def test_matrices_are_those_of_the_model() -> None:
    """A packed matrix is unpacked: what it gives is what the block's product gives."""
    rig = Rig()
    for layer, block in enumerate(rig.model.blocks):
        x = torch.randn(5, 64)
        torch.testing.assert_close(x @ rig.model.matrix(layer, "o").T, block.outward(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["trianglemix", "self_extend"])
def test_attention_that_can_not_be_observed_is_refused(recipe: str) -> None:
    with pytest.raises(PlanError, match="heavy counts the attention that tokens draw, which is not observed where"):
        plan(Item(Heavy()), *parse(recipe))


def test_a_prompt_is_read_in_the_pieces_that_a_method_wants() -> None:
    rig = Rig(chunk=256)
    small, large = (rig.plan(f"keydiff(budget=80, block={block}, when='chunk')") for block in (32, 1000))
    assert (small.chunk, large.chunk, rig.plan("keydiff").chunk, rig.plan("int8").chunk) == (32, 1000, None, None)
    ids = words(300)
    pieces = [[len(part) for part in teacher_forced(rig.engine, ids, 300, made)] for made in (small, large)]
    assert pieces == [[32] * 9 + [12], [256, 44]]
    assert need(small, 4000, 256) < need(large, 4000, 256)
    sizes = []
    request = rig.request(small, ids, max_tokens=1)
    rig.engine.submit(request)
    while not request.done:
        before = request.clock.prefilled
        rig.engine.step()
        sizes.append(request.clock.prefilled - before)
    assert request.error is None and [n for n in sizes if n] == [32] * 9 + [12]
    assert Needs(chunk=64).merge(Needs(chunk=32)).chunk == 32 and Needs(chunk=64).merge(Needs()).chunk == 64
