"""A GGUF file with the shape of Llama-3.2-1B and random Q8_0 weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

LAYERS, WIDTH, HEADS, KV, DIM, FFN, VOCAB = 16, 2048, 32, 8, 64, 8192, 128256


def write_model(path: Path) -> None:
    """Weights that keep the activations near one: without that both engines would compare noise."""
    import gguf
    import numpy as np

    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), "llama")
    for key, value in (
        ("block_count", LAYERS), ("context_length", 131072), ("embedding_length", WIDTH), ("feed_forward_length", FFN),
        ("head_count", HEADS), ("head_count_kv", KV), ("rope_dimension_count", DIM), ("vocab_size", VOCAB),
    ):  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(7)
    _matrix(writer, rng, "token_embd.weight", VOCAB, WIDTH)
    for i in range(LAYERS):
        for name, rows, cols in (
            ("attn_q", HEADS * DIM, WIDTH), ("attn_k", KV * DIM, WIDTH), ("attn_v", KV * DIM, WIDTH), ("attn_output", WIDTH, HEADS * DIM),
            ("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN),
        ):  # fmt: skip
            _matrix(writer, rng, f"blk.{i}.{name}.weight", rows, cols)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _matrix(writer: GGUFWriter, rng: np.random.Generator, name: str, rows: int, cols: int) -> None:
    """Q8_0 blocks: an fp16 scale and 32 codes."""
    import gguf
    import numpy as np

    raw = rng.integers(0, 256, (rows, cols // 32, 34), np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(1 / (74 * cols**0.5)).tobytes(), np.uint8)
    writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
