"""Every op folder as a callable of its name; its implementations are imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .op import Op, implementation

if TYPE_CHECKING:
    append_rows: Op
    attend_blocks: Op
    attend_books: Op
    attend_codes: Op
    attend_groups: Op
    attend_rows: Op
    chain: Op
    gather_rows: Op
    head_sample: Op
    key_scores: Op
    matmul: Op
    merge: Op
    nearest_codes: Op
    page_bounds: Op
    page_scores: Op
    pick_pages: Op
    pick_tokens: Op
    rms_norm: Op
    rope: Op
    row_mass: Op
    take_tokens: Op
    topk_rows: Op
    unpack: Op


names = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/ref.py")))

for _name in names:
    # The folder is imported before the op takes its name, since a later first import would put the folder in its place.
    import_module(f".{_name}", __name__)
    globals()[_name] = Op(_name)


def picked() -> dict[str, str]:
    """Which implementations have run so far in this process, and why not a better one: op -> "cpu" or "ref (reason)"."""
    ran = {name: globals()[name].picked for name in names}
    return {name: ", ".join(f"{kind} ({why})" if why else kind for kind, why in found.items()) for name, found in ran.items() if found}


__all__ = ["Op", "implementation", "names", "picked"]
