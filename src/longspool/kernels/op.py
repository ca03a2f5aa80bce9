"""An op is a folder: spec.py (contract), ref.py (torch), cpu.py (numba), gpu.py (triton). This file picks one and says why.

Each implementation module has `run(*args, **kw)`; cpu.py and gpu.py also have `can(*args, **kw) -> str | None`: None if it can
serve this call, else one clause that says why not. The choice is remembered per op for the run's report.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

from torch import Tensor

_PACKAGE = {"cpu": "numba", "gpu": "triton"}


@functools.cache
def forced() -> str:
    """The implementation that LONGSPOOL_KERNELS asks for ("ref", "cpu" or "gpu"), or ""."""
    want = os.environ.get("LONGSPOOL_KERNELS", "")
    if want not in ("", "ref", "cpu", "gpu"):
        raise ValueError(f"LONGSPOOL_KERNELS={want!r} is none of ref, cpu, gpu")
    return want


@functools.cache
def _module(op: str, kind: str) -> ModuleType | str:
    """The implementation, or the reason why there is none."""
    name = f"longspool.kernels.{op}.{kind}"
    if importlib.util.find_spec(name) is None:
        return f"no {kind} kernel is written for {op}"
    if kind in _PACKAGE and importlib.util.find_spec(_PACKAGE[kind]) is None:
        return f"{_PACKAGE[kind]} is not installed"
    return importlib.import_module(name)


class Op:
    """A kernel by name. Calling it runs the best implementation that can serve the arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.picked: dict[str, str] = {}

    def __call__(self, first: Tensor | list[Tensor], *args: object, **kw: object) -> Any:
        lead = first[0] if isinstance(first, list) else first
        kind = forced() or ("gpu" if lead.is_cuda else "cpu")
        if kind != "ref":
            module = _module(self.name, kind)
            why = module if isinstance(module, str) else module.can(first, *args, **kw)
            if not isinstance(module, str) and why is None:
                self.picked.setdefault(kind, "")
                return module.run(first, *args, **kw)
            self.picked.setdefault("ref", f"{kind}: {why}")
        else:
            self.picked.setdefault("ref", "asked for by LONGSPOOL_KERNELS")
        return implementation(self.name, "ref").run(first, *args, **kw)


def implementation(op: str, kind: str) -> ModuleType:
    """One named implementation of an op. Raises LookupError with the reason where there is none."""
    module = _module(op, kind)
    if isinstance(module, str):
        raise LookupError(module)
    return module
