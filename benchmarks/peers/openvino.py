"""OpenVINO GenAI, which reads the GGUF itself. It gives tokens, not logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import openvino_genai

PACKAGES = ("openvino-genai", "openvino")
INSTALL = "pip install openvino-genai"


@dataclass(frozen=True)
class Settings:
    """`chunk` is max_num_batched_tokens; 0 leaves it at the package's default."""

    xattention: bool = False
    eviction: int = 0
    chunk: int = 0
    backend: str = "PA"


VARIANTS = {
    "default": Settings(),
    "sdpa": Settings(backend="SDPA"),
    "xattention": Settings(xattention=True),
    "eviction": Settings(eviction=1024),
}
EXACT = ("default", "sdpa")


class OpenVINO:
    def __init__(self, model: Path, settings: Settings, threads: int) -> None:
        self.model, self.settings, self.threads = model, settings, threads
        self.pipe = self._pipe(reuse=False)

    def _pipe(self, reuse: bool) -> openvino_genai.LLMPipeline:
        """`reuse`: keep the blocks of earlier prompts, which a timed run must not."""
        import openvino_genai as genai

        if self.settings.backend == "SDPA":
            return genai.LLMPipeline(str(self.model), "CPU", INFERENCE_NUM_THREADS=self.threads, ATTENTION_BACKEND="SDPA")
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = reuse
        if self.settings.chunk:
            scheduler.max_num_batched_tokens = self.settings.chunk
        if self.settings.xattention:
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config = genai.SparseAttentionConfig(mode=genai.SparseAttentionMode.XATTENTION)
        if self.settings.eviction:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(32, 128, self.settings.eviction, genai.AggregationMode.NORM_SUM)
        return genai.LLMPipeline(str(self.model), "CPU", INFERENCE_NUM_THREADS=self.threads, scheduler_config=scheduler)

    def _generate(self, pipe: openvino_genai.LLMPipeline, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        import openvino
        import openvino_genai as genai

        class Streamer(genai.StreamerBase):
            def write(self, token: int | list[int]) -> genai.StreamingStatus:
                for one in token if isinstance(token, list) else [token]:
                    seen(one)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        wishes = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False)
        pipe.generate(openvino.Tensor(np.array([ids], dtype=np.int64)), wishes, Streamer())

    def stream(self, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        self._generate(self.pipe, ids, tokens, seen)

    def forced(self, ids: Sequence[int], forced: Sequence[int]) -> np.ndarray | None:
        """One token a call on ever longer prompts, whose common beginning a prefix cache makes cheap."""
        if self.settings != Settings():
            return None
        pipe, tops = self._pipe(reuse=True), list[int]()
        for n in range(len(forced)):
            self._generate(pipe, [*ids, *forced[:n]], 1, tops.append)
        return np.array(tops)


def open(model: Path, settings: Settings, threads: int) -> OpenVINO:
    return OpenVINO(model, settings, threads)
