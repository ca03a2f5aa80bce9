"""Selections finer than a page, estimates beside them, and what a Select knows of the settled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layermean import LayerMean
from longspool.engine.forward import forward
from longspool.memory import Memory
from longspool.memory.attend import attend_store
from longspool.memory.file import load, save
from longspool.method import Method, Needs
from longspool.recipe import parse
from longspool.roles import Reach, Seen, Select, View
from longspool.values import Rows, Shape, Step
from longspool.values.flow import Ask
from toolbox import Job, Rig, Trace, attended_logits, causal, masked_logits, words
from toys import PAPER, Every, Pairs

N, MORE, RECENT = 200, 10, 8
OLD = (N - RECENT) // 16 * 16
IDS = words(N + MORE, 21)


def taken(row: int, j: int) -> bool:
    return (7 * j + row) % 3 == 0


@dataclass(frozen=True)
class Thirds(Method, Select):
    """Every row reads other thirds of its settled tokens."""

    per_head: bool = False
    slug: ClassVar[str] = "thirds"
    paper: ClassVar = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=RECENT, page=16, keys="rotated")

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        rows = rows.split(view.shape.group) if self.per_head else rows
        row, j = torch.arange(rows.count) % (rows.count // view.step.requests), torch.arange(rows.table.shape[1] * rows.grain)
        ok = ((7 * j + row[:, None]) % 3 == 0) & (j < rows.length[:, None])
        return Seen(rows.at(torch.where(ok, j, -1).sort(1, descending=True).values))


@dataclass(frozen=True)
class Halves(Method, Select):
    """Reads the even settled tokens and gives the odd ones as a part, or with `odds` as what is left."""

    odds: bool = False
    slug: ClassVar[str] = "halves"
    paper: ClassVar = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=RECENT, page=16, keys="rotated")

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        n, shape = int(rows.length[0]), view.shape
        even = torch.arange(0, n, 2).expand(rows.count, -1)
        logits = view.scores(q)[..., :n] * shape.scale  # [N, H, n]
        values = torch.stack([v for _, v in view.settled([0] * rows.count)]).repeat_interleave(shape.group, 0)  # [H, n, D]
        out = torch.einsum("nht,htd->nhd", logits[..., 1::2].softmax(-1), values[:, 1::2])
        mass = logits[..., 1::2].logsumexp(-1)
        if not self.odds:
            return Seen(rows.at(even), ((out, mass),))
        recent = view.recent_scores(q) * shape.scale
        return Seen(rows.at(even), rest=(out, mass - torch.cat([logits[..., ::2], recent], -1).logsumexp(-1)))


@dataclass(frozen=True)
class Knows(Method, Select):
    """Its index is the sum of the settled keys of each row and their number; it notes how often it was asked."""

    slug: ClassVar[str] = "knows"
    paper: ClassVar = PAPER
    identity: ClassVar[float] = 1.0

    def needs(self) -> Needs:
        return Needs(recent=RECENT, page=16)

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        new = view.settled(old["count"].tolist() if old else [0] * view.rows.count)
        total = torch.stack([k.sum(0) for k, _ in new])
        return {"total": old["total"] + total if old else total, "count": view.rows.length.clone()}

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        return shape.kv_heads * (4 * shape.head_dim + 4)

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        for request, note in enumerate(view.notes(self)):
            note[f"asked {view.layer}"] = int(str(note.get(f"asked {view.layer}", 0))) + 1
            view.count(self, request, asked=1)
        return Seen(rows)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_single_tokens_name_their_slots(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    count, grain, width = 4, 8, 6
    length = torch.randint(1, width * grain + 1, (count,), generator=g, dtype=torch.int32)
    rows = Rows(torch.randperm(count * width, generator=g).view(count, width).int(), length, grain)
    picks = [torch.randperm(int(n), generator=g)[: int(torch.randint(0, int(n) + 1, (1,), generator=g))] for n in length]
    index = torch.full((count, max(max(map(len, picks)), 1)), -1, dtype=torch.int64)
    for r, pick in enumerate(picks):
        index[r, : len(pick)] = pick
    chosen = rows.at(index)
    assert chosen.grain == 1 and chosen.table.dtype == chosen.length.dtype == torch.int32
    for r, pick in enumerate(picks):
        assert torch.equal(chosen.slots(r), rows.slots(r)[pick])
        assert bool((chosen.table[r, len(pick) :] == -1).all())


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    "others", [(), tuple(parse("int8(window=8)")), tuple(parse("int4(window=8)")), (Pairs(),), (Every(),), (LayerMean(),)], ids=str
)
def test_picked_tokens_are_attended_alone(others: tuple, per_head: bool) -> None:
    """Whatever they are stored as: float64 attention over the tokens that the memory reads back."""
    rig = Rig()
    methods = [m.method if not isinstance(m, Method) else m for m in others]
    memory = rig.read(rig.plan([*methods, Thirds()], torch.float16), IDS[:N])[1]
    rows, s = memory.rows(), rig.model.shape
    rows = rows.split(s.group) if per_head else rows
    g = torch.Generator().manual_seed(5)
    index = torch.full((rows.count, 23), -1)
    for r, n in enumerate(rows.length.tolist()):
        pick = torch.randperm(n, generator=g)[: 17 + r]
        index[r, : len(pick)] = pick
    q = torch.randn(1, s.heads, s.head_dim, generator=g) * 2
    out, lse = attend_store(memory, q, memory.store, rows.at(index), Reach((0, 1)))
    settled = memory.read_settled()
    weights = memory.settled_field("weight") if memory.plan.weighted else [torch.zeros(len(k)) for k, _ in settled]
    for h in range(s.heads):
        r = h // s.group
        at = index[h if per_head else r]
        at = at[at >= 0]
        k, v = (x[at].double() for x in settled[r])
        logits = k @ q[0, h].double() * s.scale + weights[r][at].double()
        torch.testing.assert_close(out[0, h].double(), logits.softmax(0) @ v, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[0, h].double(), logits.logsumexp(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("place", ["", "headinfer(window=8)"])
def test_a_step_sees_what_each_row_picked(per_head: bool, place: str) -> None:
    rig = Rig()
    mask = causal(len(IDS)).repeat(4, 1, 1)
    for h in range(4):
        mask[h, N:, [j for j in range(OLD) if not taken(h if per_head else h // 2, j)]] = False
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: mask)
    methods = [Thirds(per_head), *(item.method for item in (parse(place) if place else ()))]
    logits, memory = rig.run(Job(rig.plan(methods), IDS, N))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    rows = range(4 if per_head else 2)
    assert memory.actions["thirds"] == {
        "tokens_read": MORE * 3 * sum(taken(r, j) for r in rows for j in range(OLD)),
        "tokens_stored": MORE * 3 * len(rows) * OLD,
    }
    if place:
        # Prefill fetched nothing, and every page holds some picked token.
        assert memory.actions["headinfer"]["bytes_fetched"] == MORE * 3 * 2 * (OLD // 16) * memory[0].store.page_bytes


@pytest.mark.parametrize("odds", [False, True])
@pytest.mark.parametrize("place", ["", "headinfer(window=8)"])
def test_an_estimate_that_is_exact_changes_nothing(odds: bool, place: str) -> None:
    """The half that is not read is given exactly: as a part with its own mass, or in proportion to what is read."""
    rig = Rig()
    expected, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(len(IDS)))
    methods = [Halves(odds), *(item.method for item in (parse(place) if place else ()))]
    torch.testing.assert_close(rig.run(Job(rig.plan(methods), IDS, N))[0], expected, atol=1e-4, rtol=0)


def test_an_estimate_counts() -> None:
    """Else the test above would pass without it."""
    rig, half = Rig(), causal(len(IDS))
    half[N:, 1:OLD:2] = False
    dense, without = (masked_logits(rig.model, IDS, lambda layer, trace, m=m: m)[0] for m in (causal(len(IDS)), half))
    assert float((dense - without)[N:].abs().max()) > 1e-2


@pytest.mark.parametrize("recipe", ["", "int8(window=8)"])
def test_scores_are_dot_products(recipe: str) -> None:
    """Over the settled keys as they are read back, of all components or of some, and over the recent ones that a query may see; with
    several tokens of two requests, and with a tree."""
    rig, heard = Rig(), []

    @dataclass(frozen=True)
    class Hears(Thirds):
        def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
            dims = torch.stack([torch.tensor([3, 0, 9]) + r % 2 for r in range(rows.count)]).to(torch.int32)
            heard.append((view.layer, q, dims, view.scores(q), view.scores(q, dims), view.recent_scores(q), view.recent_scores(q, dims)))
            return Seen(rows)

    plan = rig.plan([*(i.method for i in (parse(recipe) if recipe else ())), Hears()])
    first, second = rig.read(plan, IDS[:N]), rig.read(plan, words(150, 4))
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    forward(rig.model, [rig.ask(first, IDS[:3], "verify"), rig.ask(second, IDS[:2], "verify")])
    check_scores(heard, [first, second], (0, 3, 5), causal(3), rig.model.shape)
    first.truncate(N)
    heard.clear()
    step = Step(torch.tensor(IDS[:3]), torch.tensor([N, N + 1, N + 1]), (0, 3), (N,), "verify", (True,), tree)
    forward(rig.model, [Ask(step, first, "all")])
    check_scores(heard, [first], (0, 3), tree, rig.model.shape)


def check_scores(heard: list, memories: list[Memory], spans: tuple[int, ...], own: Tensor, shape: Shape) -> None:
    assert len(heard) == 3
    for layer, q, dims, far, some, near, few in heard:
        for b, memory in enumerate(memories):
            settled, recent = memory[layer].read_settled(), memory[layer].read_recent()
            for h in range(shape.heads):
                r, n = h // shape.group, spans[b + 1] - spans[b]
                at, (x,) = dims[b * shape.kv_heads + r].long(), (q[spans[b] : spans[b + 1], h],)
                for got, parts, pick in ((far, settled, slice(None)), (some, settled, at), (near, recent, slice(None)), (few, recent, at)):
                    want = x[:, pick].double() @ parts[r][0][:, pick].double().T
                    if parts is recent:
                        want[:, -n:] = want[:, -n:].masked_fill(~own[:n, :n], -torch.inf)
                    mine = got[spans[b] : spans[b + 1], h]
                    torch.testing.assert_close(mine[:, : want.shape[1]].double(), want, atol=1e-5, rtol=1e-5)
                    assert bool((mine[:, want.shape[1] :] == -torch.inf).all())


def knows(memory: Memory) -> bool:
    """Whether each layer's index tells of all its settled tokens."""
    for layer in memory.layers:
        for r, (k, _) in enumerate(layer.read_settled()):
            if int(layer.index["count"][r]) != len(k) or not torch.allclose(layer.index["total"][r], k.sum(0), atol=1e-4):
                return False
    return True


