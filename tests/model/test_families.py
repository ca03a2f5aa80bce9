"""Each family equals transformers on small random models; a broken piece is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peer import SMALL, peer_logits, random_model, shaken
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from longspool.model.build import Model, build
from longspool.model.config import Config, families
from longspool.model.hf import from_transformers
from reference import dense_logits

BOUND = 1e-4
SLIDING = {"use_sliding_window": True, "sliding_window": 24}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.4 * i for i in range(6)]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 24}
WIDER = {"num_hidden_layers": 4}


def longrope(original: int) -> dict[str, object]:
    return {"original_max_position_embeddings": original, "rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, **FACTORS}}


CASES = {
    "llama": LlamaConfig(**SMALL),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, one KV head, wide heads": LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "head_dim": 20}),
    "llama, no groups, gelu": LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral, window": MistralConfig(**SMALL, sliding_window=24),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, tied, upper windows": Qwen2Config(**SMALL, **SLIDING, max_window_layers=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3, biases, windows": Qwen3Config(**SMALL, **SLIDING, head_dim=16, max_window_layers=0, attention_bias=True),
    "smollm3": SmolLM3Config(**{**SMALL, **WIDER}),
    "smollm3, own NoPE layers, windows": SmolLM3Config(**SMALL, **SLIDING, no_rope_layers=[0, 1, 0], tie_word_embeddings=False),
    "gemma2": Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma2, no caps": Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**{**SMALL, **WIDER}, **GEMMA, sliding_window_pattern=3),
    "gemma3, scaled full layers": Gemma3TextConfig(
        **SMALL,
        **GEMMA,
        final_logit_softcapping=4.0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        },
    ),
    "phi3": Phi3Config(**SMALL),
    "phi3, window": Phi3Config(**SMALL, sliding_window=24, tie_word_embeddings=True),
    "phi3, longrope below the switch": Phi3Config(**SMALL, **longrope(128)),
    "phi3, longrope above the switch": Phi3Config(**SMALL, **longrope(32)),
    "phi3, partial rotary": Phi3Config(
        **{**SMALL, "hidden_size": 64}, rope_parameters={"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.75}
    ),
}
IDS = torch.randint(1, 101, (80,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str) -> None:
    peer = random_model(CASES[name])
    want = peer_logits(peer, IDS)
    assert want.std(0).min() > 0.1, "the reference hardly varies from token to token"
    assert want.argmax(-1).unique().numel() > 10
    torch.testing.assert_close(dense_logits(from_transformers(peer), IDS), want, atol=BOUND, rtol=0)


ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 32, **FACTORS},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("trained", [32, 512])
def test_rope_scalings(kind: str, trained: int) -> None:
    """Sequences longer than the model was trained for (32), and shorter (512)."""
    parameters = {"rope_type": kind, "rope_theta": 700.0, **ROPES[kind]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = trained
    peer = random_model(LlamaConfig(**{**SMALL, "max_position_embeddings": trained}, rope_parameters=parameters))
    ours = from_transformers(peer)
    torch.testing.assert_close(dense_logits(ours, IDS), peer_logits(peer, IDS), atol=BOUND, rtol=0)
    plain = random_model(LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 700.0}))
    changed = (peer_logits(plain, IDS) - dense_logits(ours, IDS)).abs().max() > 0.1
    assert changed != (kind == "dynamic" and trained == 512), "dynamic alone changes nothing within the trained length"


@pytest.mark.parametrize("old", [False, True])
def test_multimodal_gemma3(old: bool) -> None:
    """The text part of a multimodal checkpoint, under the tensor names of transformers 5 and 4."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**SMALL, **GEMMA, "sliding_window_pattern": 2, "tie_word_embeddings": not old}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=not old, attn_implementation="eager"
    )
    peer = shaken(Gemma3ForConditionalGeneration(config))
    weights = dict(peer.state_dict())
    if old:
        weights = {k.replace("model.language_model.", "language_model.model."): v for k, v in weights.items()}
        weights["language_model.lm_head.weight"] = weights.pop("lm_head.weight")
    ours = build(Config.from_hf(config.to_dict()), weights)
    torch.testing.assert_close(dense_logits(ours, IDS), peer_logits(peer, IDS), atol=BOUND, rtol=0)


def drop_rope(model: Model) -> None:
    for block in model.blocks:
        block.rope = None


def drop_windows(model: Model) -> None:
    model.shape = replace(model.shape, windows=(None,) * model.shape.layers)


def wrong_scale(model: Model) -> None:
    model.shape = replace(model.shape, scale=model.shape.head_dim**-0.5)


def drop_cap(model: Model) -> None:
    model.shape = replace(model.shape, softcap=0.0)


def rope_everywhere(model: Model) -> None:
    for block in model.blocks:
        block.rope = model.blocks[0].rope


def drop_heads_norm(model: Model) -> None:
    model.blocks[0].heads_norm.gain.fill_(model.shape.head_dim**0.5)


def drop_bias(model: Model) -> None:
    model.blocks[0].inward.bias = None


BREAKS: list[tuple[str, Callable[[Model], None]]] = [
    ("llama", drop_rope),
    ("llama, biases", drop_bias),
    ("mistral, window", drop_windows),
    ("qwen2", drop_bias),
    ("qwen2, tied, upper windows", drop_windows),
    ("qwen3", drop_heads_norm),
    ("smollm3", rope_everywhere),
    ("gemma2", drop_windows),
    ("gemma2", drop_cap),
    ("gemma2, no caps", wrong_scale),
    ("gemma3", rope_everywhere),
    ("gemma3", drop_heads_norm),
    ("phi3, window", drop_windows),
    ("phi3", drop_rope),
]


@pytest.mark.parametrize(("name", "spoil"), BREAKS)
def test_a_broken_piece_is_seen(name: str, spoil: Callable[[Model], None]) -> None:
    """Each piece matters in these models by far more than the bound."""
    peer = random_model(CASES[name])
    broken = from_transformers(peer)
    spoil(broken)
    assert (dense_logits(broken, IDS) - peer_logits(peer, IDS)).abs().max() > 100 * BOUND


def test_every_family_has_a_case() -> None:
    assert {config.model_type.removesuffix("_text") for config in CASES.values()} == set(families())
