"""Compile Triton kernels, as launched for their ops' samples, for a GPU that need not be here: `compile_kernels.py cuda:90 matmul ...`

Prints op, kernel and bytes of shared memory for each launch. It ends with an error where a kernel does not compile, or takes more shared
memory than the smallest GPU that it is meant for has: 99 KB on NVIDIA's since 2020, 64 KB on AMD's.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024}


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main(backend: str, arch: str, ops: list[str]) -> None:
    target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
    torch.version.hip = "6.4" if backend == "hip" else None
    triton.runtime.driver.set_active(Driver(target))
    launch, op = JITFunction.run, ""

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kw: object) -> Any:
        done = launch(self, *args, grid=grid, warmup=True, **kw)
        print(op, self.__name__, done.metadata.shared, flush=True)
        assert done.metadata.shared <= SHARED[backend], f"{op}: {done.metadata.shared} bytes of shared memory"
        return done

    JITFunction.run = compile_only
    for op in ops:
        spec, module = importlib.import_module(f"longspool.kernels.{op}.spec"), importlib.import_module(f"longspool.kernels.{op}.gpu")
        for _, args, kw in spec.samples():
            module.run(*args, **kw)


if __name__ == "__main__":
    main(*sys.argv[1].split(":"), sys.argv[2:])
