"""In the last layer only those of a prompt's tokens attend that somebody asked for; nothing else may change by that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longspool.engine import forward as passes
from longspool.engine.forward import forward
from longspool.memory import Memory
from toolbox import KINDS, Rig, words

N = 200
RECIPES = ("", "int8(window=16)", "snapkv(budget=96, window=16)", "streaming(sinks=4, window=40)", "laprox(budget=96, window=16)")


def read(rig: Rig, recipe: str, texts: Sequence[list[int]], want: str, chunk: int) -> tuple[list[Tensor], list[Memory]]:
    """The last logits of texts that are read side by side in chunks, and their memories."""
    memories = [rig.engine.empty(rig.plan(recipe)) for _ in texts]
    for first in range(0, N, chunk):
        pairs = zip(memories, texts, strict=True)
        replies = forward(rig.model, [rig.ask(m, ids[first : first + chunk], "prefill", N, want) for m, ids in pairs])
    return [reply[-1:] for reply in replies], memories


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_asked_tokens_and_the_memory_are_the_same(kind: str, recipe: str) -> None:
    if kind == "mistral" and recipe:
        recipe = ""  # every layer is a window, which no method serves
    rig, texts = Rig(kind), [words(N, 5), words(N, 6)]
    for chunk in (N, 70):
        few, mine = read(rig, recipe, texts, "last", chunk)
        full, theirs = read(rig, recipe, texts, "all", chunk)
        for a, b, m, t in zip(few, full, mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
            assert all(torch.equal(x, y) for i in range(3) for x, y in zip(m.positions(i), t.positions(i), strict=True))
            torch.testing.assert_close(rig.drip(m, words(8, 7)), rig.drip(t, words(8, 7)), atol=2e-5, rtol=0)


def test_the_others_do_not_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attend = passes.attend
    monkeypatch.setattr(passes, "attend", lambda group, q, k, v, step: seen.append(len(q)) or attend(group, q, k, v, step))
    read(Rig(), "", [words(N, 5)], "last", 70)
    read(Rig(), "", [words(N, 5)], "all", 70)
    assert seen == [1, 1, 1]
