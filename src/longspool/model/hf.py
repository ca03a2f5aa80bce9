"""A model that transformers has loaded, as one of ours."""

from __future__ import annotations

from transformers import PreTrainedModel

from .build import Model, build
from .config import Config


def from_transformers(model: PreTrainedModel) -> Model:
    """The same model over the same weights; fp32 ones that need no stacking are shared, not copied."""
    return build(Config.from_hf(model.config.to_dict()), model.state_dict())
