"""GGUF files: the header against the gguf package's reader, every tensor type, every architecture, every kind of damage."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_maker import export, finish, permuted, shape, vocabulary
from peer import SMALL, peer_logits, random_model
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from longspool.errors import ModelError
from longspool.model.gguf_file import GGUFFile
from longspool.model.load import load
from longspool.model.sources import GGUFSource
from longspool.values.packed import Packed
from reference import dense_logits

BOUND = 1e-4
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.5 + 0.4 * i for i in range(6)]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "tie_word_embeddings": True}


def rope(**values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 500.0, **values}}


CASES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama wide heads": LlamaConfig(**SMALL, head_dim=20),
    "llama linear": LlamaConfig(**SMALL, **rope(rope_type="linear", factor=4.0)),
    "llama yarn": LlamaConfig(**SMALL, **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama 3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SMALL, sliding_window=24),
    "smollm3": SmolLM3Config(**{**SMALL, "num_hidden_layers": 5}),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "gemma2": Gemma2Config(**{**SMALL, **GEMMA}),
    "gemma3": Gemma3TextConfig(**{**SMALL, **GEMMA, "num_hidden_layers": 7}),
    "gemma3 linear": Gemma3TextConfig(
        **{**SMALL, **GEMMA, "num_hidden_layers": 7},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": Phi3Config(**SMALL, sliding_window=24),
    "phi3 partial": Phi3Config(**{**SMALL, "hidden_size": 64}, **rope(rope_type="default", partial_rotary_factor=0.5)),
    "phi3 longrope": Phi3Config(**SMALL, original_max_position_embeddings=64, **rope(rope_type="longrope", **FACTORS)),
}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(1, 101, (90,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CASES)
def test_architecture_equals_transformers(case: str, ids: Tensor, tmp_path: Path) -> None:
    peer = random_model(CASES[case])
    loaded = load(str(export(peer, tmp_path / "m.gguf")))
    for part in (ids, ids[:40]):  # longer and shorter than the original context of the scaled ropes
        want = peer_logits(peer, part)
        assert want.std() > 0.3
        assert (dense_logits(loaded.model, part) - want).abs().max() < BOUND
    tied = CASES[case].tie_word_embeddings
    assert (
        loaded.report.parameters == sum(p.numel() for p in peer.parameters()) and (loaded.model.head.weight is loaded.model._table) == tied
    )


def test_forgotten_permutation_is_seen(ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = random_model(CASES["llama"])
    path = export(peer, tmp_path / "m.gguf")
    monkeypatch.setattr(GGUFSource, "_heads", lambda self, name: 0)
    assert (dense_logits(load(str(path)).model, ids) - peer_logits(peer, ids)).abs().max() > 0.1


@pytest.fixture(scope="module")
def wide() -> PreTrainedModel:
    """A model whose matrices hold whole blocks of every type: widths of 256 and an odd number of rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 101}
    return random_model(LlamaConfig(**{**SMALL, **sizes}))


