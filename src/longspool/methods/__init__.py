"""The methods: a room per seat, a file per paper. `longspool.methods()` lists them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..catalogue import Entry


class _Folder(ModuleType):
    """A submodule hides what its package calls by the same name, so this folder is callable as the public function is."""

    def __call__(self) -> list[Entry]:
        from ..catalogue import methods

        return methods()


sys.modules[__name__].__class__ = _Folder
