"""The sampling flags, the same for every command that answers. A test holds them to the fields of `Sampling`.

They are not read off `Sampling` itself, since importing it imports torch and `longspool --help` must not wait for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from ..errors import LongspoolError

if TYPE_CHECKING:
    from ..engine.sampler import Sampling

Value = float | int | str | bool | list[str] | list[int] | None
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Wish:
    """One flag: a field of Sampling, the flag's type, default and help, and its names and placeholder where they are not the usual ones."""

    field: str
    kind: object
    default: Value
    help: str
    names: tuple[str, ...] = ()
    placeholder: str | None = None


WISHES = (
    Wish("max_tokens", int, 128, "The longest answer."),
    Wish("temperature", float, 0.0, "0 always takes the likeliest token; higher varies more.", ("--temperature", "-t")),
    Wish("top_k", int, 0, "Draw from so many likeliest tokens; 0 is off."),
    Wish("top_p", float, 1.0, "Draw from the likeliest tokens that hold this share; 1 is off."),
    Wish("min_p", float, 0.0, "Draw from tokens at least this likely against the likeliest; 0 is off."),
    Wish("repetition_penalty", float, 1.0, "Divides logits of tokens already seen; 1 is off."),
    Wish("presence_penalty", float, 0.0, "Subtracted once for tokens of the answer; 0 is off."),
    Wish("frequency_penalty", float, 0.0, "Subtracted for every occurrence in the answer; 0 is off."),
    Wish("logit_bias", list[str] | None, None, "Added to a token's logit (-inf bans it); may be repeated.", (), "TOKEN=BIAS"),
    Wish("seed", int | None, None, "The same seed draws the same answer; without one it is random."),
    Wish("stop", list[str] | None, None, "End the answer before this text; may be repeated.", (), "TEXT"),
    Wish("stop_tokens", list[int] | None, None, "End the answer at this token id; may be repeated.", ("--stop-token",), "ID"),
    Wish("ignore_eos", bool, False, "Go on when the model ends its answer.", ("--ignore-eos",)),
    Wish("logprobs", int | None, None, "Report each token's log-probability and so many best ones (with --json)."),
    Wish("n", int, 1, "How many answers to draw.", ("-n",)),
)


def wishing(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's parameter `sampling` becomes one flag for each wish, but those left out."""
    wishes = [w for w in WISHES if w.field not in without]

    def dress(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, localns={"Sampling": object}, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "sampling"]
        flags = [inspect.Parameter(w.field, _KEYWORD, default=w.default, annotation=_flag(w)) for w in wishes]

        def run(**given: Value) -> None:
            chosen = {w.field: given.pop(w.field) for w in wishes}
            command(sampling=_sampling(chosen), **given)

        shown = [*(p.replace(kind=_KEYWORD, annotation=hints[p.name]) for p in own), *flags]
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return dress


def _flag(wish: Wish) -> object:
    return Annotated[wish.kind, typer.Option(*wish.names, help=wish.help, metavar=wish.placeholder)]


def _sampling(chosen: dict[str, Value]) -> Sampling:
    from ..engine.sampler import Sampling

    bias = tuple(_bias(text) for text in chosen.pop("logit_bias", None) or ())  # type: ignore[union-attr]
    tidy = {name: tuple(value or ()) if name in ("stop", "stop_tokens") else value for name, value in chosen.items()}  # type: ignore[arg-type]
    return Sampling(logit_bias=bias, **tidy)  # type: ignore[arg-type]


def _bias(text: object) -> tuple[int, float]:
    token, _, bias = str(text).partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise LongspoolError(f"--logit-bias {text!r} must be a token id and a number, for example 7=-1.5.") from None
