"""ShadowKV: the best keys of a rank, landmarks that choose, outliers that are always read, and values that come once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longspool.memory import Ledger, Pool
from longspool.memory.pool import Draft
from longspool.methods.place.shadowkv import ShadowKV
from longspool.roles import Field
from longspool.values import Span
from methods.selecting import SHAPE, Sight, Watched, places, summarised
from toolbox import Job, Rig, tokens, words

IDS = words(430, 12)
RECIPE = "shadowkv(budget=64, window=16, outliers=3, rank=12, device=96)"


@pytest.mark.parametrize("rank", [2, 10, 32])
def test_keys_are_the_best_of_their_rank(rank: int) -> None:
    """Of the tokens that it learnt from: numpy's truncated SVD of each head, in float64."""
    rng, span, at = torch.Generator().manual_seed(rank), Span((0,)), torch.arange(4)
    method = ShadowKV(rank=rank, exact=True)
    keys = [torch.randn(128, 16, generator=rng) * torch.linspace(3, 0.1, 16) for _ in range(2)]
    books = Pool(method.learns(SHAPE, 1), 1, "device", Ledger(), 1 << 16)
    slots = torch.from_numpy(books.take(2)).long()
    books.put(slots, method.learn(keys, keys, span))
    forms = method.fields(SHAPE, 64, 1) | {"book": Field((2,), torch.int32)}
    draft = Draft(64, {name: torch.empty(4, *f.shape, dtype=f.dtype) for name, f in forms.items()}, books)
    draft["book"][:] = torch.stack([slots.repeat_interleave(2), torch.tensor([0, 1, 0, 1])], 1).to(torch.int32)
    v = torch.randn(4, 64, 16, generator=rng)
    method.write(draft, at, torch.full((4,), 64), torch.cat(keys).view(4, 64, 16).mT.contiguous(), v, span)
    got, values = method.read(draft, at, span)
    assert torch.equal(values, v)
    for mine, own in zip(got.mT.reshape(2, 128, 16), keys, strict=True):
        u, s, vt = np.linalg.svd(own.double().numpy(), full_matrices=False)
        kept = rank // 2
        np.testing.assert_allclose(mine.numpy(), (u[:, :kept] * s[:kept]) @ vt[:kept], atol=1e-4)


@pytest.mark.parametrize("spans", [(0, 1), (0, 1, 2), (0, 3, 4)])
@pytest.mark.parametrize("outliers", [0, 4])
def test_reads_the_chunks_whose_landmarks_draw_most(spans: tuple[int, ...], outliers: int) -> None:
    """numpy scores chunk by chunk: softmax over the landmarks of chunks that are no outliers, the maximum over heads and tokens."""
    rng = torch.Generator().manual_seed(outliers + len(spans))
    method, requests = ShadowKV(budget=80, outliers=outliers), len(spans) - 1
    keys = [torch.randn(n, 16, generator=rng) + 2 * torch.randn(1, 16, generator=rng) for n in [900, 900, 405, 250][: 2 * requests]]
    store, rows = summarised(method, keys, 64)
    q = torch.randn(spans[-1], 4, 16, generator=rng)
    picked = method.select(q, rows, Sight(store, spans)).rows
    for r, k in enumerate(keys):
        chunks = [k[i : i + 8].double().numpy() for i in range(0, len(k), 8)]
        marks = np.stack([c.mean(0) for c in chunks])
        fit = [float((c @ m / np.linalg.norm(c, axis=1) / np.linalg.norm(m)).min()) for c, m in zip(chunks, marks, strict=True)]
        odd = sorted(range(len(fit)), key=lambda i: fit[i])[:outliers]
        rest = [i for i in range(len(chunks)) if i not in odd]
        own = q[spans[r // 2] : spans[r // 2 + 1], 2 * (r % 2) : 2 * (r % 2) + 2].flatten(0, 1).double().numpy()
        logits = own @ marks[rest].astype(np.float16).astype(np.float64).T * SHAPE.scale
        share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        best = [rest[i] for i in np.argsort(-share.max(0))[:10]]
        assert places(rows, picked, r) == [t for i in sorted(best + odd) for t in range(8 * i, min(8 * i + 8, len(k)))]


def test_sees_what_it_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all directions kept, attention is exact over the chunks that were chosen."""
    run = Watched(monkeypatch, ShadowKV, "shadowkv(budget=64, window=16, outliers=3, rank=100, exact=True)", IDS, 330, 120)
    torch.testing.assert_close(run.logits, run.expected(), atol=1e-4, rtol=0)
    assert len(run.picked) == 300 and all(len(row) == 64 + 24 for rows in run.picked for row in rows)
    assert len({str(rows) for rows in run.picked}) > 50, "selections change"


@pytest.mark.parametrize("more", ["", " + streaming(sinks=8, window=190)"])
def test_the_host_changes_nothing(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, wishes = Rig(), {"max_tokens": 40, "temperature": 0.7, "seed": 5}
    away, memory = rig.run(Job(rig.plan(RECIPE + more), IDS, 330, 120))
    assert memory.tiers()["host"] > 0 and memory.actions["shadowkv"]["device_hits"] > 0
    answer = tokens(rig.answer(rig.plan(RECIPE + more), IDS[:330], **wishes))
    monkeypatch.setattr(ShadowKV, "home", "device")
    rig = Rig()
    near, memory = rig.run(Job(rig.plan(RECIPE + more), IDS, 330, 120))
    assert memory.tiers()["host"] == 0
    torch.testing.assert_close(away, near, atol=1e-5, rtol=0)
    assert tokens(rig.answer(rig.plan(RECIPE + more), IDS[:330], **wishes)) == answer and len(set(answer)) > 10


def test_only_newly_selected_values_are_fetched() -> None:
    """A piece is eight values; keys never move."""
    rig = Rig()
    memory = rig.read(rig.plan("shadowkv(budget=64, window=16, outliers=3, device=4096)"), IDS[:400])
    rig.feed(memory, [7])
    first = dict(memory.actions["shadowkv"])
    rig.feed(memory, [9])
    did = {name: n - first.get(name, 0) for name, n in memory.actions["shadowkv"].items()}
    assert first["bytes_fetched"] == 3 * 2 * 11 * 8 * 16 * 2 and did["device_hits"] + did["device_misses"] == 3 * 2 * 11
    assert did["device_hits"] >= 3 * 2 * 3, "outliers are read every time"
    assert did["bytes_fetched"] == did["device_misses"] * 8 * 16 * 2


def test_what_is_learnt_is_forked_and_given_back() -> None:
    rig = Rig()
    memory = rig.read(rig.plan(RECIPE), IDS[:200], 64)
    book = memory[1].book
    assert book is not None and book.pool.used == 3 * 2
    twin = memory.fork()
    assert book.pool.used == 3 * 2 and bool((book.pool.refs[book.pages()] == 2).all())
    memory.free()
    assert bool(rig.drip(twin, IDS[200:230]).isfinite().all())
    twin.check()
    twin.free()
    assert book.pool.used == 0 and not any(rig.pools.ledger.now.values())


def test_wrong_parameters_are_said() -> None:
    said = " ".join(ShadowKV(chunk=7, budget=3, rank=1, outliers=-1).check(SHAPE))
    assert all(word in said for word in ("chunk=7", "budget=3", "rank=1", "outliers=-1"))
    assert ShadowKV().check(SHAPE) == []
