"""The memory: pages, zones, layers."""

from .attend import advance, attend, write
from .disk import DamagedPage
from .fits import Fits, fitted_in
from .heap import give_back_large_blocks
from .index import learn
from .layer import LayerMemory
from .memory import Memory, dense_bytes
from .pool import Ledger, Pool
from .pools import Pools
from .raw import DTYPES, Raw
from .view import LayerView

__all__ = [
    "DTYPES",
    "DamagedPage",
    "Fits",
    "LayerMemory",
    "LayerView",
    "Ledger",
    "Memory",
    "Pool",
    "Pools",
    "Raw",
    "advance",
    "attend",
    "dense_bytes",
    "fitted_in",
    "give_back_large_blocks",
    "learn",
    "write",
]
