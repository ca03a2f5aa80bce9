"""llama.cpp through the C API of llama-cpp-python, so that no Python sampling or copying is in its way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import CONTEXT

PACKAGES = ("llama-cpp-python",)
INSTALL = "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python"


@dataclass(frozen=True)
class Settings:
    """`cache` is the type of keys and values; a quantized one needs flash attention."""

    flash: bool = False
    cache: str = "F16"
    ubatch: int = 512


VARIANTS = {"plain": Settings(), "flash": Settings(flash=True), "flash-q8_0": Settings(flash=True, cache="Q8_0")}
EXACT = ("plain", "flash")


class LlamaCpp:
    def __init__(self, model: Path, settings: Settings, threads: int, context: int = CONTEXT, sequences: int = 1) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self.batch = min(2048, settings.ubatch * 4)
        self.weights = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        wishes = llama_cpp.llama_context_default_params()
        wishes.n_ctx, wishes.n_batch, wishes.n_ubatch = context, self.batch, settings.ubatch
        wishes.n_seq_max, wishes.kv_unified = sequences, True
        wishes.n_threads = wishes.n_threads_batch = threads
        wishes.flash_attn_type = int(settings.flash)
        wishes.type_k = wishes.type_v = getattr(llama_cpp, f"GGML_TYPE_{settings.cache}")
        self.context = llama_cpp.llama_init_from_model(self.weights, wishes)
        if not self.context:
            raise SystemExit(f"llama.cpp refuses a context with {settings}.")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.weights))

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def eval(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; the last one's logits [V], a view that the next call overwrites."""
        for start in range(0, len(ids), self.batch):
            part = ids[start : start + self.batch]
            array = (self.api.llama_token * len(part))(*part)
            if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(part))):
                raise SystemExit(f"llama.cpp can't take {len(ids)} tokens more.")
        at = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (self.vocab,))

    def stream(self, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        self.clear()
        logits = self.eval(ids)
        for left in range(tokens, 0, -1):
            token = int(logits.argmax())
            seen(token)
            if left > 1:
                logits = self.eval([token])

    def forced(self, ids: Sequence[int], forced: Sequence[int]) -> np.ndarray:
        self.clear()
        rows = [self.eval(ids).copy()]
        rows += [self.eval([token]).copy() for token in forced[:-1]]
        return np.stack(rows)


def open(model: Path, settings: Settings, threads: int) -> LlamaCpp:
    return LlamaCpp(model, settings, threads)
