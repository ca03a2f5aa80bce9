"""Heads that share pages: what is read, selected, fetched, forked and saved is each head's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headmean import HeadMean
from longspool.memory.file import load, save
from longspool.plan import Item, resolve
from longspool.recipe import parse
from reference import dense_logits
from toolbox import Job, Rig, Trace, causal, masked_logits, words

N, MORE, RECENT = 230, 80, 16
IDS = words(N + MORE, 8)
MEAN = HeadMean(0.5, RECENT)


def plan(rig: Rig, codec: HeadMean, more: str = "", dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    return resolve((Item(codec), *parse(more)), rig.model.shape, dtype)


EXACT = ("", "quest(budget=100000, dense=0)", "headinfer(window=8)", "self_extend(group=1)", "vericache(int8(window=8), horizon=3)")


@pytest.mark.parametrize("more", [*EXACT, f"{EXACT[1]} + {EXACT[2]}"])
@pytest.mark.parametrize("chunk", [N, 64])
def test_a_lossless_codec_is_lossless(more: str, chunk: int) -> None:
    rig = Rig()
    codec = HeadMean(1.0, RECENT, bare="self_extend" in more)
    logits, memory = rig.run(Job(plan(rig, codec, more), IDS, N, chunk))
    torch.testing.assert_close(logits, dense_logits(rig.model, torch.tensor(IDS)), atol=1e-4, rtol=0)
    assert memory[0].settled is not None and len(memory[0].settled.length) == 1
    memory.check()


def test_reads_what_it_should() -> None:
    """Against a float64 runner whose old keys and values are shrunk towards their heads' mean."""
    rig = Rig()
    settled = (N - RECENT) // 64 * 64
    memory = rig.read(plan(rig, MEAN), IDS[:N])
    for layer, raw in zip(memory.layers, rig.read(rig.plan(), IDS[:N]).layers, strict=True):
        if layer.layer:
            continue  # later layers see what the first one lost only after the prompt
        for got, true in zip(zip(*layer.read_settled(), strict=True), zip(*raw.read_recent(0, settled), strict=True), strict=True):
            exact = torch.stack(true)
            torch.testing.assert_close(torch.stack(got), exact.mean(0) + 0.5 * (exact - exact.mean(0)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("more", ["", " + headinfer(window=16)"])
def test_a_selection_of_each_heads_pages_is_read(more: str) -> None:
    """The same pages, with their own bounds, as where heads don't share them."""
    rig = Rig()
    quest = "quest(budget=64, dense=0, per_head=True)"
    logits = rig.run(Job(plan(rig, HeadMean(1.0, RECENT), quest + more), IDS, N))[0]
    alone = rig.run(Job(rig.plan(f"{quest} + headinfer(window=16)"), IDS, N))[0]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    assert float((logits - dense_logits(rig.model, torch.tensor(IDS)))[N:].abs().max()) > 1e-3, "not everything was read"


def test_what_is_stored_once_is_there_once() -> None:
    rig = Rig()
    left = rig.read(plan(rig, MEAN), IDS[:N], 64)
    before = dict(rig.pools.ledger.now)
    right = left.fork()
    assert rig.pools.ledger.now["device"] - before["device"] < 2000, "only tables"
    for layer, twin in zip(left.layers, right.layers, strict=True):
        assert layer.book is not None and twin.book is not None and layer.book.pages().tolist() == twin.book.pages().tolist()
        assert int(layer.book.pool.refs[layer.book.pages()[0]]) == 2
        pages = torch.from_numpy(layer.settled.pages()).long()  # type: ignore[union-attr]
        assert layer.store.booked(pages).tolist() == [[int(layer.book.pages()[0]), i] for i in range(len(pages))]
    a, b = rig.drip(left, words(70, 1)), rig.drip(right, words(70, 2))
    for ways, got in ((words(70, 1), a), (words(70, 2), b)):
        torch.testing.assert_close(got, Rig().run(Job(plan(Rig(), MEAN), IDS[:N] + ways, N, 64))[0][N:], atol=1e-4, rtol=0)
    left.free()
    right.check()
    right.free()
    assert not any(rig.pools.ledger.now.values())
    rig.pools.check()


def test_goes_to_disk_packed_and_finds_what_is_stored_once_elsewhere(tmp_path: Path) -> None:
    rig, other = Rig(), Rig()
    made = plan(rig, MEAN, "headinfer(window=8)")
    memory = rig.read(made, IDS[:N], 64)
    other.read(made, words(N, 4))  # takes the first places
    size = save(memory, tmp_path / "m", "x")
    assert size < sum(memory.tiers().values()) + 20_000
    again = load(tmp_path / "m", made, other.pools, other.engine._rotates, "x")
    assert again[0].book is not None and memory[0].book is not None and again[0].book.pages()[0] != memory[0].book.pages()[0]
    assert torch.equal(other.drip(again, IDS[N:]), rig.drip(memory, IDS[N:]))
    again.check()


def test_batches_keep_their_own(kind: str = "qwen3") -> None:
    rig = Rig(kind)
    made = plan(rig, MEAN, "quest(budget=64, dense=0)")
    jobs = [Job(made, IDS, N, 64), Job(made, words(190, 4), 170, 50)]
    for job, (logits, memory) in zip(jobs, rig.together(jobs), strict=True):
        torch.testing.assert_close(logits, Rig(kind).run(job)[0], atol=1e-4, rtol=0)
        memory.check()


def test_masks_with_nothing_settled() -> None:
    rig = Rig()
    short = IDS[:50]

    def seen(layer: int, trace: Trace) -> Tensor:
        return causal(len(short))

    torch.testing.assert_close(rig.run(Job(plan(rig, MEAN), short, 40))[0], masked_logits(rig.model, short, seen)[0], atol=1e-4, rtol=0)
