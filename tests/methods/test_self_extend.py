"""Self-Extend: the paper's one softmax over two kinds of relative positions, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longspool.methods.position.self_extend import SelfExtend
from longspool.model.build import Model
from longspool.model.tiny import tiny
from reference import rotate
from toolbox import Job, Rig, words

N = 160
IDS = words(N, 6)


@torch.no_grad()
def paper(model: Model, group: int, window: int) -> Tensor:
    """logit_ij = q at i and k at j where i - j < window, else q at i // group + window - window // group and k at j // group."""
    s, x, pos = model.shape, model.embed(torch.tensor(IDS)), torch.arange(N)
    for block in model.blocks:
        q, k, v = block.qkv(x)
        assert block.rope is not None
        near, far = ((pos, pos), (pos // group + window - window // group, pos // group))
        logits = []
        for at_q, at_k in (near, far):
            turned = rotate(q, *block.rope.angles(at_q, N)).double(), rotate(k, *block.rope.angles(at_k, N)).double()
            logits.append(torch.einsum("nhd,mhd->hnm", turned[0], turned[1].repeat_interleave(s.group, 1)) * s.scale)
        mixed = torch.where(pos[:, None] - pos < window, *logits)
        mixed = torch.tanh(mixed / s.softcap) * s.softcap if s.softcap else mixed
        share = mixed.masked_fill(pos > pos[:, None], -math.inf).softmax(-1)
        x = block.finish(x, torch.einsum("hnm,mhd->nhd", share, v.double().repeat_interleave(s.group, 1)).float())
    return model.logits(model.final(x))


@pytest.mark.parametrize(("group", "window"), [(4, 32), (3, 20), (8, 1), (2, 159), (5, 64)])
@pytest.mark.parametrize("more", ["", " + headinfer(window=10)"])
def test_equals_the_papers_formula(group: int, window: int, more: str) -> None:
    rig = Rig()
    expected = paper(rig.model, group, window)
    for prefill, chunk in ((N, N), (150, 60)):
        logits, memory = rig.run(Job(rig.plan(f"self_extend(group={group}, window={window}){more}"), IDS, prefill, chunk))
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    pairs = sum(max(i - window + 1, 0) for i in range(N)) * 2 * 3
    assert memory.actions["self_extend"]["far_keys"] == pairs


@pytest.mark.parametrize("chunk", [N, 60])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_both_parts_turn_by_the_length_of_the_text(kind: str, chunk: int) -> None:
    """Where the angles depend on the text's length this is the prompt's for all, though far positions are fewer."""
    lists = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [1 + 1.5 * i for i in range(8)]}
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64, **lists}
    rig = Rig(tiny(max_position_embeddings=64, rope_scaling=scaling))
    logits, _ = rig.run(Job(rig.plan("self_extend(group=4, window=32)"), IDS, N, chunk))
    torch.testing.assert_close(logits, paper(rig.model, 4, 32), atol=2e-4, rtol=0)


def test_tokens_that_were_dropped_keep_the_others_positions() -> None:
    """Under StreamingLLM only the sinks and the newest tokens are left, at their own distances."""
    rig = Rig()
    plan = rig.plan("self_extend(group=4, window=32) + streaming(sinks=4, window=16)")
    logits, memory = rig.run(Job(plan, IDS, 150))
    assert memory.positions(0)[0].tolist() == [*range(4), *range(128, N)]
    dense, _ = rig.run(Job(rig.plan("self_extend(group=4, window=32) + streaming(sinks=1000000, window=16)"), IDS, 150))
    torch.testing.assert_close(dense, paper(rig.model, 4, 32), atol=2e-4, rtol=0)
    assert float((logits - dense)[150:].abs().max()) > 0.05


@given(st.integers(2, 300), st.integers(1, 40), st.data())
def test_reaches_as_far_as_trained_positions_allow(context: int, group: int, data: st.DataObject) -> None:
    """The largest relative position of the longest text is one that the model was trained on, and one more token would not be."""
    window = data.draw(st.integers(1, context - 1))
    method = SelfExtend(group, window)
    near, far = method.frames()

    def largest(count: int) -> int:
        last = torch.tensor([count - 1])
        distances = [min(window, count) - 1]
        if count > window:
            distances.append(int(far.query(last)) - int(far.key(torch.tensor([0]))))
        return max(distances)

    reach = method.reach(context)
    assert largest(reach) <= context - 1 < largest(reach + 1)
    if window % group == 0:
        assert reach == (context - window) * group + window, "the paper's formula"
    assert (near.near, near.far, far.near, far.far) == (0, window, window, None)