def test_an_index_follows_what_settles(tmp_path: Path) -> None:
    """Through chunks, decoding, forks, files and evictions that write all settled tokens anew."""
    rig = Rig()
    plan = rig.plan([Knows()])
    memory = rig.read(plan, IDS[:N], 70)
    assert knows(memory) and int(memory[0].index["count"][0]) > 0
    twin = memory.fork()
    assert twin[1].index is memory[1].index
    rig.drip(twin, words(80, 2))
    assert knows(twin) and knows(memory) and int(twin[1].index["count"][0]) > int(memory[1].index["count"][0])
    save(memory, tmp_path / "memory", "tiny")
    again = load(tmp_path / "memory", plan, rig.pools, rig.engine._rotates, "tiny")
    assert again[2].index.keys() == memory[2].index.keys() and all(torch.equal(again[2].index[n], x) for n, x in memory[2].index.items())
    chunked = rig.read(rig.plan([Every(when="chunk"), Knows()]), IDS[:N], 64)
    assert knows(chunked) and int(chunked[1].index["count"][0]) < N // 2
    for m in (memory, twin, again, chunked):
        m.free()
    assert not any(rig.pools.ledger.now.values())


def test_the_end_of_a_prompt_is_told_though_nothing_settles() -> None:
    ends: list[tuple[int, bool]] = []

    @dataclass(frozen=True)
    class Waits(Thirds):
        def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
            ends.append((view.layer, view.step.final[0]))
            return old

    rig = Rig()
    rig.run(Job(rig.plan(Waits()), IDS[:150], 150, 140))  # the second chunk of ten tokens is too short to settle anything
    assert ends == [(layer, final) for final in (False, True) for layer in range(3)]


def test_requests_of_a_step_have_their_own_notes_and_counters() -> None:
    rig = Rig()
    plan = rig.plan(Knows())
    pair = rig.together([Job(plan, IDS, N), Job(plan, IDS[: N + 4], N)])
    assert [m.notes["knows"]["asked 1"] for _, m in pair] == [MORE, 4]
    assert [m.actions["knows"]["asked"] for _, m in pair] == [3 * MORE, 12]


def test_the_plain_runners_agree() -> None:
    """The tests of methods rest on them."""
    rig = Rig("gemma2")

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trace, out = Trace(q, k, v), []
        seen = causal(len(q), rig.model.shape.windows[layer])
        for h in range(4):
            out.append(trace.logits(rig.model.shape, slice(None), h).masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, h // 2])
        return torch.stack(out, 1)

    want, _ = masked_logits(rig.model, IDS, lambda layer, trace: causal(len(IDS), rig.model.shape.windows[layer]))
    torch.testing.assert_close(attended_logits(rig.model, IDS, attention), want, atol=1e-5, rtol=0)
