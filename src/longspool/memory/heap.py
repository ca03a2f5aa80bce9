"""The process's heap, kept as small as what lives on it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

LARGE = 1 << 20  # bytes
_TRIM, _MMAP = -1, -3  # mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD


@functools.cache
def give_back_large_blocks() -> bool:
    """Have glibc take blocks of a megabyte and more from the system and give them back at once; returns whether it does.

    Left alone, it raises that bound to 32 MB with the first large block that is freed, and the activations of a long prompt, whose
    sizes vary from layer to layer, then leave a heap full of holes: 100 to 300 MB that nobody uses. A user's own setting stands.
    """
    given = any(os.environ.get(f"MALLOC_{name}_THRESHOLD_") for name in ("MMAP", "TRIM"))
    if not sys.platform.startswith("linux") or given or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP, LARGE)) and bool(mallopt(_TRIM, 2 * LARGE))