def stored_rows(path: Path, name: str) -> np.ndarray:
    """A tensor by the gguf package's reader and dequantizer."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16, Kind.BF16, Kind.F32], ids=lambda k: k.name)
def test_type_is_kept_bit_by_bit(kind: Kind, wide: PreTrainedModel, tmp_path: Path) -> None:
    path = export(wide, tmp_path / "m.gguf", {"embd.weight": kind, "attn_k.weight": kind})
    source = GGUFSource(path)
    embedding = source.read("model.embed_tokens.weight", None)
    keys = source.read("model.layers.0.self_attn.k_proj.weight", None)
    if kind == Kind.F32:
        assert isinstance(embedding, Tensor) and isinstance(keys, Tensor)
    else:
        assert isinstance(embedding, Packed) and isinstance(keys, Packed) and embedding.kind == keys.kind == kind.name.lower()
        embedding, keys = embedding.unpack(), keys.unpack()
    assert np.array_equal(embedding.numpy(), stored_rows(path, "token_embd.weight"))
    assert np.array_equal(permuted(keys.numpy(), 2), stored_rows(path, "blk.0.attn_k.weight"))
    assert not source.notes


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K], ids=lambda k: k.name)
def test_other_type_is_repacked_at_8_bits(kind: Kind, wide: PreTrainedModel, tmp_path: Path) -> None:
    path = export(wide, tmp_path / "m.gguf", {"ffn_down.weight": kind})
    source = GGUFSource(path)
    packed = source.read("model.layers.0.mlp.down_proj.weight", None)
    assert isinstance(packed, Packed) and packed.kind == "q8_0"
    want = stored_rows(path, "blk.0.ffn_down.weight")
    largest = np.abs(want.reshape(256, -1, 32)).max(-1, keepdims=True).repeat(32, -1).reshape(want.shape)
    error = np.abs(packed.unpack().numpy() - want)
    assert (error <= largest * (0.5 / 127 + 2**-10)).all() and error.max() > 0  # half a step, and the scale's own rounding
    assert source.notes == {f"{kind.name} unpacked and packed as q8_0": 1}
    exact = source.read("model.layers.0.mlp.down_proj.weight", "f32")
    assert isinstance(exact, Tensor) and np.array_equal(exact.numpy(), want)


def test_slices_do_not_show(wide: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GGUFSource(export(wide, tmp_path / "m.gguf", {"token_embd.weight": Kind.Q6_K}))
    whole = source.read("model.embed_tokens.weight", None)
    monkeypatch.setattr("longspool.model.sources._SLICE", 32 * 256)
    assert isinstance(whole, Packed)
    assert torch.equal(source.read("model.embed_tokens.weight", None).unpack(), whole.unpack())


def test_header_equals_the_gguf_package(tmp_path: Path) -> None:
    def every_type(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("t.u8", 200)
        writer.add_int8("t.i8", -3)
        writer.add_int16("t.i16", -300)
        writer.add_uint64("t.u64", 2**40)
        writer.add_int64("t.i64", -(2**40))
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.bool", True)
        writer.add_string("t.string", "naïve ✓")
        writer.add_array("t.floats", [0.5, 1.5])
        writer.add_array("t.texts", ["", "ü", "three"])

    path = export(random_model(CASES["llama"]), tmp_path / "m.gguf", {"attn_q.weight": Kind.F16}, every_type)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    want = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == want and "t.texts" in want
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist())) and info.kind == tensor.tensor_type
        assert info.start == tensor.data_offset and info.nbytes == tensor.n_bytes
        assert np.array_equal(ours.raw(tensor.name).flatten(), tensor.data.view(np.uint8).flatten())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return export(random_model(CASES["llama"]), tmp_path / "small.gguf")


def test_any_cut_is_a_model_error(small: Path) -> None:
    whole = small.read_bytes()
    start = min(info.start for info in GGUFFile(small).tensors.values())
    for size in (*range(0, start, 97), start, len(whole) - 40):
        small.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"truncated|damaged|not a GGUF"):
            GGUFFile(small)


def test_random_damage_is_a_model_error_or_nothing(small: Path) -> None:
    whole = small.read_bytes()
    start = min(info.start for info in GGUFFile(small).tensors.values())
    rng, refused = random.Random(0), 0
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            broken[rng.randrange(start)] = rng.randrange(256)
        small.write_bytes(broken)
        try:
            load(str(small))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).endswith(".")
    assert refused > 100


def test_bad_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, text in (
        (b"PK\x03\x04 a zip archive", "is not a GGUF file: it begins with b'PK"),
        (b"GGUF" + (99).to_bytes(4, "little") + bytes(16), "GGUF version 99"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "big-endian"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=text):
            load(str(path))


def rewritten(model: PreTrainedModel, path: Path, arch: str, drop: str = "", hook=None) -> Path:  # type: ignore[no-untyped-def]
    """A llama GGUF under another architecture's name, or without one tensor."""
    writer = gguf.GGUFWriter(str(path), arch)
    shape(writer, model.config)
    vocabulary(writer, model.config.vocab_size)
    if hook:
        hook(writer)
    for tensor in gguf.GGUFReader(export(model, path.with_name("whole.gguf"))).tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return path


def test_wrong_content(tmp_path: Path) -> None:
    model = random_model(CASES["llama"])
    with pytest.raises(
        ModelError, match="architecture 'mamba' is not supported; known are gemma2, gemma3, llama, phi3, qwen2, qwen3, smollm3"
    ):
        load(str(rewritten(model, tmp_path / "a.gguf", "mamba")))
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.down_proj.weight"):
        load(str(rewritten(model, tmp_path / "b.gguf", "llama", "blk.1.ffn_down.weight")))
    with pytest.raises(ModelError, match=r"lack the tensor token_embd.weight|lacks the tensor token_embd.weight"):
        load(str(rewritten(model, tmp_path / "c.gguf", "llama", "token_embd.weight")))
    with pytest.raises(ModelError, match="one part of a split"):
        load(str(rewritten(model, tmp_path / "d.gguf", "llama", hook=lambda w: w.add_uint16("split.count", 3))))

    def experts(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 8, 8), np.float32))

    with pytest.raises(ModelError, match="mixture of experts"):
        load(str(rewritten(model, tmp_path / "e.gguf", "llama", hook=experts)))


def test_wrong_shape_and_missing_key(tmp_path: Path) -> None:
    model = random_model(CASES["llama"])

    def lie(writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(96)

    with pytest.raises(ModelError, match=r"gate_proj.weight' has the shape \[80, 48\], where the config asks for \[96, 48\]"):
        load(str(export(model, tmp_path / "a.gguf", extra=lie)))
    writer = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "llama")
    writer.add_tensor("token_embd.weight", np.zeros((101, 48), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"lack llama\.\w+"):
        load(str(tmp_path / "b.gguf"))


def test_unsupported_type(wide: PreTrainedModel, tmp_path: Path) -> None:
    source = GGUFSource(export(wide, tmp_path / "m.gguf", {"ffn_down.weight": Kind.Q8_0}))
    info = source._file.tensors["blk.0.ffn_down.weight"]
    source._file.tensors["blk.0.ffn_down.weight"] = replace(info, kind=Kind.Q8_K)
    with pytest.raises(ModelError, match=r"ffn_down.weight has the type Q8_K, which is not supported; known are F32"):
        source.read("model.layers.0.mlp.down_proj.weight", None)
