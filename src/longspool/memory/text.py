"""The tokens of a request by position, for methods that look at what is written."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .pools import Pools


class Text:
    """Token ids, int32. Rolled back tokens are overwritten by those that are read in their place."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.ids = np.zeros(0, np.int32)

    def read(self, ids: Tensor, first: int) -> None:
        """Note new tokens from position `first` on."""
        self.put(np.concatenate([self.ids[:first], ids.cpu().numpy().astype(np.int32)]))

    def put(self, ids: np.ndarray) -> None:
        self.pools.ledger.add("device", ids.nbytes - self.ids.nbytes)
        self.ids = ids

    def pieces(self, pos: Tensor) -> list[str]:
        """The text of each token at these positions."""
        return [self.pools.spell(int(token)) for token in self.ids[pos.cpu().numpy()]]

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes
