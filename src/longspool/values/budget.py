"""One budget type everywhere: tokens (1024), a ratio ("30%") or bytes ("2GiB")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import LongspoolError

Budget = int | str
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b\s*", re.IGNORECASE)
_RATIO = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Measure:
    """What turns a budget into tokens: the tokens seen so far and the bytes of one token over all rows and layers."""

    total: int
    token_bytes: float


def parse_bytes(text: str | int) -> int:
    """ "2GiB", "500MB", "64kb" or a plain number, in bytes."""
    if isinstance(text, int):
        return text
    if text.strip().isdigit():
        return int(text)
    if not (m := _BYTES.fullmatch(text)):
        raise LongspoolError(f"{text!r} is no amount of memory; write for example '8GiB', '500MB' or a number of bytes.")
    return int(float(m[1]) * _UNITS[m[2].lower()])


def tokens(budget: Budget, measure: Measure) -> int:
    """A budget in tokens per row. Raises LongspoolError for one that is not understood."""
    if isinstance(budget, int):
        return budget
    if m := _RATIO.fullmatch(budget):
        return max(int(measure.total * float(m[1]) / 100), 1)
    return max(int(parse_bytes(budget) / measure.token_bytes), 1)


def counts_tokens(budget: Budget) -> bool:
    """Whether it is understood without knowing the model: tokens or a ratio."""
    return isinstance(budget, int) or _RATIO.fullmatch(budget) is not None


def problems(budget: Budget, least: int) -> list[str]:
    """Sentences that say what is wrong with a budget; `least` tokens are protected and must fit."""
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        return [f"budget={budget!r} must be a number of tokens, a ratio such as '30%' or an amount such as '2GiB'."]
    if isinstance(budget, int):
        return [] if budget > least else [f"budget={budget} tokens must be more than the {least} that sinks and window protect."]
    if m := _RATIO.fullmatch(budget):
        return [] if 0 < float(m[1]) <= 100 else [f"budget={budget!r} must be above 0% and at most 100%."]
    try:
        return [] if parse_bytes(budget) > 0 else [f"budget={budget!r} must be more than nothing."]
    except LongspoolError:
        return [f"budget={budget!r} is neither tokens (1024) nor a ratio ('30%') nor bytes ('2GiB')."]
