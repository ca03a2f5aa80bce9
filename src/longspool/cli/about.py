"""`info` and `check`: what a model is, and what a recipe would do on it."""

from __future__ import annotations

import dataclasses
from itertools import groupby

from rich.table import Table

from ..engine.engine import ALONE
from ..engine.estimate import need
from ..engine.fitting import Owner
from ..errors import LongspoolError
from ..memory import DTYPES, dense_bytes, fitted_in
from ..method import Needs
from ..model.config import Config
from ..model.load import Loaded, fingerprint, load, locate
from ..model.sources import DirectorySource, GGUFSource, Source
from ..plan import LAYERED, LayerPlan, Plan, resolve
from ..recipe import parse
from ..roles import SEATS
from . import show
from .listing import drawn

Facts = dict[str, dict[str, object]]


def facts(model: str, weights: str | None) -> Facts:
    """Config, load report and KV cost of a model, as JSON has them."""
    with show.Bar("starting") as bar:
        loaded = load(model, weights, progress=bar.fraction)
    shape, report = loaded.model.shape, dataclasses.asdict(loaded.report)
    dense = resolve((), shape)
    return {
        "config": _config(loaded),
        "load": {**report, "path": str(report["path"]), "notes": list(report["notes"]), "fingerprint": loaded.fingerprint},
        "kv": {"bytes_per_token": dense_bytes(dense, 1), "bytes_full_context": dense_bytes(dense, shape.context)},
    }


def plain(facts: Facts) -> str:
    """The same for people."""
    table = Table.grid(padding=(0, 2))
    for name, value in (pair for group in ("config", "load") for pair in facts[group].items()):
        if value in (None, []):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{count} {kind}" for kind, count in value.items())
        elif isinstance(value, list):
            value = "; ".join(map(str, value))
        shown = show.size(value) if name == "bytes_packed" and isinstance(value, int) else f"{value:,}" if isinstance(value, int) else value
        table.add_row(name.replace("_", " "), f"{shown:.2f}" if isinstance(shown, float) else str(shown))
    token, full = (int(str(facts["kv"][name])) for name in ("bytes_per_token", "bytes_full_context"))
    table.add_row("KV memory", f"{token:,} bytes a token, {show.size(full)} for the full context (dense, 2-byte floats)")
    return drawn(table)


def plan(recipe: str, model: str, kv: str) -> str:
    """Seats, needs and predicted bytes of a recipe. Raises PlanError with every reason why it can't run."""
    if kv not in DTYPES:
        raise LongspoolError(f"kv={kv!r} is none of {', '.join(DTYPES)}.")
    items, source = parse(recipe), _source(model)
    shape = Config.from_hf(source.config).shape
    made = resolve(items, shape, DTYPES[kv])
    head = f"{made} on {model}: {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, up to {made.context:,} tokens"
    return drawn(head, "", _seats(made), "", *_asked(made), *_fits(made, source, model), _bytes(made))


def _seats(plan: Plan) -> Table:
    table = Table("layers", "seats", "needs", box=None, header_style="bold", pad_edge=False)
    whole = [f"{seat.__name__} {m}" for seat in SEATS for m in plan.methods if isinstance(m, seat) and not isinstance(m, LAYERED)]
    if whole:
        table.add_row("all", ", ".join(whole), "")
    for layer, run in groupby(enumerate(plan.layers), key=lambda pair: pair[1]):
        numbers = [number for number, _ in run]
        table.add_row(f"{numbers[0]}-{numbers[-1]}", _filled(layer), _needs(layer.needs))
    return table


def _asked(plan: Plan) -> list[str]:
    """What a second question must know of methods that look at the first."""
    aware = [m.slug for m in plan.methods if m.aware()]
    told = [f"{slug} drops by the question at the prompt's end: a later question may miss what it dropped." for slug in aware]
    return [*told, ""] if told else []


def _filled(layer: LayerPlan) -> str:
    on = [f"{seat.__name__} {m}" for seat in SEATS for m in layer.chain(seat) if isinstance(m, LAYERED)]
    on += [f"layers {', '.join(map(str, layer.joint))} share pages"] if layer.joint else []
    return ", ".join(on) or ("dense" if layer.window is None else f"a window of {layer.window:,} tokens")


def _needs(needs: Needs) -> str:
    named = [(f.name, getattr(needs, f.name), f.default) for f in dataclasses.fields(needs)]
    return ", ".join(f"{name} {value}" if value is not True else name for name, value, default in named if value != default) or "nothing"


def _bytes(plan: Plan) -> Table:
    table = Table("tokens", "KV bytes at the peak, predicted", "dense", box=None, header_style="bold", pad_edge=False)
    lengths = [n for n in (1024, 4096, 16384, 65536, 262144) if n < plan.context] + [plan.context]
    for tokens in lengths:
        table.add_row(f"{tokens:,}", show.size(need(plan, tokens, ALONE)), show.size(dense_bytes(plan, tokens)))
    return table


def _source(model: str) -> Source:
    """A model's files, of which none is read whole."""
    path = locate(model)
    return GGUFSource(path) if path.is_file() else DirectorySource(path)


def _fits(plan: Plan, source: Source, model: str) -> list[str]:
    """Whether what its methods are fitted to is there."""
    if not (methods := fitted_in(plan.methods)):
        return []
    owner, told = Owner(fingerprint(source, None), model), []
    for method in dict.fromkeys(methods):
        path = owner.place(method)
        told.append(
            f"{method.slug} is fitted by {path}." if path.is_file() else f"{method.slug} must be fitted first: {owner.command(method)}"
        )
    return [*told, ""]


def _config(loaded: Loaded) -> dict[str, object]:
    shape, config = loaded.model.shape, loaded.model.config
    windows = [w for w in shape.windows if w is not None]
    return {
        "architecture": config.family,
        "layers": shape.layers,
        "width": shape.width,
        "inner": config.inner,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab": shape.vocab,
        "context": shape.context,
        "sliding_layers": len(windows),
        "window": windows[0] if windows else None,
    }
