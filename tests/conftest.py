"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# The peers of model/ serve the tests of the engine too.
sys.path.append(str(Path(__file__).parent / "model"))


if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which any test may do.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are slower on several threads; a test of the real one may raise it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in model's file. Tests that use it carry the marker `real`."""
    from longspool.model.pull import place

    path = place("smollm2")
    if not path.is_file():
        pytest.fail(
            f"The built-in model is not at {path}: run `longspool pull smollm2` first (`make test` does), or deselect with -m 'not real'."
        )
    return path


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on disk that takes chats."""
    from tinydir import make

    return make(tmp_path_factory.mktemp("models") / "tiny")
