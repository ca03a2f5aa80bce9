"""What a GGUF file calls things, in the words of a Hugging Face checkpoint: tensor names and the config.

llama.cpp's conventions that are undone by the loader are declared here: the llama family's query and key rows are permuted (so that
rotation pairs neighbours), and Gemma's norms hold 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import ModelError
from .gguf_file import Value

HFConfig = dict[str, object]
Names = Mapping[str, tuple[int, ...]]  # GGUF tensor name -> shape

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _GATED | {"ffn_norm": "post_attention_layernorm"}
_GEMMA = (
    _ATTENTION
    | _GATED
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


class Keys:
    """The metadata of one architecture, typed. A missing or ill-typed key is a ModelError that names it."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self.metadata = metadata
        self.arch = str(metadata.get("general.architecture", ""))

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int):
            raise ModelError(f"The GGUF metadata hold {self.arch}.{key} = {value}, where a whole number is expected.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default))

    def text(self, key: str, default: str = "") -> str:
        return str(self.metadata.get(f"{self.arch}.{key}", default))

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def _get(self, key: str, default: float | None) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # per-layer numbers that all agree
        if value is None:
            raise ModelError(f"The GGUF metadata lack {self.arch}.{key}.")
        if not isinstance(value, (int, float)):
            raise ModelError(f"The GGUF metadata hold {self.arch}.{key} = {str(value)[:60]}, where one number is expected.")
        return value


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture maps to a Hugging Face model_type."""

    model_type: str
    blocks: Mapping[str, str]
    settings: Callable[[Keys, Names], HFConfig]
    permuted: bool = False
    norm_offset: bool = False


def family(metadata: Mapping[str, Value]) -> Family:
    """The family of a file. Raises ModelError for an architecture that is not known."""
    arch = Keys(metadata).arch
    if arch not in _FAMILIES:
        raise ModelError(f"The GGUF architecture {arch!r} is not supported; known are {', '.join(sorted(_FAMILIES))}.")
    return _FAMILIES[arch]


def hf_names(kin: Family, tensors: Iterable[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name, for the tensors that a checkpoint of the family has."""
    names = {}
    for name in tensors:
        stem, _, ending = name.rpartition(".")
        if stem in _TOP:
            names[f"{_TOP[stem]}.{ending}"] = name
        elif (found := _BLOCK.fullmatch(stem)) and found[2] in kin.blocks:
            names[f"model.layers.{found[1]}.{kin.blocks[found[2]]}.{ending}"] = name
    return names


def hf_config(metadata: Mapping[str, Value], tensors: Names, factors: Mapping[str, list[float]]) -> HFConfig:
    """The config dict. `factors` holds the values of the rope_freqs and rope_factors tensors under their stems."""
    kin, keys = family(metadata), Keys(metadata)
    if "token_embd.weight" not in tensors:
        raise ModelError("The GGUF file lacks the tensor token_embd.weight.")
    heads, width, layers = keys.count("attention.head_count"), keys.count("embedding_length"), keys.count("block_count")
    if min(heads, width, layers) < 1 or layers > len(tensors):
        have = f"{layers} layers of width {width} with {heads} heads"
        raise ModelError(f"The GGUF metadata say {have}, which can't be with the file's {len(tensors)} tensors.")
    head_dim = keys.count("attention.key_length", width // heads)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"Keys of {head_dim} and values of {keys.count('attention.value_length')} dimensions in one model are not supported."
        )
    config: HFConfig = {
        "model_type": kin.model_type,
        "vocab_size": tensors["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": _share(keys.count("rope.dimension_count", head_dim), head_dim),
        "rope_scaling": _rope_scaling(keys, factors),
    }
    return config | kin.settings(keys, tensors)


def _share(part: int, whole: int) -> float:
    """A fraction that gives back the part when it is multiplied by the whole and cut off."""
    return part / whole if int(whole * (part / whole)) == part else (part + 0.5) / whole


def _rope_scaling(keys: Keys, factors: Mapping[str, list[float]]) -> HFConfig | None:
    context = keys.count("context_length")
    original = keys.count("rope.scaling.original_context_length", context)
    if "rope_freqs" in factors:
        # A divisor per frequency: Llama 3's rope with its numbers worked out. longrope with both lists alike divides by just these.
        both = factors["rope_freqs"]
        return _longrope(both, both, 1.0, context)
    if "rope_factors_long" in factors:
        short = factors.get("rope_factors_short", factors["rope_factors_long"])
        return _longrope(short, factors["rope_factors_long"], keys.number("rope.scaling.attn_factor", 1.0), original)
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | _yarn_extras(keys)
    raise ModelError(f"The GGUF metadata ask for rope scaling {kind!r}; known are none, linear, yarn and longrope.")


def _longrope(short: list[float], long: list[float], attention: float, original: int) -> HFConfig:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "factor": 1.0,
        "original_max_position_embeddings": original,
    }


def _yarn_extras(keys: Keys) -> HFConfig:
    names = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
    return {theirs: keys.number(ours) for ours, theirs in names.items() if keys.has(ours)}


def _llama(keys: Keys, tensors: Names) -> HFConfig:
    if any(name.endswith("ffn_gate_exps.weight") for name in tensors):
        raise ModelError("This llama-architecture GGUF is a mixture of experts, which is not supported.")
    window = keys.count("attention.sliding_window", 0)
    return {"model_type": "mistral", "sliding_window": window} if window else {"hidden_act": "silu"}


def _smollm3(keys: Keys, tensors: Names) -> HFConfig:
    layers = keys.count("block_count")
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)], "layer_types": ["full_attention"] * layers}


def _qwen(keys: Keys, tensors: Names) -> HFConfig:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _query_scalar(keys: Keys, largest: int) -> float:
    """What the logits are scaled by the root of: the file does not say, and only the largest model differs (by its depth)."""
    heads = keys.count("attention.head_count")
    per_head = keys.count("embedding_length") // heads
    return per_head if keys.count("block_count") == largest else keys.count("attention.key_length", per_head)


def _gemma2(keys: Keys, tensors: Names) -> HFConfig:
    layers = keys.count("block_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(keys, 46),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
    }


def _gemma3(keys: Keys, tensors: Names) -> HFConfig:
    layers = keys.count("block_count")
    pattern = keys.count("attention.sliding_window_pattern", 6)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": keys.count("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scalar(keys, 62),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "rope_theta": keys.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _phi3(keys: Keys, tensors: Names) -> HFConfig:
    return {
        "hidden_act": "silu",
        "sliding_window": keys.count("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length", keys.count("context_length")),
    }


_FAMILIES = {
    "llama": Family("llama", _LLAMA, _llama, permuted=True),
    "smollm3": Family("smollm3", _LLAMA, _smollm3, permuted=True),
    "qwen2": Family("qwen2", _LLAMA, _qwen),
    "qwen3": Family("qwen3", _LLAMA, _qwen),
    "gemma2": Family("gemma2", _GEMMA, _gemma2, norm_offset=True),
    "gemma3": Family("gemma3", _GEMMA, _gemma3, norm_offset=True),
    "phi3": Family("phi3", _PHI3, _phi3),
}
