"""Longspool winds very long contexts onto small memory: every long-context method on one engine.

>>> from longspool import LLM
>>> llm = LLM("smollm2", recipe="snapkv(budget=1024) + int4")
>>> print(llm.generate("The capital of France is", max_tokens=8)[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import LongspoolError, MemoryFileError, ModelError, OutOfMemory, PlanError, PromptTooLong

if TYPE_CHECKING:
    from .engine.sampler import Sampling
    from .llm import LLM, Piece
    from .recipe import parse
    from .report import Report, Result

__version__ = "0.1.0"

_LAZY = {
    "LLM": "llm",
    "Piece": "llm",
    "Sampling": "engine.sampler",
    "Result": "report",
    "Report": "report",
    "parse": "recipe",
    "methods": "catalogue",
}
__all__ = [
    "LLM",
    "LongspoolError",
    "MemoryFileError",
    "ModelError",
    "OutOfMemory",
    "Piece",
    "PlanError",
    "PromptTooLong",
    "Report",
    "Result",
    "Sampling",
    "methods",
    "parse",
]


def __getattr__(name: str) -> object:
    """Public names are imported when they are first used, so that `import longspool` costs next to nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'longspool' has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
