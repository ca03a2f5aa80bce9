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

from .record import Tape, now

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
        self._cpu: tuple[Any, Any] | None = None  # can and run, once the CPU's kernel has run: a step of one token makes 200 calls

    def __call__(self, first: Tensor | list[Tensor], *args: object, **kw: object) -> Any:
        if now.tape is not None:
            return self._watched(now.tape, first, *args, **kw)
        return self._run(first, *args, **kw)

    def _watched(self, tape: Tape, *args: object, **kw: object) -> Any:
        """Run and see to it that the tape tells of it, and keeps what it was run with."""
        before = len(tape.calls)
        result = self._run(*args, **kw)  # type: ignore[arg-type]
        tape.held.append((args, kw, result))
        if len(tape.calls) == before:
            tape.spoil(f"the kernel of {self.name} is not written down")
        return result

    def _run(self, first: Tensor | list[Tensor], *args: object, **kw: object) -> Any:
        lead = first[0] if type(first) is list else first
        if self._cpu is not None and lead.is_cpu and self._cpu[0](first, *args, **kw) is None:  # type: ignore[union-attr]
            return self._cpu[1](first, *args, **kw)
        kind = forced() or ("cpu" if lead.is_cpu else "gpu")  # type: ignore[union-attr]
        if kind == "cpu" and not lead.is_cpu:  # type: ignore[union-attr]
            return self._plain(f"cpu: the tensors are on {lead.device}", first, *args, **kw)  # type: ignore[union-attr]
        module = _module(self.name, kind)
        if isinstance(module, str):
            return self._plain(f"{kind}: {module}", first, *args, **kw)
        if kind != "ref" and (why := module.can(first, *args, **kw)) is not None:
            return self._plain(f"{kind}: {why}", first, *args, **kw)
        if kind not in self.picked:
            self.picked[kind] = "asked for by LONGSPOOL_KERNELS" if kind == "ref" else ""
        if kind == "cpu" and not forced():
            self._cpu = module.can, module.run
        return module.run(first, *args, **kw)

    def _plain(self, why: str, *args: object, **kw: object) -> Any:
        """The reference, and the first reason why it had to be."""
        self.picked.setdefault("ref", why)
        return implementation(self.name, "ref").run(*args, **kw)


def implementation(op: str, kind: str) -> ModuleType:
    """One named implementation of an op. Raises LookupError with the reason where there is none."""
    module = _module(op, kind)
    if isinstance(module, str):
        raise LookupError(module)
    return module
