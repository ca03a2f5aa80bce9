"""Small models with random weights: for tests, and to try a method in a second."""

from __future__ import annotations

from .build import Model, assemble
from .config import Config
from .weights import Noise


def tiny(family: str = "llama", seed: int = 0, **over: object) -> Model:
    """A random model of that family. `over` replaces keys of its Hugging Face config, such as num_hidden_layers=2."""
    values = {
        "model_type": family,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config = Config.from_hf({**values, **over})
    return assemble(config, Noise(seed, 1.0 - config.norm_shift))
