"""Random paged rows for the specs: ragged, with shuffled pages and NaN wherever no token was written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pool:
    """kp [Pages, D, W] and vp [Pages, W, D] with the rows table int32 [R, P] and length int32 [R]."""

    kp: Tensor
    vp: Tensor
    table: Tensor
    length: Tensor


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def place(seed: int, lengths: list[int], page: int, spare: int = 3) -> tuple[Tensor, Tensor, int]:
    """A shuffled table int32 [R, P], the lengths int32 [R] and the number of pages of the pool."""
    used = [-(-n // page) for n in lengths]
    total = sum(used) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(lengths), max([*used, 1])), -1, dtype=torch.int32)
    first = 0
    for row, n in enumerate(used):
        table[row, :n] = order[first : first + n]
        first += n
    return table, torch.tensor(lengths, dtype=torch.int32), total


def pool(seed: int, lengths: list[int], dim: int, page: int, dtype: torch.dtype = torch.float32) -> Pool:
    """Rows of these lengths over a pool whose free slots hold NaN, so that a kernel that reads them is found out."""
    table, length, total = place(seed, lengths, page)
    kp = torch.full((total, dim, page), float("nan"))
    vp = torch.full((total, page, dim), float("nan"))
    for row, n in enumerate(lengths):
        for ordinal in range(-(-n // page)):
            fill = min(page, n - ordinal * page)
            at = int(table[row, ordinal])
            kp[at, :, :fill] = noise(seed + 31 * row + 7 * ordinal + 1, dim, fill)
            vp[at, :fill] = noise(seed + 31 * row + 7 * ordinal + 2, fill, dim)
    return Pool(kp.to(dtype), vp.to(dtype), table, length)
