"""From a config and weights to a model."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..values import Shape
from ..values.chain import Chain
from ..values.packed import Packed
from .config import Config, family
from .layers import Block, Linear, Norm, norm
from .weights import Checkpoint, Source, Weights


class Model:
    """A decoder without its attention: what comes before, between and after the layers' attention."""

    def __init__(self, config: Config, blocks: list[Block], last: Norm, head: Linear, table: Tensor | Packed) -> None:
        self.config = config
        self.shape: Shape = config.shape
        self.blocks = blocks
        self.head = head
        self.norm = last
        self._table = table

    @property
    def device(self) -> torch.device:
        """Where the weights are; a pass computes there, while positions and page tables stay on the CPU."""
        return self._table.device

    def embed(self, ids: Tensor) -> Tensor:
        """Tokens int64 [N] -> the stream, fp32 [N, W]."""
        ids = ids.to(self.device)
        x = self._table.index_select(0, ids) if isinstance(self._table, Tensor) else self._table.take(ids)
        return x if self.config.embed_scale == 1.0 else x.mul_(self.config.embed_scale)

    @cached_property
    def links(self) -> tuple[Chain, ...]:
        """What lies between neighbouring layers' attentions: from the stream and what attention gave to the next layer's heads."""
        return tuple(a.exit.then(b.entry) for a, b in pairwise(self.blocks))

    def matrix(self, layer: int, name: str) -> Tensor:
        """A layer's matrix, fp32: "o", from what attention gave to the stream, [W, H * D]."""
        weight = {"o": self.blocks[layer].outward}[name].weight
        return weight if isinstance(weight, Tensor) else weight.unpack()

    def final(self, x: Tensor) -> Tensor:
        """The last norm, [N, W]."""
        return self.norm(x)

    def logits(self, h: Tensor) -> Tensor:
        """What `final` gave -> fp32 [N, V]."""
        y, cap = self.head(h), self.config.logit_cap
        return y.div_(cap).tanh_().mul_(cap) if cap else y


def build(config: Config, weights: Weights) -> Model:
    """The model of a config over weights by Hugging Face names. Raises ModelError for a missing tensor or a wrong shape."""
    return assemble(config, Checkpoint(weights))


def assemble(config: Config, source: Source) -> Model:
    """The model of a config over any source of weights."""
    shape = config.shape
    table = Linear(source.matrix("embed_tokens", shape.vocab, shape.width))
    head = table if config.tied else Linear(source.matrix("lm_head", shape.vocab, shape.width))
    block = family(config.family).block
    blocks = [block(config, source, layer) for layer in range(shape.layers)]
    return Model(config, blocks, norm(config, source, "norm"), head, table.weight)
