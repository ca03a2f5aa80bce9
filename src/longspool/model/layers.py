"""What decoders are made of: norms, matrices that may stay packed, and the pre-norm block that families vary."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ModelError
from ..kernels import chain, matmul, rms_norm
from ..kernels.activations import ACTIVATIONS
from ..values import chain as chains
from ..values.chain import Chain
from ..values.packed import Packed
from .config import Config
from .weights import Source

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def stored(weight: Tensor | Packed) -> Tensor | Packed:
    """A matrix in the form that is kept: 2-byte floats are packed (same bytes), other dense ones are fp32."""
    if not isinstance(weight, Tensor):
        return weight
    kind = KINDS.get(weight.dtype)
    return Packed.from_float(weight.detach(), kind) if kind else weight.detach().float()  # type: ignore[arg-type]


class Linear:
    """y = x W^T + bias in fp32, over weights that stay as they were stored."""

    def __init__(self, weight: Tensor | Packed, bias: Tensor | None = None) -> None:
        self.weight = stored(weight)
        self.bias = bias

    @property
    def kind(self) -> str:
        return "dense" if isinstance(self.weight, Tensor) else self.weight.kind

    @property
    def rows(self) -> int:
        return self.weight.shape[0] if isinstance(self.weight, Tensor) else self.weight.rows

    def __call__(self, x: Tensor) -> Tensor:
        """[N, K] -> [N, M], always a fresh tensor."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        y: Tensor = matmul(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def moves(self, source: int, to: int) -> list[chains.Product]:
        """The same as moves of a chain."""
        return [chains.Product(source, to, self.weight, self.bias)]

    @staticmethod
    def stack(linears: list[Linear]) -> Linear:
        """One Linear whose outputs are those of all, side by side; one product for each run of weights of one kind."""
        runs = [_joined(list(run)) for _, run in groupby(linears, lambda linear: linear.kind)]
        return runs[0] if len(runs) == 1 else Apart(runs)


class Apart(Linear):
    """Linears over one input whose kinds differ: their outputs side by side."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def moves(self, source: int, to: int) -> list[chains.Product]:
        """One for each part."""
        moves = [move for part in self.parts for move in part.moves(source, to)]
        firsts = accumulate((part.rows for part in self.parts), initial=0)
        return [replace(move, first=first) for move, first in zip(moves, firsts, strict=False)]


def _joined(run: list[Linear]) -> Linear:
    """Linears of one kind as one."""
    if len(run) == 1:
        return run[0]
    given = next((one.bias for one in run if one.bias is not None), None)
    bias = None if given is None else torch.cat([given.new_zeros(one.rows) if one.bias is None else one.bias for one in run])
    weights = [one.weight for one in run]
    whole = torch.cat(weights) if isinstance(weights[0], Tensor) else Packed.concat(weights)  # type: ignore[arg-type]
    return Linear(whole, bias)


class Norm:
    """RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight, for a weight [S] or one for each of P segments, [P, S]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.gain = (weight * size**0.5).reshape(-1, size).contiguous()
        self.floor = (size * eps) ** 0.5

    def __call__(self, x: Tensor) -> Tensor:
        """[N, S] -> [N, S], for one segment."""
        assert len(self.gain) == 1, "a norm of several segments is a move of a chain"
        y: Tensor = rms_norm(x, self.gain[0], self.floor)
        return y

    def move(self, source: int, to: int) -> chains.Norm:
        return chains.Norm(source, to, self.gain, self.floor)


# The registers of a block's chains: the stream, what attention gave, the normed stream, gate and up, their product, what goes back
# to the stream, and the heads of queries, keys and values.
STREAM, ATTENDED, NORMED, GATES, INNER, BACK, HEADS = range(7)


