"""A chain move by move, each by the best kernel of its own: for GPUs, and for matrices that are not packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ...values.chain import Add, Chain, Gate, Move, Norm, Product, Turn
from .. import matmul, rms_norm, rope
from ..activations import ACTIVATIONS

SLICE = 512  # tokens at once, so that the registers of a long prompt stay small

Angles = tuple[Tensor, Tensor] | None


def walk(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> list[Tensor]:
    """As the op; the tokens go slice by slice."""
    if len(x) <= SLICE:
        return _walk(x, chain, rest, angles)
    outs = [x.new_empty(len(x), chain.widths[register]) for register in chain.wanted]
    for part in _slices(len(x)):
        turns = None if angles is None else (angles[0][part], angles[1][part])
        for out, value in zip(outs, _walk(x[part], chain, [r[part] for r in rest], turns), strict=True):
            out[part] = value
    return outs


def _slices(tokens: int) -> Iterator[slice]:
    for first in range(0, tokens, SLICE):
        yield slice(first, min(first + SLICE, tokens))


def _walk(x: Tensor, chain: Chain, rest: list[Tensor], angles: Angles) -> list[Tensor]:
    held = dict(zip(chain.given, (x, *rest), strict=True))
    own: set[int] = set()  # registers that may be written in place
    for move, dead in zip(chain.moves, chain.dying(), strict=True):
        value = _made(move, held, move.to in own, chain.widths[move.to], angles)
        if value is not None:
            held[move.to] = value
            own.add(move.to)
        for register in dead:
            del held[register]
    return [held[register] for register in chain.wanted]


def _made(move: Move, held: dict[int, Tensor], own: bool, width: int, angles: Angles) -> Tensor | None:
    """The register after the move, or None where it stays."""
    match move:
        case Product(source, to, weight, bias, first):
            y = F.linear(held[source], weight, bias) if isinstance(weight, Tensor) else matmul(held[source], weight)
            if bias is not None and not isinstance(weight, Tensor):
                y += bias
            return _put(held, to, own, width, first, y)
        case Norm(source, to, gain, floor):
            x = held[source]
            if len(gain) == 1 and gain.shape[1] == width:
                return rms_norm(x, gain[0], floor)  # type: ignore[no-any-return]
            return _put(held, to, own, width, 0, _segments(x[:, : gain.numel()].unflatten(1, gain.shape), gain, floor).flatten(1))
        case Add(source, to):
            return held[to].add_(held[source]) if own else held[to] + held[source]
        case Gate(source, _, act):
            gate, up = held[source].chunk(2, -1)
            return ACTIVATIONS[act](gate).mul_(up)
        case Turn(to, heads, dim):
            if angles is None:
                return None
            return _put(held, to, own, width, 0, rope(held[to][:, : heads * dim].unflatten(1, (heads, dim)), *angles).flatten(1))


def _put(held: dict[int, Tensor], to: int, own: bool, width: int, first: int, y: Tensor) -> Tensor:
    """The register with y in its columns from `first` on."""
    if y.shape[1] == width:
        return y
    whole = held[to] if own else held[to].clone() if to in held else y.new_empty(len(y), width)
    whole[:, first : first + y.shape[1]] = y
    return whole


def _segments(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    """Each segment of x [N, P, S] normed with its row of gain [P, S]."""
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), x.new_tensor(floor))
    return (x / length).mul_(gain)
