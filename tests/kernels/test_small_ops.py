"""rope, merge and topk_rows against formulas of another kind than their reference's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.kernels import merge, rope, topk_rows


def test_rope_turns_pairs_as_complex_numbers() -> None:
    g = torch.Generator().manual_seed(0)
    x, angle = torch.randn(9, 4, 20, generator=g), torch.rand(9, 8, generator=g) * 50
    turned = rope(x, angle.cos(), angle.sin())
    pairs = torch.complex(x[..., :8].double(), x[..., 8:16].double()) * torch.polar(torch.ones(9, 1, 8).double(), angle[:, None].double())
    assert torch.allclose(turned[..., :8].double(), pairs.real, atol=2e-6)
    assert torch.allclose(turned[..., 8:16].double(), pairs.imag, atol=2e-6)
    assert torch.equal(turned[..., 16:], x[..., 16:])


def test_merge_of_parts_is_attention_over_all() -> None:
    g = torch.Generator().manual_seed(1)
    logits, values = torch.randn(6, 3, 40, generator=g).double() * 8, torch.randn(6, 3, 40, 16, generator=g).double()
    outs, lses = [], []
    for lo, hi in ((0, 1), (1, 30), (30, 40)):
        weight = logits[..., lo:hi].softmax(-1)
        outs.append((weight[..., None] * values[..., lo:hi, :]).sum(-2).float())
        lses.append(logits[..., lo:hi].logsumexp(-1).float())
    out, lse = merge(outs, lses)
    assert torch.allclose(out.double(), (logits.softmax(-1)[..., None] * values).sum(-2), atol=1e-5)
    assert torch.allclose(lse.double(), logits.logsumexp(-1), atol=1e-5)


def test_merge_of_nothing_is_nothing() -> None:
    nothing, nan = torch.full((2, 3), -torch.inf), torch.full((2, 3, 4), torch.nan)
    out, lse = merge([nan, nan], [nothing, nothing])
    assert torch.equal(out, torch.zeros(2, 3, 4)) and torch.equal(lse, nothing)
    seen = torch.randn(2, 3, 4)
    out, lse = merge([nan, seen], [nothing, torch.ones(2, 3)])
    assert torch.equal(out, seen) and torch.equal(lse, torch.ones(2, 3))


rows_of_scores = st.lists(
    st.tuples(
        st.lists(st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 3.0, torch.inf]), max_size=40), st.integers(0, 45)
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(rows_of_scores)
def test_topk_takes_what_sorting_takes(rows: list[tuple[list[float], int]]) -> None:
    width = max(len(scores) for scores, _ in rows)
    score = torch.full((len(rows), width), torch.inf)
    for r, (scores, _) in enumerate(rows):
        score[r, : len(scores)] = torch.tensor(scores)
    count, k = (torch.tensor(c, dtype=torch.int32) for c in ([len(s) for s, _ in rows], [k for _, k in rows]))
    index, n = topk_rows(score, count, k)
    for r, (scores, want) in enumerate(rows):
        best = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:want])
        assert n[r] == len(best)
        assert index[r].tolist() == best + [-1] * (index.shape[1] - len(best))
