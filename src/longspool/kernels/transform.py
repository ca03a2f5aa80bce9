"""A transform coder's parts: principal directions, how bits are given to coordinates, and a token's bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..values.fit import Fit


def pca(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The mean [P] of vectors x [n, P] and their principal directions [P, r], those of most variance first, at most `most` of them."""
    mean = x.mean(0)
    x = x - mean
    if len(x) >= x.shape[1]:
        return mean, torch.linalg.eigh((x.T @ x).double())[1].flip(1)[:, :most].float()
    values, vectors = torch.linalg.eigh((x @ x.T).double())
    some = values > 1e-6 * values[-1]
    basis = x.T @ (vectors[:, some] / values[some].sqrt()).float()
    return mean, basis.flip(1)[:, :most]


@dataclass(frozen=True, eq=False)
class Transform:
    """Of the layers that are stored together the mean [P], the basis [P, r], what leads back from coordinates [P, r], and these' bytes."""

    mean: Tensor
    basis: Tensor
    back: Tensor
    layout: Layout


@functools.lru_cache(maxsize=64)
def transform(fit: Fit, name: str, layers: tuple[int, ...], room: int) -> Transform:
    """What was fitted to all layers, or to some of them: their rows of the basis, which are no orthogonal one, and as many of the leading
    groups of coordinates as fit into a token's bytes."""
    mean, basis, known = fit[f"{name}.mean"], fit[f"{name}.basis"], fit["layers"].tolist()
    layout = Layout.of(fit[f"{name}.groups"])
    if list(layers) == known:
        return Transform(mean, basis, basis, layout)
    while layout.size > room:
        *others, (size, bits) = layout.groups
        layout = Layout((*others, (size - 1, bits)) if size > 1 else tuple(others))
    own = [known.index(layer) for layer in layers]
    mean, basis = (x.unflatten(0, (len(known), -1))[own].flatten(0, 1) for x in (mean, basis[:, : layout.count]))
    return Transform(mean, basis, torch.linalg.pinv(basis.float()).T, layout)


SIZES = tuple(1 << i for i in range(11))
BITS = (2, 4, 8)
SLACK = 3  # bytes, as the codes of each width end with a whole one


def allot(d: Tensor, room: int) -> Tensor:
    """How the coordinates of d [n, r], in order, are cut into groups, int32 [groups, 2] of (coordinates, bits), so that a token's codes and
    each group's scale and shift of 2 bytes take at most `room` bytes and the square error is least. What follows the groups is dropped."""
    count, space = d.shape[1], 4 * (room - SLACK)  # in units of 2 bits
    tail = torch.cat([d.square().mean(0).flip(0).cumsum(0).flip(0), d.new_zeros(1)]).double()
    best = torch.full((count + 1, space + 1), torch.inf, dtype=torch.float64)  # the least error of the first i within so many units
    best[0] = 0
    came = torch.full((count + 1, space + 1), -1, dtype=torch.int16)
    errors = _errors(d, [size for size in SIZES if size <= count])
    for i in range(count):
        for s, size in enumerate(SIZES):
            if i + size > count:
                break
            for b, bits in enumerate(BITS):
                cost = (size * bits + 32) // 2
                if cost > space:
                    continue
                error = best[i, : space + 1 - cost] + errors[size][b][i]
                better = error < best[i + size, cost:]
                best[i + size, cost:][better] = error[better]
                came[i + size, cost:][better] = s * len(BITS) + b
    end = int((best[:, space] + tail).argmin())
    return _walked(best, came, end, space)


def _errors(d: Tensor, sizes: Sequence[int]) -> dict[int, list[Tensor]]:
    """For each size and width of code, the mean square error of each run of coordinates by its first: a twelfth of the step squared."""
    low = high = d
    found, size = {}, 1
    while True:
        if size in sizes:
            span = (high - low).double().square().mean(0)
            found[size] = [span / (2**bits - 1) ** 2 / 12 * size for bits in BITS]
        if size >= max(sizes):
            return found
        low, high = torch.minimum(low[:, :-size], low[:, size:]), torch.maximum(high[:, :-size], high[:, size:])
        size *= 2


