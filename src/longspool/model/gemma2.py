"""Gemma 2: norms before and after attention and MLP, capped logits, and windows on every second layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import ModelError
from .config import Config, Family, dense, layer_types
from .layers import Block as Plain
from .layers import norm
from .raw import Raw
from .weights import Source

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def gemma(raw: Raw, name: str, kinds: Sequence[str]) -> Config:
    """What Gemma 2 and 3 share: scaled embeddings, norm weights stored less one, a scale of its own for queries."""
    if raw.flag("use_bidirectional_attention", False):
        raise ModelError("The model attends in both directions, so it is an encoder; Longspool runs decoders.")
    config = dense(raw, name, kinds)
    return replace(
        config,
        shape=replace(config.shape, scale=raw.number("query_pre_attn_scalar") ** -0.5),
        activation=raw.text("hidden_activation"),
        embed_scale=config.shape.width**0.5,
        norm_shift=1.0,
        logit_cap=raw.number("final_logit_softcapping", 0.0),
    )


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    raw = raw.over(DEFAULTS)
    config = gemma(raw, "gemma2", layer_types(raw, lambda layer: layer % 2 == 0))
    return replace(config, shape=replace(config.shape, softcap=raw.number("attn_logit_softcapping", 0.0)))


class Block(Plain):
    """A block with norms on both sides of attention and MLP."""

    mlp_norm = "pre_feedforward_layernorm"

    def __init__(self, config: Config, source: Source, layer: int) -> None:
        super().__init__(config, source, layer)
        self.after_attention = norm(config, source, f"layers.{layer}.post_attention_layernorm")
        self.after_mlp = norm(config, source, f"layers.{layer}.post_feedforward_layernorm")


FAMILY = Family(read, Block)
