"""Every architecture through the engine: a prompt at once, in chunks, and token by token, against transformers."""

from __future__ import annotations

import pytest
import torch
from peer import peer_logits, random_model
from test_families import BOUND, CASES
from torch import Tensor

from longspool.model.hf import from_transformers
from toolbox import Job, Rig, words


def served(rig: Rig, ids: list[int], prefill: int, chunk: int) -> Tensor:
    logits, memory = rig.run(Job(rig.plan(), ids, prefill, chunk))
    memory.check()
    memory.free()
    assert not any(rig.pools.ledger.now.values())
    return logits


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str) -> None:
    peer = random_model(CASES[name])
    rig = Rig(from_transformers(peer))
    ids = [1 + i % 100 for i in words(100 if "below" in name else 200, seed=7)]
    expected = peer_logits(peer, torch.tensor(ids))
    assert float(expected.std(0).mean()) > 0.3
    for prefill, chunk in ((len(ids), len(ids)), (len(ids), 37), (len(ids) - 8, 64)):
        torch.testing.assert_close(served(rig, ids, prefill, chunk), expected, atol=BOUND, rtol=0)


@pytest.mark.parametrize("name", ["mistral, window", "gemma3", "smollm3, own NoPE layers, windows"])
def test_windows_really_drop(name: str) -> None:
    """A layer with a window of 24 holds 24 tokens and at most a page more, and takes no more bytes however long the text is."""
    rig = Rig(from_transformers(random_model(CASES[name])))
    memory = rig.read(rig.plan(), [1 + i % 100 for i in words(90)])
    slides = [i for i, window in enumerate(rig.model.shape.windows) if window]
    assert slides
    sizes = []
    for at in range(90, 90 + 140):
        rig.feed(memory, [1 + at % 100])
        for layer in slides:
            (held, *others) = memory.positions(layer)
            assert held[-1] == at and held[0] <= max(at - 23, 0) and len(held) <= 24 + 64
            assert all(torch.equal(held, other) for other in others)
        sizes.append(sum(memory[layer].bytes for layer in slides))
    assert max(sizes) == max(sizes[:64])
    for layer in set(range(rig.model.shape.layers)) - set(slides):
        assert len(memory.positions(layer)[0]) == 230
