"""Gemma 3: Gemma 2's block with normed heads; five windowed layers, with a RoPE of their own, to each full one."""

from __future__ import annotations

from dataclasses import replace

from . import gemma2
from .config import Config, Family, layer_types
from .layers import NormedHeads
from .raw import Raw
from .rope import read_rope

# Published configs leave out whatever equals transformers' defaults.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}


def read(raw: Raw) -> Config:
    """From its Hugging Face config, the text part of it where it is multimodal."""
    raw = raw.over(DEFAULTS)
    pattern = raw.count("sliding_window_pattern")
    kinds = layer_types(raw, lambda layer: (layer + 1) % pattern != 0)
    config = gemma2.gemma(raw, "gemma3", kinds)
    # rope_scaling of transformers 4 is meant for the full layers alone.
    local = Raw({**raw.values, "rope_scaling": None, "rope_theta": raw.number("rope_local_base_freq")})
    ropes = {"full_attention": config.ropes[0], "sliding_attention": read_rope(local, config.shape.head_dim, "sliding_attention")}
    return replace(config, ropes=tuple(ropes[kind] for kind in kinds))


class Block(NormedHeads, gemma2.Block):
    """Gemma 2's block with normed queries and keys."""


FAMILY = Family(read, Block)
