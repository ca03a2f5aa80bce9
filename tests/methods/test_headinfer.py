"""HeadInfer: exact, and the device holds a few heads of one layer at a time."""

from __future__ import annotations

import pytest
import torch

from toolbox import Job, Rig, words

N = 600
PAGE_BYTES = 2 * 64 * 16 * 2  # keys and values of one head's page, fp16


@pytest.mark.parametrize("heads", [1, 2])
def test_the_device_peaks_at_the_recent_zone_and_the_fetched_heads(heads: int) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(f"headinfer(heads={heads}, window=16)", torch.float16), words(N), 64)
    pages = (N - 16) // 64
    recent = 3 * 2 * -(-(N - pages * 64) // 64) * PAGE_BYTES
    side = sum(z.side for layer in memory.layers for z in (layer.recent, layer.settled) if z is not None)
    assert memory.tiers() == {"device": recent + side, "host": 3 * 2 * pages * PAGE_BYTES, "disk": 0}
    rig.pools.ledger.mark()
    fetched = memory.actions["headinfer"]["bytes_fetched"]
    rig.feed(memory, [7])
    assert rig.pools.ledger.peak["device"] == recent + side + heads * pages * PAGE_BYTES
    assert memory.actions["headinfer"]["bytes_fetched"] - fetched == 3 * 2 * pages * PAGE_BYTES
    assert rig.pools.ledger.now == memory.tiers(), "what was fetched is gone"


@pytest.mark.parametrize(
    ("other", "window"),
    [
        ("snapkv(budget=120, window=16)", 16),
        ("int8(window=16)", 16),
        ("quest(dense=1, budget=96)", 0),
        ("self_extend(window=64, group=4)", 9),
    ],
)
def test_moves_pages_and_changes_nothing_beside_other_methods(other: str, window: int) -> None:
    rig, ids = Rig(), words(260)
    plain, _ = rig.run(Job(rig.plan(other), ids, 250, 90))
    away, memory = rig.run(Job(rig.plan(f"{other} + headinfer(window={window})"), ids, 250, 90))
    torch.testing.assert_close(away, plain, atol=5e-5, rtol=0)
    assert memory.tiers()["host"] > 0 and memory.actions["headinfer"]["bytes_fetched"] > 0


def test_fetches_only_what_was_selected() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("quest(dense=0, budget=96) + headinfer(window=16)", torch.float16), words(N))
    before = memory.actions["headinfer"].get("bytes_fetched", 0)
    rig.feed(memory, [7])
    page = 2 * 16 * 16 * 2  # sixteen tokens; the summary is on the device
    assert memory.actions["headinfer"]["bytes_fetched"] - before == 3 * 2 * (96 // 16 - 1) * page
