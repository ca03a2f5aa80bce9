"""What the contract tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def _spoil(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else 77)


def _spoiled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fresh(*args: object, **kw: object) -> Tensor:
        return _spoil(make(*args, **kw))

    return fresh


@pytest.fixture
def spoiled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch leaves unset holds NaN (77 in integers), so that unwritten output shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _spoiled(getattr(owner, name)))
