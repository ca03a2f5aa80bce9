"""One driver file a peer. A driver names its variants at once but imports its package only in `open`.

A driver module has `PACKAGES` (the distributions whose versions are noted), `INSTALL` (the line that installs it), `VARIANTS` (name ->
settings), `EXACT` (those that attend to every token in full) and `open(model, settings, threads) -> Peer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

PEERS = ("transformers", "llama_cpp", "openvino", "longspool")
CONTEXT = 8192


class Peer(Protocol):
    """A loaded model. Every call starts anew: nothing of an earlier prompt may be reused."""

    def stream(self, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        """Draw greedily, never stopping early, and call `seen` with each token as soon as it is known."""

    def forced(self, ids: Sequence[int], forced: Sequence[int]) -> np.ndarray | None:
        """Logits [len(forced), V] fp32 for each forced token given all before it, through the decode path if there is one.

        Or top-1 ids, int64 [len(forced)], where the API gives tokens only; or None where it gives neither.
        """


def driver(peer: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.peers.{peer}")


def variants(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """(peer, variant) pairs of a list such as ["transformers", "llama_cpp/flash"]."""
    pairs = []
    for item in wanted:
        peer, _, variant = item.partition("/")
        if peer not in PEERS:
            raise SystemExit(f"There is no peer {peer!r}; there are {', '.join(PEERS)}.")
        names = list(driver(peer).VARIANTS)
        if variant and variant not in names:
            raise SystemExit(f"{peer} has no variant {variant!r}; it has {', '.join(names)}.")
        pairs += [(peer, name) for name in ([variant] if variant else names)]
    return pairs
