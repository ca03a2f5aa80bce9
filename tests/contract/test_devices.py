"""Nothing mixes tensors of two devices: tested on a made-up one, where torch refuses what it would refuse on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspool.method import registry

FAR = Path(__file__).parents[1] / "far.py"

made_up = pytest.importorskip("torch.utils.backend_registration")
pytestmark = pytest.mark.skipif("_setup_privateuseone_for_python_backend" not in vars(made_up), reason="this torch can't make up a device")


def far(*args: str) -> None:
    """In a process of its own, since a made-up device can't be taken away again."""
    done = subprocess.run([sys.executable, str(FAR), *args], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_engine_and_memory() -> None:
    far("engine", "qwen3:int4 + quest + flashsampling", "gemma3:adakv(snapkv) + trianglemix + headinfer + int8")


def test_tiers() -> None:
    far("engine", "llama:leoam + int8", "llama:shadowkv", "llama:hgca + int8")


@pytest.mark.slow
def test_every_reference() -> None:
    far("ops")


@pytest.mark.slow
def test_every_method() -> None:
    far("engine", "gemma2:", "mistral:", *(f"llama:{cls.example or name}" for name, cls in registry().items()))
