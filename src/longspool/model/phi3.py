"""Phi-3, 3.5 and 4-mini: Llama's block over matrices that are stored stacked, mostly with LongRoPE."""

from __future__ import annotations

from .config import Config, Family, dense
from .layers import Block as Plain
from .layers import Linear, linear
from .raw import Raw
from .weights import Source

DEFAULTS = {"rms_norm_eps": 1e-5}


def read(raw: Raw) -> Config:
    """From its Hugging Face config."""
    return dense(raw.over(DEFAULTS), "phi3", ["sliding_attention"] * raw.count("num_hidden_layers"))


class Block(Plain):
    """Llama's block from stacked matrices."""

    def projections(self, config: Config, source: Source, at: str) -> Linear:
        heads, dim = self.heads
        return linear(source, f"{at}.qkv_proj", heads * dim, config.shape.width, config.qkv_bias)

    def gates(self, config: Config, source: Source, at: str) -> Linear:
        return linear(source, f"{at}.gate_up_proj", 2 * config.inner, config.shape.width, config.mlp_bias)


FAMILY = Family(read, Block)
