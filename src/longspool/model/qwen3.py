"""Qwen 3: Qwen 2 without biases, but with a norm on each head's queries and keys."""

from __future__ import annotations

from .config import Config, Family
from .layers import NormedHeads
from .qwen2 import upper
from .raw import Raw

DEFAULTS = {"head_dim": 128}


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    return upper(raw.over(DEFAULTS), "qwen3")


FAMILY = Family(read, NormedHeads)
