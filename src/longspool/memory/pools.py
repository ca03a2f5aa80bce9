"""The pools of an engine: one per layer, kind of storage and tier, shared by all its requests."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from ..errors import LongspoolError
from ..method import Method
from ..plan import LayerPlan
from ..roles import Encode, Field, Place, Select
from ..values import Shape
from ..values.fit import Fit
from .fits import Fits
from .pool import Ledger, Pool
from .raw import Raw

Matrix = Callable[[int, str], Tensor]
"""A matrix of the model by layer and name, fp32."""
Spell = Callable[[int], str]
"""A token's text."""


def _no_matrix(layer: int, name: str) -> Tensor:
    raise LongspoolError(f"A method asks for the matrix {name!r} of layer {layer}, and these memories belong to no model.")


def _no_text(token: int) -> str:
    raise LongspoolError("A method looks at the text of tokens, and these memories know no tokenizer.")


class Pools:
    """Makes pools on demand. `capacity` is the address space in bytes of each on the device, the machine's memory that of the others;
    what is not touched costs nothing. `matrix` gives what methods may see of the model's weights, `spell` what its tokens say."""

    def __init__(
        self,
        shape: Shape,
        capacity: int,
        device: torch.device | None = None,
        fits: Fits | None = None,
        matrix: Matrix | None = None,
        spell: Spell | None = None,
    ) -> None:
        self.shape, self.capacity, self.device = shape, capacity, device
        self.fits = Fits() if fits is None else fits
        self.matrix, self.spell = matrix or _no_matrix, spell or _no_text
        self.beyond = max(psutil.virtual_memory().total, capacity)
        self.ledger = Ledger()
        self._made: dict[tuple[object, ...], Pool] = {}

    def recent(self, layer: int, plan: LayerPlan) -> Pool:
        """Raw pages on the device."""
        return self._pool(layer, Raw(plan.dtype).fields(self.shape, plan.page, 1), plan.page, "device")

    def settled(self, layer: int, plan: LayerPlan) -> Pool:
        """Encoded pages with their summaries, positions and log-weights, on the tier that the plan's Place names."""
        place = plan.one(Place)
        return self._pool(layer, settled_fields(plan, self.shape), plan.page, place.home if place else "device")

    def stage(self, like: Pool) -> Pool:
        """Device pages of the same form, for what is fetched from another tier."""
        return self._pool(-1, like.fields, like.page, "device")

    def _pool(self, layer: int, fields: dict[str, Field], page: int, tier: str) -> Pool:
        key = (layer, tuple(fields.items()), page, tier)
        if key not in self._made:
            room = self.capacity if tier == "device" else self.beyond
            self._made[key] = Pool(fields, page, tier, self.ledger, room, self.device, self.fits)
        return self._made[key]

    def check(self) -> None:
        """Raise AssertionError where a pool's books, or the ledger's, don't balance."""
        for pool in self._made.values():
            pool.check()


class Summaries:
    """The page summaries of one layer in a pool that several layers share."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index, self.page = pool, index, pool.page

    def __getitem__(self, name: str) -> Tensor:
        return self.pool[f"{name}.{self.index}"]

    def fitted(self, method: Method) -> Fit:
        return self.pool.fitted(method)


def encoder(plan: LayerPlan) -> Encode:
    """The plan's codec, or the raw one."""
    return plan.one(Encode) or Raw(plan.dtype)


def settled_fields(plan: LayerPlan, shape: Shape) -> dict[str, Field]:
    """What a settled page of one KV head stores: of one layer, or of all that share it, each with a summary of its own."""
    layers = max(len(plan.joint), 1)
    fields = dict(encoder(plan).fields(shape, plan.page, layers))
    if select := plan.one(Select):
        own = select.fields(shape, plan.page)
        fields |= own if layers == 1 else {f"{name}.{i}": field for name, field in own.items() for i in range(layers)}
    if plan.ragged:
        fields["pos"] = Field((plan.page,), torch.int32)
    if plan.weighted:
        fields["weight"] = Field((plan.page,), torch.float32)
    return fields