def _walked(best: Tensor, came: Tensor, end: int, space: int) -> Tensor:
    groups: list[tuple[int, int]] = []
    while end:
        # The table holds what can be had within so many units; the last choice stands where its error was first reached.
        size, bits = SIZES[int(came[end, space]) // len(BITS)], BITS[int(came[end, space]) % len(BITS)]
        groups.append((size, bits))
        end, space = end - size, space - (size * bits + 32) // 2
    return torch.tensor(groups[::-1], dtype=torch.int32).view(-1, 2)


@dataclass(frozen=True)
class Layout:
    """A token's bytes: each group's scale and shift, then its codes, groups of the same width together."""

    groups: tuple[tuple[int, int], ...]

    @staticmethod
    def of(groups: Tensor) -> Layout:
        return Layout(tuple((int(size), int(bits)) for size, bits in groups.tolist()))

    @property
    def count(self) -> int:
        """Coordinates."""
        return sum(size for size, _ in self.groups)

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * len(self.groups) + sum(-(-sum(s for s, b in self.groups if b == bits) * bits // 8) for bits in BITS)

    def encode(self, d: Tensor) -> Tensor:
        """Bytes uint8 [n, B] of coordinates d [n, r]."""
        if not self.groups:
            return d.new_zeros(len(d), 0, dtype=torch.uint8)
        parts = d.split([size for size, _ in self.groups], 1)
        low = torch.stack([p.amin(1) for p in parts], 1).to(torch.float16)
        most = torch.tensor([2**bits - 1 for _, bits in self.groups], device=d.device)
        scale = ((torch.stack([p.amax(1) for p in parts], 1) - low.float()) / most).clamp_min(2.0**-14).to(torch.float16)
        codes: dict[int, list[Tensor]] = {bits: [] for bits in BITS}
        for i, (part, (_, bits)) in enumerate(zip(parts, self.groups, strict=True)):
            code = ((part - low[:, i : i + 1].float()) / scale[:, i : i + 1].float()).round().clamp(0, 2**bits - 1)
            codes[bits].append(code.to(torch.uint8))
        packed = [_packed(torch.cat(found, 1), bits) for bits, found in codes.items() if found]
        return torch.cat([scale.view(torch.uint8), low.view(torch.uint8), *packed], 1)

    def decode(self, raw: Tensor) -> Tensor:
        """Coordinates [n, r] of bytes [n, >= B]."""
        count, at = len(self.groups), 4 * len(self.groups)
        scale, low = (raw[:, i * 2 * count : (i + 1) * 2 * count].contiguous().view(torch.float16).float() for i in range(2))
        found: dict[int, Tensor] = {}
        for bits in BITS:
            size = sum(s for s, b in self.groups if b == bits)
            width = -(-size * bits // 8)
            found[bits] = _spread(raw[:, at : at + width], bits)[:, :size]
            at += width
        out, used = [], dict.fromkeys(BITS, 0)
        for i, (size, bits) in enumerate(self.groups):
            code = found[bits][:, used[bits] : used[bits] + size]
            out.append(code * scale[:, i : i + 1] + low[:, i : i + 1])
            used[bits] += size
        return torch.cat(out, 1) if out else scale


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Several codes a byte, the first one lowest."""
    per = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per)).unflatten(1, (-1, per)).int()
    shifts = torch.arange(per, device=codes.device, dtype=torch.int32) * bits
    return (codes << shifts).sum(2).to(torch.uint8)


def _spread(raw: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(8 // bits, device=raw.device, dtype=torch.int32) * bits
    return ((raw[:, :, None].int() >> shifts) & (2**bits - 1)).flatten(1).float()
