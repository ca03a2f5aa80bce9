"""Every op folder as a callable of its name; its implementations are imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .op import Op, implementation

if TYPE_CHECKING:

    def __getattr__(name: str) -> Op: ...


names = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/ref.py")))

for _name in names:
    # The folder is imported before the op takes its name, since a later first import would put the folder in its place.
    import_module(f".{_name}", __name__)
    globals()[_name] = Op(_name)

__all__ = ["Op", "implementation", "names"]
