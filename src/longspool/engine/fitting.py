"""Methods fitted to a model: made once, kept in the user's cache, and loaded when a plan asks for them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import LongspoolError, ModelError, PlanError
from ..memory import Fits, fitted_in
from ..memory.sealed import Entry, Form, checked, replace
from ..method import Method
from ..model.build import Model
from ..model.pull import cache
from ..model.tokenizer import Tokenizer
from ..plan import Item, resolve
from ..roles import Fitted
from ..values import Shape
from ..values.fit import Fit
from .corpus import prose
from .samples import Runs, cut

FORMAT = "longspool-fit-1"
LEAST = 64  # tokens
_FORM = Form(FORMAT, "fitted file", ModelError)


@dataclass(frozen=True)
class Owner:
    """The model that methods are fitted to: its fingerprint, what the user calls it, where fitted files are kept, and where it computes."""

    fingerprint: str
    name: str
    cache_dir: Path | None = None
    device: torch.device | None = None

    def place(self, method: Fitted) -> Path:
        """Where a method's fitted file is, or would be."""
        if method.file:
            return Path(method.file).expanduser()
        shaped = "".join(f",{name}={value}" for name, value in method.shape_of().items())
        stem = re.sub(r"[^\w.,=-]", "_", method.slug + shaped)
        return cache(self.cache_dir) / "fits" / self.fingerprint[:16] / f"{stem}.safetensors"

    def command(self, method: Fitted) -> str:
        """What makes it."""
        given = {name: value for name, value in method.shape_of().items() if value != repr(_default(method, name))}
        said = ", ".join(f"{name}={value}" for name, value in (given | ({"file": repr(method.file)} if method.file else {})).items())
        text = f'"{method.slug}({said})"' if said else method.slug
        return f"longspool fit {text} -m {self.name}"


def _default(method: Fitted, name: str) -> object:
    return type(method).__dataclass_fields__[name].default


@dataclass(frozen=True)
class Fitting:
    """What was made: the method, its file, the text's tokens, the tensors' bytes, and the seconds that it took."""

    method: str
    path: Path
    tokens: int
    tensors: int
    nbytes: int
    seconds: float


def fit(
    model: Model,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    owner: Owner,
    fits: Fits,
    text: str,
    tokens: int,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> Fitting:
    """Fit the one method of `items` that wants it, keep the result, and have it stand in `fits` for all that share it."""
    start = time.perf_counter()
    method = one_fitted([item.method for item in items], " + ".join(map(str, items)))
    resolve((Item(method),), model.shape)
    if tokens < LEAST:
        raise LongspoolError(f"tokens={tokens} must be at least {LEAST}.")
    ids = tokenizer.encode(text or prose(8 * tokens, seed))
    if len(ids) < tokens and text:
        raise LongspoolError(f"The text has {len(ids):,} tokens and {tokens:,} are wanted; give more text or fewer tokens.")
    pieces = cut(ids, tokens, model.shape.context)
    runs = Runs(model, pieces, method.needs().calibrated, seed, tokenizer.encode, progress=progress)
    tensors = {name: t.detach().contiguous() for name, t in method.fit(runs).items()}
    path, _ = keep(method, tensors, model.shape, owner)
    fits.forget(method)
    fits[method] = load(method, owner)
    count = sum(map(len, pieces))
    return Fitting(str(method), path, count, len(tensors), fits[method].nbytes, time.perf_counter() - start)


def keep(method: Fitted, tensors: dict[str, Tensor], shape: Shape, owner: Owner) -> tuple[Path, int]:
    """Write what a method was fitted to; where, and how many bytes. Raises ModelError where it can't be written."""
    path = owner.place(method)
    layers = [layer for layer, window in enumerate(shape.windows) if window is None]
    about = _about(method, owner) | {"layers": json.dumps(layers)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, replace(path, [Entry.of(name, t) for name, t in tensors.items()], about, _FORM)
    except OSError as error:
        raise ModelError(f"The fitted file can't be written to {path}: {error.strerror or error}.") from None


def complete(methods: Iterable[Method], fits: Fits, owner: Owner) -> None:
    """Load what these methods, and those within them, were fitted to and is not there yet.

    Raises PlanError with a reason for each that is missing or belongs to something else, ModelError for a damaged file."""
    reasons: list[str] = []
    for method in fitted_in(methods):
        if method in fits:
            continue
        try:
            fits[method] = fits.like(method) or load(method, owner)
        except PlanError as error:
            reasons += error.reasons
    if reasons:
        raise PlanError(*dict.fromkeys(reasons))


def load(method: Fitted, owner: Owner) -> Fit:
    """What a method was fitted to, from its file, which is read once and whole."""
    path = owner.place(method)
    if not path.is_file():
        where = f"and there is no file {path}" if method.file else "and that was not done for this model yet"
        raise PlanError(f"{method.slug} must be fitted to the model first, {where}: run `{owner.command(method)}`.")
    about = checked(path, _FORM)
    for key, own in _about(method, owner).items():
        if about.get(key) != own:
            raise PlanError(f"{path} {_WHAT[key].format(about.get(key), own)}; `{owner.command(method)}` makes one that fits.")
    with safe_open(path, "pt") as file:
        return Fit({name: file.get_tensor(name).to(owner.device) for name in file.keys()}, about["sha256"])  # noqa: SIM118


_WHAT = {
    "method": "was fitted for the method {}, and this is {}",
    "model": "was fitted to another model, {}, and this one is {}",
    "parameters": "was fitted with the parameters {}, and these are {}",
}


def _about(method: Fitted, owner: Owner) -> dict[str, str]:
    """What a file and whoever takes it must agree on."""
    shaped = ", ".join(f"{name}={value}" for name, value in method.shape_of().items())
    return {"method": method.slug, "model": owner.fingerprint, "parameters": shaped or "none"}


def one_fitted(methods: Iterable[Method], said: str) -> Fitted:
    """The one method of a recipe that can be fitted. Raises PlanError where it is none or several."""
    found = fitted_in(methods)
    if len(found) != 1:
        what = "names no method that is fitted to a model" if not found else f"names {len(found)} methods that are; fit them one by one"
        raise PlanError(f"{said!r} {what}.")
    return found[0]
