"""One layer's memory against float64 attention over exactly the tokens that it says it holds."""

from __future__ import annotations

import pytest
import torch

from longspool.errors import LongspoolError, PlanError
from longspool.memory import LayerView
from longspool.plan import Item, resolve
from longspool.recipe import parse
from longspool.values import Shape, Step
from onelayer import SHAPE, Bench, as_double, recipe
from toolbox import Rig, words
from toys import Every, Halve, Heavy, Odd, Pairs

CASES = {
    "dense": [],
    "streaming": recipe("streaming(sinks=3, window=8)"),
    "rows of different lengths": [Every()],
    "rows of different lengths, after every chunk": [Every(when="chunk")],
    "admission that differs by head": [Odd()],
    "admission, then eviction": [Odd(), Every()],
    "eviction twice": [Every(2), Every(3, recent=4)],
    "on the host": recipe("headinfer(window=8)"),
    "on the host, different lengths": [Every(), *recipe("headinfer(window=8)")],
    "a pattern that keeps all": [Every(), *recipe("trianglemix(dense=0, window=1000000, block=16)")],
    "a selection that keeps all": [Every(), *recipe("quest(dense=0, budget=100000)")],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [(195,), (64, 64, 67), (1, 90, 104)])
def test_sees_exactly_what_it_holds(name: str, chunks: tuple[int, ...]) -> None:
    bench = Bench(*CASES[name])
    for i, n in enumerate(chunks):
        torch.testing.assert_close(*as_double(bench.feed(n, final=i == len(chunks) - 1)), atol=2e-5, rtol=0)
    for _ in range(12):
        torch.testing.assert_close(*as_double(bench.feed(1, "decode")), atol=2e-5, rtol=0)
    torch.testing.assert_close(*as_double(bench.feed(5, "verify")), atol=2e-5, rtol=0)
    least = [set(range(bench.seen - bench.plan.layers[0].needs.recent, bench.seen)) <= set(p.tolist()) for p in bench.memory.positions()]
    assert all(least), "the recent tokens are there"


def test_holds_the_positions_that_the_methods_chose() -> None:
    bench = Bench(Odd(), Every())
    bench.feed(150)
    settled = 128  # whole pages of what is older than the 8 recent tokens
    odd = [[p for p in range(settled) if p % 2 == r] for r in (0, 1)]
    assert [p.tolist() for p in bench.memory.positions()] == [odd[r][r::3] + list(range(settled, 150)) for r in (0, 1)]
    assert bench.actions["odd"] == {"seen": 256, "dropped": 128}
    assert bench.actions["every"] == {"candidates": 128, "evicted": 128 - 43}


def test_windows_drop_and_do_not_grow() -> None:
    shape = Shape(1, 6, 2, 16, 96, 100, 4096, 0.25, (20,))
    bench = Bench(shape=shape)
    sizes = []
    for n in [50, 100] + [1] * 150:
        torch.testing.assert_close(*as_double(bench.feed(n, "prefill" if n > 1 else "decode")), atol=2e-5, rtol=0)
        sizes.append(bench.memory.bytes)
        held = bench.memory.positions()[0]
        assert bench.seen - 20 >= 0 and held[0] <= bench.seen - 20 + 1 and len(held) < 20 + 64 + 1
    assert max(sizes[10:]) == max(sizes[10:80])


def test_soft_caps_bend_every_part() -> None:
    shape = Shape(1, 6, 2, 16, 96, 100, 4096, 0.25, (None,), softcap=2.0)
    bench = Bench(Every(), *recipe("headinfer(window=8)"), shape=shape)
    for n, phase in ((150, "prefill"), (1, "decode"), (3, "verify")):
        torch.testing.assert_close(*as_double(bench.feed(n, phase)), atol=2e-5, rtol=0)  # type: ignore[arg-type]


