"""Open-TQ-Metal: 4-bit codes of a token's keys and values by groups of `group` dims, attended as they are.

Each group has a scale and a zero point of its own, x = s * code + z with s = (max - min) / 15: 4 + 32/group bits a number. Its part of a
logit is s * (q . code) + z * (sum of q), whose last sum is made once a query, so that no key or value is ever written out.

form="polar" is what the paper compares with, as PolarQuant and TurboQuant have it: a random rotation spreads a vector evenly over the
dims, its length takes 2 bytes, and each dim of its direction the nearest of 16 levels of a normal distribution, 4 + 16/D bits. An error e
of the direction moves a logit by up to scale * |q| |k| * e, whatever the logit is, so models that don't divide by sqrt(D) feel it sqrt(D)
times as much; the tests show that. Such codes are decoded to be attended. The paper's kernels, in Metal, split long rows; ours don't, and
tokens are encoded when their page is full. Groups are never wider than a head. The polar levels were inferred.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...kernels import attend_groups
from ...kernels.codes import decode_groups, encode_groups, pack, unpack
from ...method import Cost, Method, Needs, Paper, Trial
from ...roles import Encode, Field, Reach, Store
from ...values import Rows, Shape, Span
from .base import few

LEVELS = (0.12839, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259)
"""The positive half of the 16 levels with the least square error for a normal distribution (Max, 1960)."""


@dataclass(frozen=True)
class OpenTQMetal(Method, Encode):
    group: int = 32
    form: Literal["affine", "polar"] = "affine"
    window: int = 0
    seed: int = 0

    paper: ClassVar[Paper] = Paper(
        "S059",
        "Open-TQ-Metal: fused int4 attention",
        "metal-int4-sdpa",
        "Llama-3.1-70B at 128K on one Mac of 64 GB; KV of 40 GB in 12.5 GB",
    )
    identity: ClassVar[float] = 0.25
    trials: ClassVar[tuple[Trial, ...]] = (
        Trial("open_tq_metal", beats=("open_tq_metal(group=64)",), claim="Groups of 32 lose less than a group a head."),
        Trial("open_tq_metal", beats=("open_tq_metal(form='polar')",), claim="Affine codes lose less than codes of directions."),
    )

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="rotated")

    def check(self, shape: Shape) -> list[str]:
        reasons = [] if self.window >= 0 else [f"window={self.window} must not be negative."]
        if self.group < 16 or shape.head_dim % self.size(shape.head_dim) or self.size(shape.head_dim) % 16:
            reasons.append(f"group={self.group} must be a multiple of 16 that divides the model's head_dim of {shape.head_dim}.")
        return reasons

    def size(self, dim: int) -> int:
        """Dims of a group."""
        return min(self.group, dim)

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        dim = shape.head_dim
        parts = Field((page, 1 if self.form == "polar" else dim // self.size(dim)), torch.float16)
        fields = {"k": (codes := Field((page, dim // 2), torch.uint8)), "v": codes, "k_scale": parts, "v_scale": parts}
        return fields if self.form == "polar" else fields | {"k_zero": parts, "v_zero": parts}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        for name, x in (("k", k.transpose(1, 2)), ("v", v)):
            parts = _polar(x, self.seed) if self.form == "polar" else encode_groups(x, self.size(x.shape[-1]))
            for part, value in zip((name, f"{name}_scale", f"{name}_zero"), parts, strict=False):
                store[part][pages] = value

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        k, v = (self._decoded(store, name, pages) for name in ("k", "v"))
        return k.transpose(1, 2).contiguous(), v

    def _decoded(self, store: Store, name: str, pages: Tensor) -> Tensor:
        codes, scale = store[name][pages], store[f"{name}_scale"][pages]
        return _vectors(codes, scale, self.seed) if self.form == "polar" else decode_groups(codes, scale, store[f"{name}_zero"][pages])

    def attend(self, q: Tensor, store: Store, rows: Rows, reach: Reach, span: Span, shape: Shape) -> tuple[Tensor, Tensor] | None:
        if self.form == "polar" or not few(reach):
            return None
        pool = (store[name] for name in ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero"))
        at = (rows.table, rows.length, reach.spans, reach.lo, reach.hi, shape.scale)
        out, lse = attend_groups(q, *pool, *at, softcap=shape.softcap)
        return out, lse

    def cost(self, shape: Shape) -> Cost:
        size = shape.head_dim + (4 if self.form == "polar" else 8 * shape.head_dim / self.size(shape.head_dim))
        return Cost(device=size, moved=size)


@functools.lru_cache(maxsize=16)
def _rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """A random orthogonal matrix."""
    q: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)))[0]
    return q.to(device)


def _polar(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [.., D/2] and lengths fp16 [.., 1] of x [.., D]."""
    length, levels = x.norm(dim=-1, keepdim=True), _levels(x.device)
    turned = x @ _rotation(x.shape[-1], seed, x.device) * (x.shape[-1] ** 0.5 / length.clamp_min(1e-20))
    return pack(torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)), length.to(torch.float16)


def _vectors(codes: Tensor, length: Tensor, seed: int) -> Tensor:
    """[.., D] again."""
    turned: Tensor = _levels(codes.device)[unpack(codes).long()] * (length.float() / (2 * codes.shape[-1]) ** 0.5)
    return turned @ _rotation(turned.shape[-1], seed, turned.device).T


def _levels(device: torch.device) -> Tensor:
    return torch.tensor([-x for x in reversed(LEVELS)] + [*LEVELS], device=device)
