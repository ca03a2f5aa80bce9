"""Llama 2 and 3.x, and SmolLM2: the plain block."""

from __future__ import annotations

from .config import Config, Family, dense
from .layers import Block
from .raw import Raw


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    return dense(raw, "llama")


FAMILY = Family(read, Block)