def test_merged_entries_count_as_often_as_they_stand_for() -> None:
    bench = Bench(Pairs())
    bench.feed(150)
    out, _ = bench.feed(1, "decode")
    for h in range(6):
        k, v = ((x[:128:2, h // 3] + x[1:128:2, h // 3]) / 2 for x in (bench.k, bench.v))
        k, v = torch.cat([k, bench.k[128:, h // 3]]), torch.cat([v, bench.v[128:, h // 3]])
        logits = bench.logits(bench.q[-1:, h], k)
        logits[:, :64] += torch.tensor(2.0).log()
        torch.testing.assert_close(out[:, h].double(), logits.softmax(-1) @ v.double(), atol=2e-5, rtol=0)


def test_merged_entries_keep_their_weight_when_more_tokens_settle() -> None:
    bench = Bench(Pairs())
    bench.feed(170)  # 128 tokens become 64 entries
    for _ in range(40):
        bench.feed(1, "decode")
    weights = bench.memory.settled_field("weight")
    assert [w.tolist() for w in weights] == [[pytest.approx(0.6931472)] * 64 + [0.0] * 64] * 2


def test_a_tree_sees_ancestors_and_everything_older() -> None:
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)
    for methods in ([], [Every()], recipe("headinfer(window=8)")):
        bench = Bench(*methods)
        bench.feed(100)
        torch.testing.assert_close(*as_double(bench.feed(5, "verify", tree=tree)), atol=2e-5, rtol=0)


def test_mass_is_the_attention_that_each_token_drew() -> None:
    for methods in ([Heavy()], [Heavy(), Every()], [Heavy(), *recipe("headinfer(window=8)")]):
        bench = Bench(*methods)
        bench.feed(150)
        held = bench.memory.positions()
        bench.feed(1, "decode")
        assert bench.memory.mass is not None
        for r in (0, 1):
            at = torch.cat([held[r], torch.tensor([150])])
            mass = sum(bench.logits(bench.q[-1:, h], bench.k[at, r]).softmax(-1)[0] for h in range(3 * r, 3 * r + 3))
            widest = max(map(len, held))
            mine = bench.memory.mass[r]
            settled = len(held[r]) - (150 - 128)
            got = torch.cat([mine[:settled], mine[widest - (150 - 128) :]])
            torch.testing.assert_close(got.double(), mass, atol=2e-5, rtol=0)


def test_keeps_the_heaviest() -> None:
    bench = Bench(Heavy(budget=20))
    bench.feed(150)
    for r, held in enumerate(bench.memory.positions()):
        mass = torch.zeros(150, dtype=torch.float64)
        for h in range(3 * r, 3 * r + 3):
            logits = bench.logits(bench.q[:, h], bench.k[:, r])
            mass += logits.masked_fill(torch.ones(150, 150, dtype=torch.bool).triu(1), -torch.inf).softmax(-1).sum(0)
        assert held.tolist() == sorted(mass[:128].topk(20).indices.tolist()) + list(range(128, 150))


def test_needs_that_were_not_declared_are_named() -> None:
    memory = Bench().memory
    view = LayerView(0, SHAPE, Step(torch.zeros(1), torch.zeros(1), (0, 1), (1,), "decode", (True,)), memory.rows(), (memory,))
    with pytest.raises(PlanError, match="queries"):
        _ = view.queries
    with pytest.raises(PlanError, match="mass"):
        _ = view.mass


def test_remembers_the_last_queries_whatever_the_chunks() -> None:
    (snap,) = recipe("snapkv(window=10, budget=40)")
    for chunks in ((37,), (5, 5, 5, 5, 5, 12), (1,) * 37, (3, 30, 4)):
        bench = Bench(snap)
        for n in chunks:
            bench.feed(n, final=False)
            assert torch.equal(bench.memory.queries(), bench.q[-10:].transpose(0, 1))
            assert sum(map(len, bench.memory.past)) <= 20


def test_speculation_takes_its_queries_back() -> None:
    bench = Bench(*recipe("vericache(snapkv(window=10, budget=40), horizon=6)"))
    bench.feed(60)
    bench.feed(7, "verify")
    bench.memory.truncate(62)
    assert torch.equal(bench.memory.queries(), bench.q[52:62].transpose(0, 1))
    bench.seen = 62
    bench.feed(3, "decode")
    assert torch.equal(bench.memory.queries(), bench.q[55:65].transpose(0, 1))


def test_rolls_back_within_the_recent_zone_only() -> None:
    bench = Bench(*recipe("int8(window=8)"))
    bench.feed(150)
    bench.memory.truncate(150)
    bench.memory.truncate(140)
    bench.seen = 140
    bench.feed(4, "decode")
    with pytest.raises(LongspoolError, match=r"position 100.*127.*Needs\(recent"):
        bench.memory.truncate(100)
    sliding = Bench(shape=Shape(1, 6, 2, 16, 96, 100, 4096, 0.25, (20,)))
    sliding.feed(200)
    with pytest.raises(LongspoolError, match="rolled back"):
        sliding.memory.truncate(130)


def test_evicts_while_decoding() -> None:
    """`when` = n bounds a long answer; `when` = "prompt" lets it grow."""
    longest = {}
    for when in ("'prompt'", "16"):
        bench = Bench(*recipe(f"snapkv(budget=60, window=8, when={when})"))
        bench.feed(200)
        lengths = []
        for _ in range(130):
            bench.feed(1, "decode")
            lengths.append(max(map(len, bench.memory.positions())))
        longest[when] = max(lengths)
    assert longest["'prompt'"] > 60 + 100
    assert longest["16"] <= 60 + 16 + 64


def test_positions_are_told_where_tokens_were_pruned_between_layers() -> None:
    """Layers after a pruned one hold gaps, whatever their own methods."""

    rig = Rig()
    plan = resolve((Item(Halve(), 0, 0), *parse("int8(window=8)")), rig.model.shape, torch.float32)
    memory = rig.read(plan, words(200))
    kept = [*range(0, 200, 2), 199]
    assert [memory.positions(layer)[0].tolist() for layer in range(3)] == [list(range(200)), kept, kept]
    memory.check()
