"""A decoder that torch can differentiate, for any family: its chains move by move, in plain torch, with attention of the caller's own.

The weights stay packed and get no gradients; a layer's activations are made again when its gradients are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels import matmul, unpack
from ..kernels.activations import ACTIVATIONS
from ..values import Shape
from ..values.chain import Add, Chain, Gate, Norm, Product, Turn
from ..values.packed import Packed
from .build import Model
from .layers import Block

Angles = tuple[Tensor, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, D], k and v [N, Hkv, D]) -> [N, H, D]."""


def states(model: Model, ids: Tensor, attend: Attend) -> Tensor:
    """The final states [N, M] of a sequence of tokens int64 [N], positions from 0 on."""
    x, pos = model.embed(ids), torch.arange(len(ids))
    for layer, block in enumerate(model.blocks):
        angles = None if block.rope is None else block.rope.angles(pos, len(ids))
        x = checkpoint(_layer, layer, block, x, angles, attend, use_reentrant=False)
    last = model.norm
    return normed(x, last.gain, last.floor)


def _layer(layer: int, block: Block, x: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
    _, heads = play(block.entry, [x], angles)
    q, k, v = heads.view(len(x), *block.heads).split_with_sizes(block.parts, 1)
    (out,) = play(block.exit, [x, attend(layer, q, k, v).flatten(1)], None)
    return out


def attended(shape: Shape, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Causal attention of a layer with its window and soft-cap, over what `seen` bool [N, N] leaves: [N, H, D]."""
    back = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
    visible = back >= 0
    if (window := shape.windows[layer]) is not None:
        visible = visible & (back < window)
    if seen is not None:
        visible = visible & seen
    k, v = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q, k) * shape.scale
    if shape.softcap:
        logits = torch.tanh(logits / shape.softcap) * shape.softcap
    return torch.einsum("hnm,mhd->nhd", logits.masked_fill(~visible, -torch.inf).softmax(-1), v)


def play(chain: Chain, given: Sequence[Tensor], angles: Angles | None) -> list[Tensor]:
    """The wanted registers of a chain; nothing is written in place."""
    held = dict(zip(chain.given, given, strict=True))
    for move in chain.moves:
        match move:
            case Product(source, to, weight, bias, first):
                y = _product(held[source], weight)
                y = y if bias is None else y + bias
                # What fills a register part by part comes in order.
                held[to] = y if first == 0 else torch.cat([held[to][:, :first], y], 1)
            case Norm(source, to, gain, floor):
                count = gain.numel()
                y = normed(held[source][:, :count].reshape(-1, *gain.shape), gain, floor).flatten(1)
                held[to] = torch.cat([y, held[to][:, count:]], 1) if count < chain.widths[to] else y
            case Add(source, to):
                held[to] = held[to] + held[source]
            case Gate(source, to, act):
                gate, up = held[source].chunk(2, -1)
                held[to] = ACTIVATIONS[act](gate) * up
            case Turn(to, heads, dim) if angles is not None:
                whole = held[to]
                turned = rotated(whole[:, : heads * dim].reshape(-1, heads, dim), angles).flatten(1)
                held[to] = torch.cat([turned, whole[:, heads * dim :]], 1)
    return [held[register] for register in chain.wanted]


def normed(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    """RMS norm of x [N, ..., S] with gain [..., S], as the op rms_norm has it."""
    gain = gain if x.dim() > 2 else gain.reshape(-1)
    return x / (x.square().sum(-1, keepdim=True) + floor**2).sqrt() * gain


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Half-split rotation of x [N, A, D]."""
    cos, sin = (part[:, None] for part in angles)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class _Packed(torch.autograd.Function):
    """x W^T, whose gradient goes to x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Packed) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.weight = weight
        y: Tensor = matmul(x.contiguous(), weight)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return grad @ unpack(ctx.weight), None


def _product(x: Tensor, weight: Tensor | Packed) -> Tensor:
    return x @ weight.T if isinstance(weight, Tensor) else _Packed.apply(x, weight)  # type: ignore[no-untyped-call]
