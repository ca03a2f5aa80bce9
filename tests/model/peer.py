"""Small transformers models whose every parameter is random: the reference for each family."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@torch.no_grad()
def shaken(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with norms and biases moved off their 1 and 0, and matrices large enough that attention and logits vary."""
    torch.manual_seed(seed)
    table = 0.25 if model.get_output_embeddings().weight is model.get_input_embeddings().weight else 1.0  # a tied head gives logits near 1
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn_like(weight) * 0.2)
        else:
            weight.copy_(torch.randn_like(weight) * (table if "embed" in name else 1.5 * weight.shape[1] ** -0.5))
    return model.eval()


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model of that config."""
    return shaken(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


@torch.no_grad()
def peer_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [N, V] of one sequence."""
    return model(input_ids=ids[None], use_cache=False).logits[0].float()
