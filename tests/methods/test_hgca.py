"""HGCA: who is salient when tokens leave the device and when a prompt goes on, and that the host's part is attended where it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.methods.place.hgca import HGCA
from longspool.values import Shape
from memory.test_layer import SHAPE, Bench, as_double
from toolbox import Job, Rig, tokens, words

IDS = words(430, 12)


def shares(bench: Bench, head: int, queries: range, keys: range) -> Tensor:
    """The weight of keys for each of some queries, summed over a KV head's group, float64 [n, T]; later keys get none."""
    at = torch.arange(keys.start, keys.stop)
    total = torch.zeros(len(queries), len(keys), dtype=torch.float64)
    for h in range(3 * head, 3 * head + 3):
        logits = bench.logits(bench.q[queries.start : queries.stop, h], bench.k[at, head])
        hidden = at > torch.arange(queries.start, queries.stop)[:, None]
        total += logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return total


def listed(drawn: list[Tensor], among: int, beta: float, groups: int = 4) -> list[list[int]]:
    """The tokens of each head that are salient, by the card's rule."""
    counts = [int((m >= beta / among).sum()) for m in drawn]
    if groups == 1:
        counts = [max(counts)] * len(counts)
    return [sorted(m.argsort(descending=True)[: min(max(10, n), len(m))].tolist()) for m, n in zip(drawn, counts, strict=True)]


def salient(bench: Bench, first: int = 0, last: int | None = None) -> list[list[int]]:
    marks = bench.memory.index["salient"][:, first:last]
    return [torch.nonzero(row)[:, 0].tolist() for row in marks]


@pytest.mark.parametrize(("beta", "groups"), [(0.5, 4), (3.0, 1), (100.0, 4)])
@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 6, 2, 16, 96, 100, 4096, 0.25, (None,), softcap=2.0)])
def test_lists_what_drew_its_share_before_it_left(beta: float, groups: int, shape: Shape) -> None:
    bench = Bench(HGCA(beta=beta, window=80, groups=groups), shape=shape)
    bench.feed(200)
    drawn = [shares(bench, h, range(168, 200), range(200)).mean(0)[:128] for h in (0, 1)]
    want = listed(drawn, 200, beta, groups)
    assert salient(bench) == want
    assert bench.actions["hgca"]["salient"] == sum(map(len, want)) and bench.actions["hgca"]["settled"] == 256
    if beta > 1:
        assert all(10 <= len(w) < 128 for w in want)


def test_a_prompt_that_goes_on_makes_the_lists_anew() -> None:
    """By the new chunk's queries: the old ones among themselves, those that leave now among all that the device held."""
    bench = Bench(HGCA(window=80, beta=1.2))
    bench.feed(200, final=False)
    old = salient(bench)
    bench.feed(100)
    again = listed([shares(bench, h, range(268, 300), range(128)).mean(0) for h in (0, 1)], 128, 1.2)
    fresh = listed([shares(bench, h, range(268, 300), range(128, 300)).mean(0)[:128] for h in (0, 1)], 172, 1.2)
    assert salient(bench, 0, 128) == again != old and salient(bench, 128) == fresh


def test_also_where_nothing_leaves() -> None:
    rig = Rig()
    plan = rig.plan("hgca(window=80, beta=1.2)")
    first = rig.run(Job(plan, IDS[:200], 200))[1]
    after = rig.read(plan, IDS[:205], 200)
    assert all(torch.equal(a.rows().length, b.rows().length) for a, b in zip(first.layers, after.layers, strict=True))
    assert any(not torch.equal(a.index["salient"], b.index["salient"]) for a, b in zip(first.layers, after.layers, strict=True))


def test_the_average_moves_with_every_token() -> None:
    """The card's recursion over all steps since the prompt; a new token begins with its own weight."""
    bench = Bench(HGCA(window=80, beta=1.0))
    bench.feed(152)
    before = salient(bench)
    m = [shares(bench, h, range(128, 152), range(128, 152)).mean(0) for h in (0, 1)]
    while bench.memory.rows().total == 2 * 128:
        bench.feed(1, "decode")
        t = bench.seen - 1
        for h in (0, 1):
            p = shares(bench, h, range(t, t + 1), range(128, t + 1))[0]
            m[h] = torch.cat([0.5 * p[:-1] + 0.5 * m[h], p[-1:]])
    assert bench.seen > 200
    assert salient(bench, 128) == listed([w[:64] for w in m], bench.seen - 128, 1.0) and salient(bench, 0, 128) == before


def test_sees_the_salient_and_the_recent() -> None:
    bench = Bench(HGCA(window=80, beta=1.5))
    bench.feed(200)
    for _ in range(80):
        marks, rows = salient(bench), bench.memory.rows()
        out, _ = bench.feed(1, "decode")
        t = bench.seen - 1
        held = [torch.tensor(mark + list(range(int(rows.length[0]), t + 1))) for mark in marks]
        torch.testing.assert_close(*as_double((out, bench.dense(bench.q[-1:], torch.tensor([t]), held))), atol=2e-5, rtol=0)
    torch.testing.assert_close(*as_double(bench.feed(4, "verify")), atol=2e-5, rtol=0)


def test_nothing_is_brought_to_the_device() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("hgca(window=80)", torch.float16), IDS[:400], 130)
    rig.pools.ledger.mark()
    rig.drip(memory, IDS[400:420])
    assert "bytes_fetched" not in memory.actions["hgca"] and memory.tiers()["host"] == 3 * 2 * 384 * 2 * 16 * 2
    did = memory.actions["hgca"]
    assert 0 < did["tokens_read"] < did["tokens_stored"]
    assert rig.pools.ledger.peak["device"] == memory.tiers()["device"]


@pytest.mark.parametrize("more", ["", " + int8", " + streaming(sinks=8, window=190)", " + snapkv(budget=220, window=16)"])
def test_the_host_changes_nothing(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lists over pages on the device."""
    recipe, wishes = "hgca(window=80, beta=2.0)" + more, {"max_tokens": 40, "temperature": 0.7, "seed": 5}
    rig = Rig()
    away, memory = rig.run(Job(rig.plan(recipe), IDS, 330, 120))
    answer = tokens(rig.answer(rig.plan(recipe), IDS[:330], **wishes))
    assert memory.tiers()["host"] > 0
    monkeypatch.setattr(HGCA, "home", "device")
    rig = Rig()
    near, memory = rig.run(Job(rig.plan(recipe), IDS, 330, 120))
    assert memory.tiers()["host"] == 0
    torch.testing.assert_close(away, near, atol=2e-5, rtol=0)
    assert tokens(rig.answer(rig.plan(recipe), IDS[:330], **wishes)) == answer and len(set(answer)) > 10


def test_wrong_parameters_are_said() -> None:
    said = " ".join(HGCA(beta=-1, alpha=0, window=-1, groups=0).check(SHAPE))
    assert all(word in said for word in ("beta=-1", "alpha=0", "window=-1", "groups=0"))
    assert HGCA().check(SHAPE) == []
