"""What a page stores."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Field:
    """One stored tensor of a page: its shape per page and its dtype.

    A resident one stays on the device wherever a Place puts the others. `tokens` is the dimension of the shape along which the page's
    tokens lie, so that pieces of a page can be read; None where all tokens share it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    resident: bool = False
    tokens: int | None = None
