"""Loading: Hugging Face directories, packing, reports and fingerprints, names, and every mistake as one sentence."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_maker import export, permuted
from peer import SMALL, peer_logits, random_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Core
from tokenizers import models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from longspool.errors import ModelError
from longspool.model.load import Loaded, load
from longspool.model.sources import DirectorySource, GGUFSource
from longspool.values.packed import Kind, Packed
from reference import dense_logits

EVEN = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**EVEN),
    "tied": LlamaConfig(**EVEN, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**EVEN),
    "gemma3": Gemma3TextConfig(**EVEN, head_dim=16, query_pre_attn_scalar=16, sliding_window=24),
    "phi3": Phi3Config(**EVEN),
}


def made(case: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose config is its own, since changing a model's dtype writes into it."""
    return random_model(copy.deepcopy(CONFIGS[case]), seed)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(1, 101, (50,), generator=torch.Generator().manual_seed(7))


def save(model: PreTrainedModel, path: Path, **how: str) -> Path:
    """The model as a directory with a tokenizer."""
    model.save_pretrained(str(path), **how)
    core = Core(models.BPE(vocab={chr(33 + i): i for i in range(94)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="!").save_pretrained(str(path))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(made("llama"), tmp_path / "llama")


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("case", CONFIGS)
def test_directory_equals_transformers(case: str, shards: bool, ids: Tensor, tmp_path: Path) -> None:
    peer = made(case)
    path = save(peer, tmp_path / "m", **({"max_shard_size": "60KB"} if shards else {}))
    assert (len(list(path.glob("*.safetensors"))) > 2) == shards
    loaded = load(str(path))
    want = peer_logits(peer, ids)
    assert want.std() > 0.3 and (dense_logits(loaded.model, ids) - want).abs().max() < 1e-4
    assert loaded.report.parameters == sum(p.numel() for p in peer.parameters())
    assert loaded.report.bytes_packed == 4 * loaded.report.parameters and set(loaded.report.kinds) == {"f32"}
    assert loaded.tokenizer.encode('#!"') == [2, 0, 1] and loaded.tokenizer.eos[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_floats_stay_two_bytes(dtype: torch.dtype, ids: Tensor, tmp_path: Path) -> None:
    path = save(made("llama").to(dtype), tmp_path / "m")
    loaded = load(str(path))
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    assert loaded.report.kinds == {kind: 2 + 3 * 7, "f32": 7}  # embedding and head; seven matrices a layer; norms
    peer = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager")
    assert (dense_logits(loaded.model, ids) - peer_logits(peer, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "edge", "least", "most"),  # bounds of the relative error of a matrix
    [
        ("int8", "int8", 1e-3, 0.01),
        ("int4", "int8", 0.02, 0.1),
        ("f16", "f16", 1e-5, 1e-3),
        ("bf16", "bf16", 1e-4, 4e-3),
        ("f32", "f32", 0, 0),
    ],
)
def test_packing_at_load(kind: Kind, edge: Kind, least: float, most: float, ids: Tensor, tmp_path: Path) -> None:
    peer = made("llama")
    path = save(peer, tmp_path / "m")
    loaded = load(str(path), weights=kind)
    assert Counter(loaded.report.kinds) == Counter({kind: 21}) + Counter({edge: 2}) + Counter({"f32": 7})
    source, weights = DirectorySource(path), peer.state_dict()
    for name in source.sizes:
        form = edge if "embed" in name or "lm_head" in name else kind
        found = source.read(name, form)
        values = found if isinstance(found, Tensor) else found.unpack()
        if weights[name].dim() == 2:
            error = (values - weights[name]).norm() / weights[name].norm()
            assert (least if form == kind else 1e-3) <= error <= most, name
        weights[name].copy_(values)
    assert (dense_logits(loaded.model, ids) - peer_logits(peer, ids)).abs().max() < 1e-4
    plain = load(str(path)).report
    assert loaded.report.bytes_packed <= plain.bytes_packed == 4 * plain.parameters


def test_packing_a_gguf_goes_through_floats(ids: Tensor, tmp_path: Path) -> None:
    path = export(made("llama"), tmp_path / "m.gguf", {"attn_q.weight": Quant.Q4_1, "ffn_up.weight": Quant.Q8_0})
    exact = load(str(path), weights="f32")
    assert exact.report.kinds == {"f32": 30}
    assert exact.report.notes == ("3 matrices Q4_1 unpacked", "3 matrices Q8_0 unpacked")
    assert (dense_logits(load(str(path)).model, ids) - dense_logits(exact.model, ids)).abs().max() < 1e-4
    packed = load(str(path), weights="int8").report
    assert packed.kinds == {"int8": 23, "f32": 7} and packed.notes[0] == "3 matrices Q4_1 unpacked and packed as int8"


def test_width_that_no_group_divides_stays_as_it_is(ids: Tensor, tmp_path: Path) -> None:
    peer = random_model(LlamaConfig(**{**EVEN, "intermediate_size": 80}))
    loaded = load(str(save(peer, tmp_path / "m")), weights="int8")
    assert loaded.report.kinds == {"int8": 20, "f32": 10}
    assert loaded.report.notes == ("3 matrices kept as floats, since the width is no multiple of 32",)


def test_report_and_progress(directory: Path) -> None:
    heard: list[tuple[float, str]] = []
    report = load(str(directory), progress=lambda fraction, text: heard.append((fraction, text))).report
    assert (report.path, report.architecture, report.notes) == (directory, "llama", ()) and 0 < report.seconds < 60
    fractions = [fraction for fraction, _ in heard]
    assert fractions == sorted(fractions) and fractions[0] == 0 and 0.9 < fractions[-1] < 1 and len(heard) == 30
    assert any("layers.2.mlp.down_proj.weight" in text for _, text in heard)


def test_fingerprint_tells_models_and_forms_apart(directory: Path, tmp_path: Path) -> None:
    mark = load(str(directory)).fingerprint
    assert re.fullmatch("[0-9a-f]{32}", mark)
    moved = shutil.copytree(directory, tmp_path / "elsewhere")
    assert load(str(moved)).fingerprint == mark
    assert load(str(directory), weights="int8").fingerprint != mark
    save(made("llama", seed=1), moved)
    assert load(str(moved)).fingerprint != mark
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert load(str(directory)).fingerprint != mark


def refuse(name: str | Path, text: str, **options: str) -> None:
    """Loading fails with one sentence of that text."""
    with pytest.raises(ModelError, match=text) as error:
        load(str(name), **options)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    refuse("nonsense", r"no model 'nonsense': it is neither built in \(smollm2\) nor a file or directory")
    refuse(tmp_path / "none.gguf", r"no model '.*none\.gguf'")
    refuse("models/none.gguf", r"no model 'models/none\.gguf'")


def test_files_that_are_no_models(directory: Path, tmp_path: Path) -> None:
    refuse(directory / "model.safetensors", "holds weights alone; name its directory")
    refuse(directory / "config.json", "is not a GGUF file: it begins with b'")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    refuse(tmp_path / "a.gguf", "is not a GGUF file")
    refuse(tmp_path, r"is a directory with GGUF files; name one of them, for example .*a\.gguf")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", r"has no config\.json")


def test_weights_and_device_that_are_not_known(directory: Path) -> None:
    refuse(directory, r"weights='int3' is not known; it is one of int8, int4, f16, bf16, f32", weights="int3")
    refuse(directory, r"The device 'abacus' can't be used", device="abacus")
    if not torch.cuda.is_available():
        refuse(directory, r"The device 'cuda' can't be used", device="cuda")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a safetensors file's tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_damaged_directories(directory: Path) -> None:
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (b"", whole[:4], whole[:200], whole[:-100], b"\xff" * 100, whole[:8] + b"x" + whole[9:]):
        weights.write_bytes(broken)
        refuse(directory, r"model\.safetensors is damaged or no safetensors file")
    weights.write_bytes(whole)
    rewrite(weights, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    refuse(directory, r"model\.layers\.1\.mlp\.up_proj\.weight")
    weights.write_bytes(whole)
    rewrite(weights, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    refuse(directory, r"model\.norm\.weight' has the shape \[65\], where the config asks for \[64\]")
    rewrite(
        weights,
        lambda tensors: tensors.update(
            {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.ones(101, 64).to(torch.float8_e4m3fn)}
        ),
    )
    refuse(directory, r"lm_head\.weight of .* is stored as F8_E4M3, which is not supported; known are F64, F32, F16, BF16")


def test_configs_that_cannot_be_used(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for text, pattern in (
        ("{", r"config\.json is no readable JSON"),
        ("[1]", r"config\.json holds list where a JSON object is expected"),
        (json.dumps(config | {"model_type": "mamba"}), r"'mamba' is not supported; known are .*llama"),
        (json.dumps({k: v for k, v in config.items() if k != "hidden_size"}), r"'hidden_size'"),
        (json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}), r"quantiz"),
    ):
        path.write_text(text)
        refuse(directory, pattern)
    path.unlink()
    refuse(directory, r"has no config\.json")


def test_pickled_weights_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refuse(directory, r"holds no weights: a \*\.safetensors file is expected")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(directory, r"only pickled weights \(pytorch_model\.bin\), which are not opened because unpickling runs code")


def test_shards_that_are_missing(tmp_path: Path) -> None:
    path = save(made("llama"), tmp_path / "m", max_shard_size="60KB")
    index = path / "model.safetensors.index.json"
    shards = sorted(path.glob("*.safetensors"))
    shards[1].rename(tmp_path / "away.safetensors")
    refuse(path, rf"lacks the shard {shards[1].name} that model\.safetensors\.index\.json names")
    shutil.copy(shards[0], shards[1])
    refuse(path, rf"{shards[1].name} lacks the tensor \S+ that model\.safetensors\.index\.json places there")
    index.write_text(json.dumps({"weight_map": {"a": "../away.safetensors"}}))
    refuse(path, r"names the shard '\.\./away\.safetensors', which is not in that directory")
    index.write_text(json.dumps({"weights": {}}))
    refuse(path, r"has no weight_map")


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse("somebody/some-model", r"can't be reached from here; a built-in model \(smollm2\), a GGUF file or a model directory works")
    refuse("somebody/a..b", r"could not be had from the Hugging Face hub")


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Loaded:
    return load("smollm2")


@pytest.mark.real
def test_smollm2(real: Loaded, smollm2: Path) -> None:
    report = real.report
    assert (report.path, report.architecture, report.parameters) == (smollm2, "llama", 134515008)
    assert report.kinds == {"q4_1": 210, "q8_0": 1, "f32": 61} and report.notes == ()
    assert report.bytes_packed < 1.001 * smollm2.stat().st_size
    shape = real.model.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab, shape.context) == (30, 9, 3, 64, 49152, 8192)
    assert real.tokenizer.vocab_size == shape.vocab


@pytest.mark.real
def test_smollm2_matrices_equal_the_gguf_package(smollm2: Path) -> None:
    source = GGUFSource(smollm2)
    data = np.memmap(smollm2, mode="r")
    for name, theirs, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.13.mlp.down_proj.weight", "blk.13.ffn_down.weight", 0),
    ):
        info = source._file.tensors[theirs]
        packed = source.read(name, None)
        assert isinstance(packed, Packed)
        rows = torch.arange(0, packed.rows, max(packed.rows // 200, 1)) if not heads else torch.arange(packed.rows)
        raw = data[info.start : info.start + info.nbytes].reshape(packed.rows, -1)
        found = packed.take(rows).numpy()
        want = gguf.quants.dequantize(raw[rows.numpy()], info.kind)
        assert np.array_equal(permuted(found, heads) if heads else found, want)


PEAK = """
import re, sys
def kib(key): return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
import longspool.model.load as module
before = kib("VmRSS")
report = module.load("smollm2").report
print(1024 * (kib("VmHWM") - before), report.bytes_packed, "transformers" in sys.modules)
"""


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_near_the_packed_size(smollm2: Path) -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout.split()
    # The file's pages, if they stayed, would add the file's size once more. What is allowed beside the weights: the vocabulary as
    # Python strings and as a tokenizer, and the largest matrix (29 MB) while it is packed.
    assert int(out[0]) < int(out[1]) + 75e6
    assert out[2] == "False"


@pytest.mark.slow
@pytest.mark.real
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    peer = AutoModelForCausalLM.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32)
    weights = peer.state_dict()
    source = GGUFSource(smollm2)
    assert set(weights) - set(source.sizes) == {"lm_head.weight"}  # tied
    for name in source.sizes:
        found = source.read(name, None)
        assert torch.equal(found if isinstance(found, Tensor) else found.unpack(), weights[name])
    ids = torch.tensor(load("smollm2").tokenizer.encode("The quick brown fox jumps over the lazy dog. It is"))
    logits = dense_logits(load("smollm2").model, ids)
    assert (logits - peer_logits(peer, ids)).abs().max() < 1e-3 * logits.abs().max()
