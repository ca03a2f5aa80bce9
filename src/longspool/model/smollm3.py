"""SmolLM3: Llama's block, where every fourth layer has no RoPE."""

from __future__ import annotations

from dataclasses import replace

from .config import Config, Family, dense, layer_types
from .layers import Block
from .raw import Raw

DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4}


def read(raw: Raw) -> Config:
    """From its Hugging Face config, whose `no_rope_layers` says 1 for a layer with RoPE."""
    raw = raw.over(DEFAULTS)
    layers = raw.count("num_hidden_layers")
    if "no_rope_layers" in raw:
        turned = raw.many("no_rope_layers", int, layers)
    else:
        interval = raw.count("no_rope_layer_interval")
        turned = tuple(int((layer + 1) % interval != 0) for layer in range(layers))
    windowed = raw.flag("use_sliding_window", False) and "sliding_window" in raw
    config = dense(raw, "smollm3", layer_types(raw, lambda layer: not turned[layer]) if windowed else None)
    return replace(config, ropes=tuple(rope if on else None for rope, on in zip(config.ropes, turned, strict=True)))


FAMILY = Family(read, Block)
