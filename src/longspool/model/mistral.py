"""Mistral: Llama's block, with a sliding window on every layer where the config gives one."""

from __future__ import annotations

from .config import Config, Family, dense
from .layers import Block
from .raw import Raw

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    raw = raw.over(DEFAULTS)
    return dense(raw, "mistral", ["sliding_attention"] * raw.count("num_hidden_layers"))


FAMILY = Family(read, Block)
