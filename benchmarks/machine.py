"""The machine that a result belongs to: what it is, and what it can do at best."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Ceiling:
    """The best this machine does with some threads: read bandwidth in GB/s, fp32 matrix products in GFLOP/s."""

    read_gbs: float
    sgemm_gflops: float
    threads: int


def describe() -> dict[str, str | int | float]:
    """The processor, its useful instructions, the memory and the Python."""
    info = _proc("/proc/cpuinfo", ":")
    flags = info.get("flags", "").split()
    wanted = [f for f in ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8") if f in flags]
    memory = _proc("/proc/meminfo", ":").get("MemTotal", "0 kB").split()[0]
    return {
        "processor": info.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count() or 1,
        "instructions": " ".join(wanted),
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """What this interpreter has of these distributions."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a distribution"
    return found


def commit() -> str:
    """The checkout's commit, with a + where tracked files differ from it."""
    ask = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Others:
    """How many cores other processes keep busy meanwhile: what a number is worth depends on it."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """Their mean since this object was made; children count as ours once they have been waited for."""
        (wall, busy, own), (wall0, busy0, own0) = self._now(), self._start
        return round(max(busy - busy0 - (own - own0), 0.0) / max(wall - wall0, 1e-9), 2)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        spent = os.times()
        ticks = [int(t) for t in _proc("/proc/stat", " ").get("cpu", "0 0 0 0 0 0 0 0").split()]
        busy = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and waiting for a disk
        return time.monotonic(), busy / 100, spent.user + spent.system + spent.children_user + spent.children_system


def ceiling(threads: int) -> Ceiling:
    """Measured, best of several: a sum over 256 MB and a square fp32 product."""
    import torch

    torch.set_num_threads(threads)
    big = torch.ones(64 * 2**20)
    a = torch.rand(1536, 1536)
    read = best(lambda: big.sum(), 12)
    product = best(lambda: a @ a, 12)
    return Ceiling(round(big.nbytes / read / 1e9, 1), round(2 * 1536**3 / product / 1e9, 1), threads)


def best(call: Callable[[], object], repeats: int, seconds: float = 2.0) -> float:
    """The least time of one call in seconds: what disturbs a run only ever adds to it."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        least = min(least, now - start)
        if now > end:
            break
    return least


def memory_mb(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process. 0 where there is no /proc."""
    return round(int(_proc("/proc/self/status", ":").get(field, "0 kB").split()[0]) / 1024, 1)


def peak_mb() -> float:
    """Peak resident memory of this process.

    getrusage's figure is taken over from the parent at exec, so it is only asked where /proc doesn't tell.
    """
    seen = memory_mb("VmHWM")
    if not seen and sys.platform != "win32":
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        seen = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)
    return seen


def forget_peak() -> None:
    """Let VmHWM begin anew at what is resident now, where the system allows it."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists() and os.access(reset, os.W_OK):
        reset.write_text("5")


def _proc(path: str, sign: str) -> dict[str, str]:
    """Lines of `key: value`, the first of each key."""
    pairs: dict[str, str] = {}
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(sign)
            pairs.setdefault(key.strip(), value.strip())
    return pairs
