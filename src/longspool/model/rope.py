"""Rotary position embeddings: from positions to the angles of one kind of layer.

Each class is one published scaling, named as Hugging Face names it in `rope_type`. Pairs are half-split (dimension i turns with
i + dim/2). All of it is fp32, since the models were trained with fp32 angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ModelError
from .raw import Raw

TAU = 2 * math.pi


@dataclass(frozen=True)
class Rope:
    """Plain RoPE over the first `dim` dimensions of a head. Equal settings make equal (and hashable) objects."""

    dim: int
    theta: float

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    @cached_property
    def powers(self) -> Tensor:
        """theta^(2i / dim), fp32 [dim/2]."""
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    @cached_property
    def frequencies(self) -> Tensor:
        """Radians a token, fp32 [dim/2]."""
        return 1.0 / self.powers

    def at(self, total: Tensor | int) -> Tensor:
        """Frequencies for sequences of `total` tokens: [dim/2], or [N, dim/2] for totals [N]."""
        return self.frequencies

    def angles(self, pos: Tensor, total: Tensor | int) -> tuple[Tensor, Tensor]:
        """(cos, sin) fp32 [N, dim/2] for int64 positions [N].

        `total` is the longest length that the sequence is known to reach, one for all or per token [N]: the whole prompt's length
        from its first chunk on, so that a chunked prefill turns like a whole one.
        """
        turn = pos[:, None] * self.at(total).to(pos.device)
        cos, sin = turn.cos(), turn.sin()
        return (cos, sin) if self.attention == 1.0 else (cos.mul_(self.attention), sin.mul_(self.attention))

    def reach(self, context: int) -> int:
        """The context that a model trained for `context` tokens serves with this scaling."""
        return context


@dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation: every frequency divided by `factor`."""

    factor: float

    @cached_property
    def frequencies(self) -> Tensor:
        return 1.0 / self.powers / self.factor


@dataclass(frozen=True)
class DynamicRope(Rope):
    """NTK-aware scaling: theta grows with the sequence once it is longer than `context`."""

    factor: float
    context: int

    def at(self, total: Tensor | int) -> Tensor:
        over = torch.as_tensor(total).clamp_min(self.context).to(torch.float64)
        stretch = (self.factor * over / self.context - (self.factor - 1)) ** (self.dim / (self.dim - 2))
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device=over.device) / self.dim
        return 1.0 / (self.theta * stretch).float()[..., None] ** steps

    def reach(self, context: int) -> int:
        return int(context * self.factor)


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1: long waves slowed by `factor`, short ones kept, a linear blend between the two bounds."""

    factor: float
    low: float
    high: float
    context: int

    @cached_property
    def frequencies(self) -> Tensor:
        full = 1.0 / self.powers
        turns = self.context * full / TAU  # full turns within the original context
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return keep * full + (1 - keep) * full / self.factor


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN: a ramp over dimensions from extrapolation (`fast` turns) to interpolation (`slow` turns)."""

    factor: float
    context: int
    gain: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    @property
    def attention(self) -> float:
        return self.gain

    def _turning(self, turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original context."""
        return self.dim * math.log(self.context / (turns * TAU)) / (2 * math.log(self.theta))

    @cached_property
    def frequencies(self) -> Tensor:
        low, high = self._turning(self.fast), self._turning(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        slow = ((torch.arange(self.dim // 2) - low) / ((high - low) or 0.001)).clamp(0, 1)
        return slow / (self.factor * self.powers) + (1 - slow) / self.powers

    def reach(self, context: int) -> int:
        return max(context, int(self.context * self.factor))


@dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE: a divisor for each pair, from the `long` list once the sequence is longer than `context`, else from `short`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    context: int
    gain: float

    @property
    def attention(self) -> float:
        return self.gain

    @cached_property
    def both(self) -> tuple[Tensor, Tensor]:
        """Frequencies for short and for long sequences."""
        return tuple(1.0 / (torch.tensor(f, dtype=torch.float32) * self.powers) for f in (self.short, self.long))  # type: ignore[return-value]

    def at(self, total: Tensor | int) -> Tensor:
        short, long = self.both
        if isinstance(total, int):
            return long if total > self.context else short
        return torch.where((total > self.context)[:, None], long.to(total.device), short.to(total.device))


def read_rope(raw: Raw, head_dim: int, layer_type: str = "full_attention") -> Rope:
    """The RoPE that a config asks for: `rope_parameters` (transformers 5, perhaps by layer type), or `rope_theta` and `rope_scaling`."""
    raw = raw.inner("rope_scaling" if "rope_scaling" in raw else "rope_parameters").inner(layer_type)
    # rope_scaling of transformers 4 says `type`; its `rope_type` wins where both stand.
    kind = raw.text("rope_type", raw.text("type", "default"))
    if kind in ("su", "yarn") and "short_factor" in raw:
        kind = "longrope"  # names that early Phi-3 configs gave it
    dim = int(head_dim * raw.number("partial_rotary_factor", 1.0))
    if dim % 2:
        raise ModelError(f"The model's config rotates {dim} dimensions of a head, where an even number is needed.")
    reader = _READERS.get(kind)
    if reader is None:
        raise ModelError(f"The rope type {kind!r} is not supported; known are {', '.join(_READERS)}.")
    return reader(raw, dim, raw.number("rope_theta", 10_000.0))


def _original(raw: Raw) -> int:
    return raw.count("original_max_position_embeddings", raw.count("max_position_embeddings"))


def _dynamic(raw: Raw, dim: int, theta: float) -> Rope:
    return DynamicRope(dim, theta, raw.number("factor"), raw.count("max_position_embeddings"))


def _llama3(raw: Raw, dim: int, theta: float) -> Rope:
    bounds = raw.number("low_freq_factor"), raw.number("high_freq_factor")
    return Llama3Rope(dim, theta, raw.number("factor"), *bounds, _original(raw))


def _yarn(raw: Raw, dim: int, theta: float) -> Rope:
    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    factor = raw.number("factor")
    usual = gain(raw.number("mscale", 0)) / gain(raw.number("mscale_all_dim", 0))
    if not (raw.number("mscale", 0) and raw.number("mscale_all_dim", 0)):
        usual = gain(1.0)
    ramp = raw.number("beta_fast", 32), raw.number("beta_slow", 1), raw.flag("truncate", True)
    return YarnRope(dim, theta, factor, _original(raw), raw.number("attention_factor", usual), *ramp)


def _longrope(raw: Raw, dim: int, theta: float) -> Rope:
    original = _original(raw)
    factor = raw.number("factor", raw.count("max_position_embeddings") / original)
    gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = raw.many("short_factor", float, dim // 2), raw.many("long_factor", float, dim // 2)
    return LongRope(dim, theta, short, long, original, raw.number("attention_factor", gain))


_READERS: dict[str, Callable[[Raw, int, float], Rope]] = {
    "default": lambda raw, dim, theta: Rope(dim, theta),
    "linear": lambda raw, dim, theta: LinearRope(dim, theta, raw.number("factor")),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
