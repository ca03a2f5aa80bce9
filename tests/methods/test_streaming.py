"""StreamingLLM keeps the sinks and the newest tokens, and attends to nothing else."""

from __future__ import annotations

import pytest
import torch

from toolbox import Job, Rig, causal, masked_logits, words

SINKS, WINDOW, PAGE = 5, 30, 64
RECIPE = f"streaming(sinks={SINKS}, window={WINDOW})"


def held(tokens: int) -> list[int]:
    """After so many tokens: the sinks, and what is younger than the last whole page that fell out of the window."""
    cut = max(tokens - WINDOW, 0) // PAGE * PAGE
    return [p for p in range(tokens) if p < SINKS or p >= cut]


@pytest.mark.parametrize("chunk", [1 << 20, 70])
def test_holds_sinks_and_the_newest_tokens(chunk: int) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(RECIPE), words(200), chunk)
    for at in range(200, 300):
        for layer in range(3):
            assert [p.tolist() for p in memory.positions(layer)] == [held(at)] * 2
        assert len(held(at)) <= SINKS + WINDOW + PAGE - 1 and set(range(at - WINDOW, at)) <= set(held(at))
        rig.feed(memory, [at % 256])


def test_sees_what_it_holds() -> None:
    """The prompt's chunks see what the memory held before them, and themselves."""
    rig, n, chunk = Rig(), 260, 100
    ids = words(n)
    seen = causal(n)
    for i in range(n):
        start = i // chunk * chunk if i < 200 else i
        seen[i, :start] = torch.tensor([p in set(held(start)) for p in range(start)])
    expected, _ = masked_logits(rig.model, ids, lambda layer, trace: seen)
    torch.testing.assert_close(rig.run(Job(rig.plan(RECIPE), ids, 200, chunk))[0], expected, atol=1e-4, rtol=0)
    assert float((expected - masked_logits(rig.model, ids, lambda layer, trace: causal(n))[0]).abs().max()) > 0.1


def test_memory_does_not_grow() -> None:
    rig = Rig()
    sizes = {rig.read(rig.plan(RECIPE), words(n), 128).bytes for n in (640, 640 + 320, 640 + 1280)}
    assert len(sizes) == 1
