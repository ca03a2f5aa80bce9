"""Numba's settings, in one place: its threads are torch's, so that the two never fight for the cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import torch
from numba import types

F = TypeVar("F", bound=Callable[..., object])


def _share_openmp() -> str:
    """Asks for OpenMP and returns why Numba can't have it, or "".

    Torch has loaded libgomp by now, so Numba's OpenMP layer runs on torch's own threads and a parallel launch costs about 2 us;
    Numba's other layers keep a second pool, which costs 50 times that next to torch's.
    """
    try:
        from numba.np.ufunc import omppool  # noqa: F401
    except ImportError as problem:
        return f"Numba's OpenMP layer can't be loaded ({problem}); its own threads are slower to start"
    numba.config.THREADING_LAYER = "omp"
    count = torch.get_num_threads()
    numba.get_num_threads()  # starts the threads, and with that sets OpenMP's number of them, which is torch's too
    torch.set_num_threads(count)
    return ""


slow_threads = _share_openmp()
most: int = numba.config.NUMBA_NUM_THREADS


def njit(function: F) -> F:
    """Compiled once and kept on disk."""
    return numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)


# Compiled within what calls it and nowhere else: without the wrappers and the file of its own that `njit` would make. Whoever calls one
# of another file captures that file's `panels.version`, since Numba's cache looks at the caller's own file alone.
helper = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def pnjit(function: F) -> F:
    """The same with `prange` over chunks of work."""
    return numba.njit(cache=True, nogil=True, parallel=True, fastmath=False, error_model="numpy")(function)


# `numba.set_num_threads` for use inside a kernel; Numba's own form of it keeps a kernel from being stored on disk.
use_threads = types.ExternalFunction("set_num_threads", types.void(types.int32))


def chunks() -> int:
    """Torch's threads, for a kernel that hands the number to `use_threads` itself: from outside that costs 1 us."""
    return min(torch.get_num_threads(), most)


def threads() -> int:
    """Chunks to cut work into: torch's threads, of which Numba takes as many."""
    count = chunks()
    if count != numba.get_num_threads():
        numba.set_num_threads(count)
    return count