class Block:
    """Attention and a gated MLP, each behind a norm, as in Llama. Families override what differs, or add the norms that Llama lacks."""

    mlp_norm = "post_attention_layernorm"
    heads_norm: Norm | None = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    def __init__(self, config: Config, source: Source, layer: int) -> None:
        if config.activation not in ACTIVATIONS:
            raise ModelError(f"The activation {config.activation!r} is not supported; known are {', '.join(ACTIVATIONS)}.")
        shape, at = config.shape, f"layers.{layer}"
        self.rope = config.ropes[layer]
        self.parts = (shape.heads, shape.kv_heads, shape.kv_heads)  # heads of queries, keys and values
        self.heads = (sum(self.parts), shape.head_dim)
        self.act = config.activation
        self.before_attention = norm(config, source, f"{at}.input_layernorm")
        self.inward = self.projections(config, source, f"{at}.self_attn")
        self.outward = linear(source, f"{at}.self_attn.o_proj", shape.width, shape.heads * shape.head_dim, config.out_bias)
        self.before_mlp = norm(config, source, f"{at}.{self.mlp_norm}")
        self.gate_up = self.gates(config, source, f"{at}.mlp")
        self.down = linear(source, f"{at}.mlp.down_proj", shape.width, config.inner, config.mlp_bias)

    def projections(self, config: Config, source: Source, at: str) -> Linear:
        """Queries, keys and values from the normed stream."""
        shape = config.shape
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
        sizes = {name: n * shape.head_dim for name, n in heads.items()}
        return Linear.stack([linear(source, f"{at}.{name}", n, shape.width, config.qkv_bias) for name, n in sizes.items()])

    def gates(self, config: Config, source: Source, at: str) -> Linear:
        """The MLP's gate and up matrices."""
        names = (f"{at}.gate_proj", f"{at}.up_proj")
        return Linear.stack([linear(source, name, config.inner, config.shape.width, config.mlp_bias) for name in names])

    @cached_property
    def entry(self) -> Chain:
        """From the stream to the heads of queries, keys and values."""
        normed = [] if self.heads_norm is None else [self.heads_norm.move(HEADS, HEADS)]
        moves: list[chains.Move] = [self.before_attention.move(STREAM, NORMED), *self.inward.moves(NORMED, HEADS), *normed]
        return self._chain((STREAM,), (STREAM, HEADS), [*moves, chains.Turn(HEADS, sum(self.parts[:2]), self.heads[1])])

    @cached_property
    def exit(self) -> Chain:
        """From the stream and what attention gave to the stream after this block."""
        attention = [*self.outward.moves(ATTENDED, BACK), *_back(self.after_attention)]
        gates: list[chains.Move] = [self.before_mlp.move(STREAM, NORMED), *self.gate_up.moves(NORMED, GATES)]
        mlp = [chains.Gate(GATES, INNER, self.act), *self.down.moves(INNER, BACK), *_back(self.after_mlp)]
        return self._chain((STREAM, ATTENDED), (STREAM,), [*attention, *gates, *mlp])

    def _chain(self, given: tuple[int, ...], wanted: tuple[int, ...], moves: list[chains.Move]) -> Chain:
        width, inner, (heads, dim) = self.before_attention.gain.shape[1], self.gate_up.rows // 2, self.heads
        return Chain((width, self.parts[0] * dim, width, 2 * inner, inner, width, heads * dim), given, wanted, tuple(moves))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the stream [N, W]: q [N, H, D], k and v [N, Hkv, D], not yet rotated."""
        _, y = chain(x, self.entry, [], None)
        q, k, v = y.view(x.shape[0], *self.heads).split_with_sizes(self.parts, 1)
        return q, k, v

    def finish(self, x: Tensor, attn: Tensor) -> Tensor:
        """The stream [N, W] after this block, from the one before it and what attention gave, [N, H, D]."""
        (x,) = chain(x, self.exit, [attn.flatten(1)], None)
        return x


class NormedHeads(Block):
    """A block that norms each head's queries and keys before rotation."""

    def __init__(self, config: Config, source: Source, layer: int) -> None:
        super().__init__(config, source, layer)
        shape, at = config.shape, f"layers.{layer}.self_attn"
        heads = {"q_norm": shape.heads, "k_norm": shape.kv_heads}
        vectors = ((source.vector(f"{at}.{name}.weight", shape.head_dim), n) for name, n in heads.items())
        weights = [(vector + config.norm_shift).expand(n, -1) for vector, n in vectors]
        self.heads_norm = Norm(torch.cat(weights), config.eps)


def _back(norm: Norm | None) -> list[chains.Move]:
    """The way back to the stream, through a norm where a family has one."""
    return [*([] if norm is None else [norm.move(BACK, BACK)]), chains.Add(BACK, STREAM)]


def linear(source: Source, name: str, rows: int, cols: int, bias: bool) -> Linear:
    """The Linear of that name; its bias is needed where the config says so, and taken wherever there is one."""
    given = bias or source.has(f"{name}.bias")
    return Linear(source.matrix(name, rows, cols), source.vector(f"{name}.bias", rows) if given else None)


def norm(config: Config, source: Source, name: str) -> Norm:
    """The norm of that name over the stream."""
    return Norm(source.vector(f"{name}.weight", config.shape.width) + config.norm_shift, config.eps)
