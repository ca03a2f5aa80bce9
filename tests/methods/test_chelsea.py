"""Chelsea's clusters against plain loops, its weights, and what duplicates show."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspool.methods.evict.chelsea import Chelsea, joined
from onelayer import Bench, recipe
from toolbox import Rig, words

Entry = tuple[int, Tensor, Tensor, float]
"""Index, key, value and how many tokens it stands for."""


def matched(entries: list[Entry], gone: int) -> list[Entry]:
    """One round over a chunk, entry by entry: even places join their best odd place, the strongest first."""
    unit = [k.double() / k.double().norm() for _, k, _, _ in entries]
    edges = []
    for a in range(0, len(entries), 2):
        b = max(range(1, len(entries), 2), key=lambda b: float(unit[a] @ unit[b]))
        edges.append((float(unit[a] @ unit[b]), a, b))
    joins = sorted(edges, key=lambda e: -e[0])[:gone]
    taken = {a for _, a, _ in joins}
    out = []
    for place, (index, *_) in enumerate(entries):
        if place in taken:
            continue
        members = [entries[a] for _, a, b in joins if b == place] + [entries[place]]
        total = sum(m[3] for m in members)
        k, v = (sum(m[i].double() * m[3] for m in members) / total for i in (1, 2))
        out.append((index, k, v, total))
    return out


def reference(k: Tensor, v: Tensor, ratio: float) -> list[Entry]:
    """A whole chunk in rounds."""
    entries: list[Entry] = [(i, k[i], v[i], 1.0) for i in range(len(k))]
    gone = round(ratio * len(k))
    while gone:
        now = min(gone, len(entries) // 2)
        entries, gone = matched(entries, now), gone - now
    return entries


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 20), st.data())
def test_a_round_joins_the_strongest_pairs(seed: int, size: int, data: st.DataObject) -> None:
    gone = data.draw(st.integers(1, size // 2))
    g = torch.Generator().manual_seed(seed)
    k, v, counts = (
        torch.randn(2, size, 6, generator=g),
        torch.randn(2, size, 6, generator=g),
        torch.randint(1, 5, (2, size), generator=g).float(),
    )
    index, keys, values, total = joined((torch.arange(size).expand(2, -1), k, v, counts), gone)
    for c in (0, 1):
        expected = matched([(i, k[c, i], v[c, i], float(counts[c, i])) for i in range(size)], gone)
        assert index[c].tolist() == [e[0] for e in expected]
        assert total[c].tolist() == [e[3] for e in expected]
        torch.testing.assert_close(keys[c].double(), torch.stack([e[1].double() for e in expected]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values[c].double(), torch.stack([e[2].double() for e in expected]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(("ratio", "chunk"), [(0.5, 32), (0.25, 32), (0.75, 32), (0.8, 40), (0.3, 15)])
def test_what_a_prompt_leaves_and_what_is_seen_of_it(ratio: float, chunk: int, counted: bool) -> None:
    bench = Bench(*recipe(f"chelsea(ratio={ratio}, chunk={chunk}, sinks=4, window=10, counted={counted})"))
    bench.feed(150)
    end = 4 + (128 - 4) // chunk * chunk
    rows = []
    for r in (0, 1):
        entries: list[Entry] = [(i, bench.k[i, r], bench.v[i, r], 1.0) for i in range(4)]
        for first in range(4, end, chunk):
            part = reference(bench.k[first : first + chunk, r], bench.v[first : first + chunk, r], ratio)
            entries += [(first + i, k, v, n) for i, k, v, n in part]
        rows.append(entries + [(i, bench.k[i, r], bench.v[i, r], 1.0) for i in range(end, 150)])
    assert [p.tolist() for p in bench.memory.positions()] == [[e[0] for e in entries] for entries in rows]
    weights = bench.memory.settled_field("weight")
    out, _ = bench.feed(1, "decode")
    for h in range(6):
        entries = [*rows[h // 3], (150, bench.k[150, h // 3], bench.v[150, h // 3], 1.0)]
        logits = bench.logits(bench.q[-1:, h], torch.stack([e[1].double() for e in entries]))
        if counted:
            logits = logits + torch.tensor([math.log(e[3]) for e in entries])
            assert sum(weights[h // 3].exp().tolist()) == pytest.approx(128, abs=1e-3), "every token counts once"
        seen = logits.softmax(-1) @ torch.stack([e[2].double() for e in entries])
        torch.testing.assert_close(out[:, h].double(), seen, atol=2e-5, rtol=0)


def test_duplicates_are_merged_without_loss() -> None:
    """Every token twice: half of the entries say the same."""
    bench = Bench(*recipe("chelsea(ratio=0.5, chunk=62, sinks=4, window=10)"))
    k, v = (torch.randn(75, 2, 16).repeat_interleave(2, 0) for _ in range(2))
    bench.feed(150, given=(k, v))
    assert {len(p) for p in bench.memory.positions()} == {150 - 62}
    out, _ = bench.feed(1, "decode")
    dense = bench.dense(bench.q[-1:], torch.tensor([150]), [torch.arange(151)] * 2)
    torch.testing.assert_close(out.double(), dense, atol=1e-5, rtol=0)


def test_an_answer_is_clustered_chunk_by_chunk_and_once() -> None:
    bench = Bench(*recipe("chelsea(ratio=0.5, chunk=32, sinks=4, window=10)"))
    bench.feed(150)
    first = bench.memory.settled_field("pos")[0].tolist()
    for _ in range(300):
        bench.feed(1, "decode")
    held, weights = bench.memory.settled_field("pos")[0].tolist(), bench.memory.settled_field("weight")[0]
    old = [p for p in first if p < 4 + 96]
    assert held[: len(old)] == old, "what is clustered stays as it is"
    done = 4 + (bench.memory.gone - 4) // 32 * 32
    assert bench.memory.gone > 300 and sum(p < done for p in held) == 4 + (done - 4) // 2
    assert float(weights.exp().sum()) == pytest.approx(bench.memory.gone, abs=1e-2)


def test_likeness_beats_chance_and_halves() -> None:
    """The mean cosine of joined pairs is above that of random pairs, on keys that change slowly, as a text's do."""
    g = torch.Generator().manual_seed(1)
    k = torch.randn(1, 64, 16, generator=g).cumsum(1)
    k = k / k.norm(dim=-1, keepdim=True)
    _, keys, _, total = joined((torch.arange(64)[None], k, k, torch.ones(1, 64)), 32)
    mine = keys[0][total[0] > 1].norm(dim=-1).mean()
    other = ((k[0, torch.randperm(64, generator=g)[:32]] + k[0, 32:]) / 2).norm(dim=-1).mean()
    assert mine > other + 0.02


def test_shrinks_memory_as_it_says() -> None:
    rig = Rig()
    plain, merged = (
        rig.read(rig.plan(f"chelsea(ratio={ratio}, chunk=32, window=8)", torch.float16), words(900), 128) for ratio in (0.0, 0.75)
    )
    before, after = (sum(len(p) for layer in range(3) for p in m.positions(layer)) for m in (plain, merged))
    assert after < 0.35 * before and merged.tiers()["device"] < 0.45 * plain.tiers()["device"]


def test_refuses_what_can_not_be() -> None:
    rig = Rig()
    for text, said in (("ratio=1.0", "below 1"), ("chunk=1", "chunk=1 must be at least 2"), ("window=-1", "window=-1")):
        with pytest.raises(Exception, match=said):
            rig.plan(f"chelsea({text})")
    assert Chelsea().needs().recent == 128
