"""What is freed goes back to the system, so that the process is as small as what it holds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, psutil
from longspool.memory import give_back_large_blocks
if sys.argv[1] == "yes":
    assert give_back_large_blocks()
torch.empty(30 << 20, dtype=torch.uint8).fill_(1)  # freed at once: glibc now keeps anything smaller on its heap
before, kept = psutil.Process().memory_info().rss, []
for i in range(40):
    large = [torch.ones((3 << 20) + (i * j << 12), dtype=torch.uint8) for j in range(5)]
    kept.append(torch.ones(1 << 16, dtype=torch.uint8))
    del large
print(psutil.Process().memory_info().rss - before)
"""


UNSET = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}


def left(*arguments: str) -> int:
    """Bytes that the program holds after it freed nearly everything."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, env=UNSET)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_blocks_go_back_at_once() -> None:
    assert left("yes") < 6 << 20, "3 MB are kept on purpose"
    assert left("no") > 8 << 20, "the system gives everything back by itself, so that this test shows nothing"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_users_own_setting_stands() -> None:
    check = "from longspool.memory import give_back_large_blocks; print(int(give_back_large_blocks()))"
    settings = ({}, "1"), ({"MALLOC_MMAP_THRESHOLD_": "4000000"}, "0"), ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4000000"}, "0")
    for own, want in settings:
        env = UNSET | own
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == want
