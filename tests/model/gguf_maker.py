"""Writes GGUF files the way llama.cpp's converter does: names by the gguf package's own map, metadata by its writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}
PERMUTED = ("llama", "mistral", "smollm3")

Hook = Callable[[gguf.GGUFWriter], None]


def export(model: PreTrainedModel, path: Path, kinds: Mapping[str, Kind] | None = None, extra: Hook | None = None) -> Path:
    """The model as a GGUF file. `kinds` gives the tensor type of names with that ending; everything else is F32."""
    config = model.config
    family = config.model_type
    arch = ARCHS[family]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    shape(writer, config)
    vocabulary(writer, config.vocab_size)
    if extra:
        extra(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        if family in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = permuted(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = next((kind for ending, kind in (kinds or {}).items() if theirs.endswith(ending)), Kind.F32)
        writer.add_tensor(theirs, encoded(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """The converter's permutation of query and key rows."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def encoded(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Values in a tensor type; for the K types, which the package can't make, random blocks with sane scales."""
    if kind not in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(np.ascontiguousarray(values), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.shape[0])
    raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (*raw.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        raw[..., -2:] = scales[..., :2]
    elif kind == Kind.Q2_K:
        raw[..., -4:] = scales
    else:
        raw[..., :4] = scales
    return raw.reshape(values.shape[0], -1)


def shape(writer: gguf.GGUFWriter, config) -> None:  # type: ignore[no-untyped-def]
    """The metadata that the converter writes for every decoder."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if config.model_type in ("mistral", "gemma2", "gemma3_text", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    scaling(writer, full, head_dim, config)


def scaling(writer: gguf.GGUFWriter, rope: Mapping[str, object], head_dim: int, config) -> None:  # type: ignore[no-untyped-def]
    """Rope scaling as metadata, or as the tensors of divisors that the converter works out."""
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(rope, head_dim), np.float32))
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def llama3_divisors(rope: Mapping[str, float], head_dim: int) -> list[float]:
    out = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        old, low, high, factor = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
        )
        if wave < old / high:
            out.append(1.0)
        elif wave > old / low:
            out.append(factor)
        else:
            smooth = (old / wave - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of single letters, two merges and control tokens."""
    tokens = ["<|begin|>", "<|im_end|>", "ab", "abc", *(chr(i) for i in range(33, 127))]
    tokens = [*tokens, *(f"<unused{i}>" for i in range(size))][:size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (size - 2))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}ab{% endif %}")
