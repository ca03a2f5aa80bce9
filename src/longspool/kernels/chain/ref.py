"""A chain in plain torch, matrices unpacked whole."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.chain import Add, Chain, Gate, Norm, Product, Turn
from ..activations import ACTIVATIONS
from ..rms_norm import ref as rms_norm
from ..rope import ref as rope


def run(x: Tensor, chain: Chain, rest: list[Tensor], angles: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    held = [x.new_zeros(len(x), width) for width in chain.widths]
    for register, value in zip(chain.given, (x, *rest), strict=True):
        held[register] = value.clone()
    for move in chain.moves:
        to = held[move.to]
        match move:
            case Product(source, _, weight, bias, first):
                w = weight if isinstance(weight, Tensor) else weight.unpack()
                y = held[source] @ w.T
                to[:, first : first + y.shape[1]] = y if bias is None else y + bias
            case Norm(source, _, gain, floor):
                parts = held[source][:, : gain.numel()].view(len(x), *gain.shape)
                normed = [rms_norm.run(part, g, floor) for part, g in zip(parts.unbind(1), gain, strict=True)]
                to[:, : gain.numel()] = torch.stack(normed, 1).flatten(1)
            case Add(source, _):
                to += held[source]
            case Gate(source, _, act):
                first_half, second = held[source].chunk(2, -1)
                to.copy_(ACTIVATIONS[act](first_half) * second)
            case Turn(_, heads, dim) if angles is not None:
                to[:, : heads * dim] = rope.run(to[:, : heads * dim].view(len(x), heads, dim), *angles).flatten(1)
    return [held[register] for register in chain.wanted]
