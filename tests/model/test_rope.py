"""Angles against transformers far beyond the trained length, and against the float64 formula."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspool.model.config import Config
from longspool.model.rope import DynamicRope, LongRope, Rope

HALF = 32
SHORT, LONG = [1.0 + 0.05 * i for i in range(HALF)], [1.0 + 2.0 * i for i in range(HALF)]
LISTS = {"short_factor": SHORT, "long_factor": LONG}
KINDS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, every option": {
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn, given attention factor": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.8},
    "longrope": {"original_max_position_embeddings": 4096, **LISTS},
    "longrope, given factors": {"original_max_position_embeddings": 4096, "factor": 8.0, "attention_factor": 1.3, **LISTS},
}


def settings(kind: str) -> LlamaConfig:
    parameters = {"rope_type": kind.split(",")[0], "rope_theta": 500_000.0, **KINDS[kind]}
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=parameters)


def rope_of(config: LlamaConfig) -> Rope:
    rope = Config.from_hf(config.to_dict()).ropes[0]
    assert rope is not None
    return rope


@pytest.mark.parametrize("total", [100, 4096, 4097, 131_072])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_transformers(kind: str, total: int) -> None:
    config = settings(kind)
    pos = torch.arange(0, total, max(1, total // 997))
    pos[-1] = total - 1
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), pos[None])
    ours = rope_of(config).angles(pos, total)
    # An angle of 131,072 radians has an fp32 spacing of 1/128: two roundings of one frequency may differ by that much.
    far = 1e-6 + total * 2.0**-23
    for got, want in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(got, want[0, :, :HALF], atol=far, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind: str) -> None:
    config = settings(kind)
    torch.testing.assert_close(rope_of(config).at(100), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


def test_plain_angles_equal_the_formula() -> None:
    pos = torch.tensor([0, 1, 17, 4095])
    want = pos[:, None].double() * 10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    cos, sin = Rope(64, 10_000.0).angles(pos, 4096)
    torch.testing.assert_close(cos, want.cos().float(), atol=5e-4, rtol=0)
    torch.testing.assert_close(sin, want.sin().float(), atol=5e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_totals_by_token(kind: str) -> None:
    """A step over requests of several lengths turns each token by its own request's length."""
    rope = rope_of(settings(kind))
    pos, total = torch.tensor([0, 50, 4000, 9000, 20_000]), torch.tensor([100, 4096, 4097, 16_384, 40_000])
    together = rope.angles(pos, total)
    for i in range(len(pos)):
        for got, want in zip(together, rope.angles(pos[i : i + 1], int(total[i])), strict=True):
            torch.testing.assert_close(got[i], want[0], atol=2e-3 if i > 2 else 2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_length_matters(kind: str) -> None:
    """Chunks of one prompt that are told its whole length turn alike; told another length they do not."""
    rope = rope_of(settings(kind))
    pos = torch.arange(64)
    whole, part = rope.angles(pos, 40_000)[0], rope.angles(pos[32:], 40_000)[0]
    assert torch.equal(whole[32:], part)
    assert (rope.angles(pos, 100)[0] - whole).abs().max() > 0.01


def test_equal_settings_are_equal() -> None:
    a, b = rope_of(settings("longrope")), rope_of(settings("longrope"))
    assert isinstance(a, LongRope)
    assert a == b and hash(a) == hash(b)
    assert DynamicRope(64, 1e4, 2.0, 4096) != DynamicRope(64, 1e4, 4.0, 4096)
