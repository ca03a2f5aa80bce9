"""Tiny models: quick, repeatable, and varied enough that a wrong cache would show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspool.model.build import Model
from longspool.model.config import families
from longspool.model.tiny import tiny
from reference import dense_logits

IDS = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(2))


def greedy(model: Model, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, dense_logits(model, ids)[-1:].argmax(-1)])
    return ids[-new:]


@pytest.mark.parametrize("family", families())
def test_output_varies(family: str) -> None:
    model = tiny(family)
    logits = dense_logits(model, IDS)
    assert logits.isfinite().all()
    assert logits.std(0).mean() > 0.5
    assert greedy(model, IDS[:20], 32).unique().numel() >= 12


@pytest.mark.parametrize("family", families())
def test_far_tokens_matter(family: str) -> None:
    """Changing one early token moves the last logits, beyond any window, through the layers that see everything or through the stack."""
    model = tiny(family)
    other = IDS.clone()
    other[10] = (other[10] + 1) % 256
    moved = (dense_logits(model, other) - dense_logits(model, IDS)).abs().amax(-1)
    assert moved[:10].max() == 0
    assert moved[-1] > 1e-3


def test_seed_and_overrides() -> None:
    same = dense_logits(tiny(seed=3), IDS)
    assert torch.equal(same, dense_logits(tiny(seed=3), IDS))
    assert not torch.equal(same, dense_logits(tiny(seed=4), IDS))
    model = tiny("qwen3", num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, vocab_size=99, tie_word_embeddings=True)
    assert (model.shape.layers, model.shape.heads, model.shape.group, model.shape.vocab) == (2, 6, 2, 99)
    assert len(model.blocks) == 2 and model.head.rows == 99


def test_pieces_have_their_shapes() -> None:
    model = tiny("gemma3")
    for count in (0, 1, 5):
        x = model.embed(IDS[:count])
        q, k, v = model.blocks[0].qkv(x)
        assert (x.shape, q.shape, k.shape, v.shape) == ((count, 64), (count, 4, 16), (count, 2, 16), (count, 2, 16))
        y = model.blocks[0].finish(x, torch.zeros(count, 4, 16))
        assert y.shape == x.shape and model.logits(model.final(y)).shape == (count, 256)
        assert y.data_ptr() != x.data_ptr() or not count
