"""Transformers in fp32 on the dequantized GGUF: the reference that the others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

PACKAGES = ("transformers", "torch")
INSTALL = "pip install 'transformers>=5.0' gguf accelerate"


@dataclass(frozen=True)
class Settings:
    attention: str = "sdpa"


VARIANTS = {"fp32": Settings()}
EXACT = ("fp32",)


class Transformers:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def _step(self, ids: Sequence[int], cache: object, keep: int = 1) -> tuple[torch.Tensor, object]:
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return out.logits[0], out.past_key_values

    def stream(self, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        logits, cache = self._step(ids, None)
        for left in range(tokens, 0, -1):
            token = int(logits[-1].argmax())
            seen(token)
            if left > 1:
                logits, cache = self._step([token], cache)

    def forced(self, ids: Sequence[int], forced: Sequence[int]) -> np.ndarray:
        logits, _ = self._step([*ids, *forced[:-1]], None, keep=len(forced))
        return logits.float().numpy()


def open(model: Path, settings: Settings, threads: int) -> Transformers:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32, attn_implementation=settings.attention
    )
    return Transformers(loaded.eval())
