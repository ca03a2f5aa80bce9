"""Qwen 2 and 2.5: Llama's block with biases on queries, keys and values; windows, if any, on the upper layers."""

from __future__ import annotations

from dataclasses import replace

from .config import Config, Family, dense, layer_types
from .layers import Block
from .raw import Raw

DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def upper(raw: Raw, name: str) -> Config:
    """The config of a model whose windows begin at `max_window_layers`, and only if `use_sliding_window` says so."""
    raw = raw.over(DEFAULTS)
    if not raw.flag("use_sliding_window", False):
        return dense(raw, name)
    first = raw.count("max_window_layers")
    return dense(raw, name, layer_types(raw, lambda layer: layer >= first))


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    return replace(upper(raw, "qwen2"), qkv_bias=True, out_bias=False)


FAMILY = Family(read, Block)
