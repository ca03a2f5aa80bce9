"""Which blocks of keys each block of queries reads: a block-sparse attention pattern."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A block-sparse pattern. index int32 [H, Q, K'] lists key blocks (ascending), count int32 [H, Q] how many are valid.

    A key block b covers the row's logical tokens b*size to (b+1)*size; the causal limit is applied on top of it.
    """

    index: Tensor
    count: Tensor
    size: int

    @staticmethod
    def of(mask: Tensor, size: int) -> Blocks:
        """From a bool mask [H, Q, K] over blocks."""
        count = mask.sum(-1, dtype=torch.int32)
        width = max(int(count.max()), 1) if count.numel() else 1
        index = torch.argsort(~mask, dim=-1, stable=True)[..., :width].to(torch.int32)
        return Blocks(index.contiguous(), count, size)

    def mask(self, keys: int) -> Tensor:
        """bool [H, Q, keys]: the pattern over `keys` key blocks."""
        valid = torch.arange(self.index.shape[-1], device=self.index.device) < self.count[..., None]
        out = torch.zeros(*self.index.shape[:2], keys + 1, dtype=torch.bool, device=self.index.device)
        out.scatter_(-1, torch.where(valid, self.index.long(), keys), True)
        return out[..., :keys]

    def union(self, other: Blocks, keys: int) -> Blocks:
        return Blocks.of(self.mask(keys) | other.mask(keys), self.size)

    def intersect(self, other: Blocks, keys: int) -> Blocks:
        return Blocks.of(self.mask(keys) & other.mask(keys), self.size)
