"""Real English that every Python carries: the documentation strings of its library, for methods that are fitted to text.

The reference pages, with which recipes are measured, are no part of them.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import LongspoolError

_LEAST = 200  # characters of a string that says something
_SKIP = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "__pycache__"}


def prose(characters: int, seed: int) -> str:
    """So much of it, drawn by the seed. Raises LongspoolError where there is less."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not _SKIP & set(p.relative_to(root).parts))
    random.Random(seed).shuffle(files)
    found: list[str] = []
    size = 0
    for path in files:
        for text in _told(path):
            found.append(text)
            size += len(text) + 2
        if size >= characters:
            return "\n\n".join(found)
    raise LongspoolError(f"Python's own documentation has {size:,} characters here and {characters:,} are wanted; give texts with --file.")


def _told(path: Path) -> Iterator[str]:
    """The longer documentation strings of a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and len(text := ast.get_docstring(node) or "") >= _LEAST:
            yield text
