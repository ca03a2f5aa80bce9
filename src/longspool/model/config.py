"""A model's dimensions, read from a Hugging Face config.

The `model_type` is the name of a module beside this one; its `FAMILY` says how to read the rest and how to build a block.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..values import Shape
from .raw import Raw
from .rope import Rope, read_rope

if TYPE_CHECKING:
    from .layers import Block
    from .weights import Source


@dataclass(frozen=True)
class Config:
    """What it takes to build a model. `ropes[layer]` is None for a layer without RoPE; layers of one kind share the object.

    `norm_shift` is added to the norms' stored weights (Gemma stores them less one).
    """

    family: str
    shape: Shape
    inner: int
    eps: float
    activation: str
    ropes: tuple[Rope | None, ...]
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    norm_shift: float = 0.0
    logit_cap: float = 0.0

    @staticmethod
    def from_hf(values: Mapping[str, object]) -> Config:
        """From the dict of a config.json, of transformers 4 or 5. Raises ModelError with a sentence that names what is wrong."""
        outer = Raw(values)
        if "quantization_config" in outer:
            raise ModelError(
                "The checkpoint is quantized (its config has a quantization_config), which is not read; "
                "take the unquantized checkpoint or a GGUF file."
            )
        raw = outer.inner("text_config")
        name = raw.text("model_type").removesuffix("_text")
        return family(name).read(raw)


@dataclass(frozen=True)
class Family:
    """What a family's module provides: how to read its config and how to build its block of one layer."""

    read: Callable[[Raw], Config]
    block: Callable[[Config, Source, int], Block]


def dense(raw: Raw, name: str, kinds: Sequence[str] | None = None) -> Config:
    """What most decoders share. `kinds` are the layers' types where some may slide; none given, every layer sees everything."""
    layers, heads, width = raw.count("num_hidden_layers"), raw.count("num_attention_heads"), raw.count("hidden_size")
    head_dim = raw.count("head_dim", width // max(heads, 1))
    kv_heads = raw.count("num_key_value_heads", heads)
    if min(layers, heads, kv_heads, head_dim, width) < 1 or heads % kv_heads:
        raise ModelError(
            f"The model's config has {layers} layers of width {width} with {heads} heads of {head_dim} over {kv_heads} key-value heads; "
            "all must be at least 1, and the key-value heads must divide the heads."
        )
    rope = read_rope(raw, head_dim)
    window = raw.count("sliding_window") if "sliding_window" in raw else None
    bias = raw.flag("attention_bias", False)
    shape = Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=width,
        vocab=raw.count("vocab_size"),
        context=rope.reach(raw.count("max_position_embeddings")),
        scale=head_dim**-0.5,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds or [""] * layers),
    )
    return Config(
        family=name,
        shape=shape,
        inner=raw.count("intermediate_size"),
        eps=raw.number("rms_norm_eps", 1e-6),
        activation=raw.text("hidden_act", "silu"),
        ropes=(rope,) * layers,
        tied=raw.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=raw.flag("mlp_bias", False),
    )


def layer_types(raw: Raw, sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """ "sliding_attention" or "full_attention" for each layer: the config's `layer_types`, or by the family's own rule."""
    layers = raw.count("num_hidden_layers")
    if "layer_types" not in raw:
        return tuple("sliding_attention" if sliding(i) else "full_attention" for i in range(layers))
    kinds = raw.many("layer_types", str, layers)
    if strange := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"The layer type {min(strange)!r} is not supported; known are sliding_attention and full_attention.")
    return kinds


def family(name: str) -> Family:
    """The family of that model_type. Raises ModelError that lists the known ones."""
    found = _family(name) if name.isidentifier() else None
    if found is None:
        known = ", ".join(families())
        raise ModelError(f"The architecture {name!r} is not supported; known are {known}.")
    return found


def families() -> list[str]:
    """Every known architecture."""
    here = importlib.import_module(__package__ or "").__path__
    return [m.name for m in pkgutil.iter_modules(here) if _family(m.name) is not None]


def _family(name: str) -> Family | None:
    path = f"{__package__}.{name}"
    if importlib.util.find_spec(path) is None:
        return None
    found = getattr(importlib.import_module(path), "FAMILY", None)
    return found if isinstance(found, Family) else None
