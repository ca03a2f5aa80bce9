"""Ascending positions of the recent tokens: a range while they are contiguous, an array once tokens have vanished between."""

from __future__ import annotations

import numpy as np


class Positions:
    """A queue of ascending positions."""

    def __init__(self) -> None:
        self._known: range | np.ndarray = range(0)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def last(self) -> int:
        return int(self._known[-1])

    def append(self, new: np.ndarray) -> None:
        known, n = self._known, len(new)
        contiguous = n == 1 or int(new[-1]) - int(new[0]) == n - 1
        if isinstance(known, range) and contiguous and (not known or known.stop == new[0]):
            self._known = range(known.start if known else int(new[0]), int(new[-1]) + 1)
        else:
            self._known = np.concatenate([self.array(), new])

    def array(self, count: int | None = None) -> np.ndarray:
        """The first `count` positions (None: all), int64."""
        known = self._known[:count]
        return np.arange(known.start, known.stop) if isinstance(known, range) else known.copy()

    def below(self, pos: np.ndarray | int) -> np.ndarray:
        """How many tokens have a position lower than each of pos, int64."""
        known = self._known
        if isinstance(known, range):
            return np.clip(np.asarray(pos) - known.start, 0, len(known))
        return np.asarray(np.searchsorted(known, pos))

    def drop(self, count: int) -> None:
        """Forget the first tokens."""
        self._known = self._known[count:]

    def keep(self, count: int) -> None:
        """Keep the first tokens only."""
        self._known = self._known[:count]

    def copy(self) -> Positions:
        twin = Positions()
        twin._known = self._known
        return twin

    @property
    def nbytes(self) -> int:
        return 0 if isinstance(self._known, range) else self._known.nbytes
