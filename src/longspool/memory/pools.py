"""The pools of an engine: one per layer, kind of storage and tier, shared by all its requests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from torch import Tensor

from ..errors import LongspoolError, OutOfMemory
from ..method import Method
from ..plan import LayerPlan, Plan
from ..roles import Encode, Field, Place, Select
from ..values import Shape
from ..values.fit import Fit
from .fits import Fits
from .pool import Ledger, Pool, cut, size
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
        self._stages: dict[tuple[LayerPlan, int], Pool] = {}

    def recent(self, layer: int, plan: LayerPlan) -> Pool:
        """Raw pages on the device."""
        return self._pool(layer, Raw(plan.dtype).fields(self.shape, plan.page, 1), plan.page, "device")

    def open(self, plan: Plan, wanted: int) -> None:
        """Make the files of a plan whose pages live on the disk. Raises OutOfMemory where a directory takes none, or not so many bytes."""
        for layer, own in enumerate(plan.layers):
            place = own.one(Place)
            if place is None or place.home != "disk" or (own.joint and layer != own.joint[0]):
                continue
            self.settled(layer, own)
            folder = place.folder() or tempfile.gettempdir()
            if (free := shutil.disk_usage(folder).free) < wanted:
                raise OutOfMemory(
                    f"This request needs up to {wanted:,} bytes on the disk and {folder} has {free:,}; free some room, name another "
                    "directory, or shorten the prompt."
                )

    def settled(self, layer: int, plan: LayerPlan) -> Pool:
        """Encoded pages with their summaries, positions and log-weights, on the tier that the plan's Place names."""
        place, fields = plan.one(Place), settled_fields(plan, self.shape)
        if place is None or place.home == "device":
            made = self._pool(layer, fields, plan.page, "device")
        else:
            made = self._pool(layer, fields, plan.page, place.home, piece(plan), place.folder())
        made.books = self.books(plan)
        return made

    def books(self, plan: LayerPlan) -> Pool | None:
        """Where what the plan's codec learns is kept, for all layers."""
        fields = encoder(plan).learns(self.shape, max(len(plan.joint), 1))
        return self._pool(-1, fields, 1, "device") if fields else None

    def stage(self, plan: LayerPlan, grain: int) -> Pool:
        """Device pages of `grain` tokens, for what is fetched from another tier or of larger pages."""
        if (plan, grain) not in self._stages:
            made = self._stages[plan, grain] = self._pool(-1, staged_fields(plan, self.shape, grain), grain, "device")
            made.books = self.books(plan)
        return self._stages[plan, grain]

    def shelf(self, plan: LayerPlan) -> Pool:
        """Host pages for copies of what lies on the disk."""
        return self._pool(-1, staged_fields(plan, self.shape, piece(plan), away=True), piece(plan), "host")

    def _pool(self, layer: int, fields: dict[str, Field], page: int, tier: str, piece: int = 0, folder: str = "") -> Pool:
        key = (layer, tuple(fields.items()), page, tier, piece, folder)
        if key not in self._made:
            room = self.capacity if tier == "device" else self.beyond
            self._made[key] = Pool(
                fields, page, tier, self.ledger, room, self.device, self.fits, piece=piece, reserve=self.capacity, folder=folder
            )
        return self._made[key]

    def check(self) -> None:
        """Raise AssertionError where a pool's books, or the ledger's, don't balance."""
        for pool in self._made.values():
            pool.check()


class Summaries:
    """The page summaries of one layer in a pool that several layers, or all heads, share: one for each head's id of a page."""

    def __init__(self, pool: Pool, plan: LayerPlan, layer: int) -> None:
        self.pool, self.page, self.joins = pool, pool.page, plan.joins
        self.suffix = f".{plan.joint.index(layer)}" if plan.joint else ""

    def __getitem__(self, name: str) -> Tensor:
        held = self.pool[name + self.suffix]
        return held.flatten(0, 1) if self.joins else held

    def fitted(self, method: Method) -> Fit:
        return self.pool.fitted(method)

    def learnt(self, name: str, pages: Tensor) -> Tensor:
        return self.pool.learnt(name, pages)

    def booked(self, pages: Tensor) -> Tensor:
        return self.pool.booked(pages)


def encoder(plan: LayerPlan) -> Encode:
    """The plan's codec, or the raw one."""
    return plan.one(Encode) or Raw(plan.dtype)


def piece(plan: LayerPlan) -> int:
    """Tokens of a page that are read together while decoding: as the plan's Select says, as far as its codec can be read in pieces."""
    select, codec = plan.one(Select), encoder(plan)
    wanted = plan.page if select is None else select.piece(plan.page)
    return wanted if codec.unit and wanted % codec.unit == 0 else plan.page


def read_fields(plan: LayerPlan, shape: Shape) -> dict[str, Field]:
    """What attention reads of a settled page, of one KV head or of all."""
    codec, layers = encoder(plan), max(len(plan.joint), 1)
    fields = dict(codec.fields(shape, plan.page, layers))
    if codec.learns(shape, layers):
        fields["book"] = Field((2,), torch.int32, resident=True)
    if plan.ragged:
        fields["pos"] = Field((plan.page,), torch.int32, resident=True, tokens=0)
    if plan.weighted:
        fields["weight"] = Field((plan.page,), torch.float32, resident=True, tokens=0)
    return fields


def settled_fields(plan: LayerPlan, shape: Shape) -> dict[str, Field]:
    """What a settled page stores: of one layer and KV head, or of all that share it, each with a summary of its own."""
    fields, layers = read_fields(plan, shape), max(len(plan.joint), 1)
    if select := plan.one(Select):
        heads = (shape.kv_heads,) if plan.joins else ()
        own = {name: replace(f, shape=(*heads, *f.shape), resident=True) for name, f in select.fields(shape, plan.page).items()}
        fields |= own if layers == 1 else {f"{name}.{i}": field for name, field in own.items() for i in range(layers)}
    return fields


def staged_bytes(plan: LayerPlan, shape: Shape) -> int:
    """Bytes of what a page takes at most where it is brought: in one, or in the pieces that a Select reads."""
    return max(size(staged_fields(plan, shape, grain)) * (plan.page // grain) for grain in (plan.page, piece(plan)))


def staged_fields(plan: LayerPlan, shape: Shape, grain: int, away: bool = False) -> dict[str, Field]:
    """What of `grain` tokens is brought near to be read: everything that attention reads, or only what does not lie on the device."""
    fields = cut(read_fields(plan, shape), plan.page // grain)
    return {name: replace(f, resident=False) for name, f in fields.items() if not (away and f.resident)}
