"""Configs of transformers 4 and 5, defaults that published configs leave out, and errors that say what is wrong."""

from __future__ import annotations

import pytest
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from longspool.errors import ModelError
from longspool.model.config import Config
from longspool.model.rope import LinearRope, Rope, YarnRope
from longspool.model.tiny import tiny

SMALL: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# As transformers 4 wrote them: rope_theta at the top, rope_scaling beside it, layer rules instead of layer lists.
OLD: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama, linear": {"num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": True},
    "llama, dynamic": {"num_key_value_heads": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 32},
    "mistral": {"rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 2},
    "mistral, window": {"rope_theta": 1e4, "sliding_window": 512, "num_key_value_heads": 2, "head_dim": 24},
    "qwen2": {
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "sliding_window": 512,
        "max_window_layers": 3,
        "use_sliding_window": True,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    },
    "qwen2, windows off": {"num_key_value_heads": 2, "sliding_window": 512, "max_window_layers": 3, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 2, "rope_theta": 1e6, "attention_bias": True, "tie_word_embeddings": True},
    "smollm3": {"num_key_value_heads": 2, "rope_theta": 5e6, "no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64},
    "gemma2": {"num_key_value_heads": 2, "rope_theta": 2e4, "sliding_window": 128, "query_pre_attn_scalar": 144},
    "gemma3_text": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 128,
        "sliding_window_pattern": 4,
    },
    "phi3": {
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", **LISTS},
        "sliding_window": 256,
    },
    "phi3, partial": {"partial_rotary_factor": 0.75, "rope_theta": 2e4, "sliding_window": None},
}


@pytest.mark.parametrize("name", OLD)
def test_old_form_equals_new(name: str) -> None:
    """transformers itself turns the old form into the new; both must be read alike."""
    family = name.split(",")[0]
    old = {**SMALL, **OLD[name], "model_type": family}
    new = CLASSES[family](**{k: v for k, v in old.items() if k != "model_type"})
    assert "rope_theta" not in new.to_dict()
    assert Config.from_hf(old) == Config.from_hf(new.to_dict())


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_equal_transformers(family: str) -> None:
    """A config without optional keys means what it means to transformers, and so does one as it is written to disk."""
    kv = {"num_key_value_heads": 2} if family.startswith("qwen") else {}  # published Qwen configs always give it
    given = {**SMALL, **kv, "hidden_size": 128, "num_attention_heads": 16}
    new = CLASSES[family](**given)
    want = Config.from_hf(new.to_dict())
    assert Config.from_hf({**given, "model_type": family}) == want
    assert Config.from_hf(new.to_diff_dict()) == want


def test_multimodal_gemma3_as_published() -> None:
    """A text_config that leaves out whatever equals the defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    ours = Config.from_hf({"model_type": "gemma3", "text_config": dict(text), "vision_config": {"hidden_size": 1152}})
    assert ours == Config.from_hf(Gemma3Config(text_config=text).to_dict())
    assert ours.shape.windows[:7] == (1024,) * 5 + (None, 1024)
    assert ours.ropes[5] == LinearRope(256, 1e6, 8.0) and ours.ropes[0] == Rope(256, 1e4)
    assert ours.ropes[0] is ours.ropes[1]


def test_shape_of_smollm2() -> None:
    values = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    values |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100_000}
    shape = Config.from_hf(values).shape
    assert (shape.head_dim, shape.group, shape.scale, shape.context) == (64, 3, 0.125, 8192)
    assert shape.windows == (None,) * 30


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_early_names_of_longrope(name: str) -> None:
    values = {**SMALL, **OLD["phi3"], "model_type": "phi3"}
    assert Config.from_hf({**values, "rope_scaling": {"type": name, **LISTS}}) == Config.from_hf(values)


def test_yarn_widens_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = Config.from_hf({**SMALL, "model_type": "qwen2", "rope_scaling": scaling})
    assert isinstance(config.ropes[0], YarnRope)
    assert config.shape.context == 16384


# What is changed in a good llama config (None removes the key), and what the error must say.
WRONG: list[tuple[dict[str, object], str]] = [
    ({"model_type": "mamba"}, "'mamba' is not supported; known are gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3, smollm3"),
    ({"model_type": "raw"}, "'raw' is not supported"),
    ({"model_type": "llama.x"}, "'llama.x' is not supported"),
    ({"model_type": "../llama"}, "'../llama' is not supported"),
    ({"model_type": None}, "no 'model_type'"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"max_position_embeddings": None}, "no 'max_position_embeddings'"),
    ({"hidden_size": "64"}, "'hidden_size' as '64', where a whole number is needed"),
    ({"num_hidden_layers": True}, "'num_hidden_layers' as True, where a whole number is needed"),
    ({"tie_word_embeddings": 1}, "'tie_word_embeddings' as 1, where true or false is needed"),
    ({"num_key_value_heads": 3}, "4 heads of 16 over 3 key-value heads"),
    ({"num_key_value_heads": 0}, "over 0 key-value heads"),
    ({"num_attention_heads": 0}, "0 heads"),
    ({"head_dim": 15}, "rotates 15 dimensions"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope' is not supported; known are default, linear, dynamic, llama3, yarn, longrope"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no 'factor'"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}},
        "needs 8 values in 'long_factor' but has 1",
    ),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + ["x"], "long_factor": [1.0] * 8}}, "'short_factor' as 'x'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention"] * 8}, "'linear_attention' is not supported"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "needs 8 values in 'layer_types'"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_errors(change: dict[str, object], says: str) -> None:
    values = {**SMALL, "model_type": "llama", **change}
    with pytest.raises(ModelError) as caught:
        Config.from_hf({k: v for k, v in values.items() if v is not None})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_activation() -> None:
    with pytest.raises(ModelError, match="'swishy' is not supported; known are silu"):
        tiny(hidden_act="swishy")
