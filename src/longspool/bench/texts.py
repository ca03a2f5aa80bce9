"""Real English that needs no download: the reference pages that every Python carries, cut into texts and hidden needles."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..errors import LongspoolError
from ..model.tokenizer import Tokenizer

KEYS = (
    "harbour", "violin", "glacier", "lantern", "orchard", "compass", "meadow", "furnace", "pebble", "saddle",
    "anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jungle",
)  # fmt: skip
TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
    "afterwards.\n{text}\nWhat is the special magic number for {key} mentioned in the provided text?"
)
NEEDLE = " One of the special magic numbers for {key} is: {answer}."
PREFIX = "The special magic number for {key} mentioned in the provided text is:"
_HOLE = "<HAYSTACK>"


@dataclass(frozen=True)
class Text:
    """Token ids of which the first `prompt` are read as a prompt and the others fed one by one, and of these only those from `scored`
    on count: what stands there is the answer."""

    ids: tuple[int, ...]
    prompt: int
    scored: int
    depth: float = 0.0


def english() -> str:
    """About 460 KB of prose."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prose(tokenizer: Tokenizer, count: int, length: int, forced: int, seed: int) -> list[Text]:
    """So many texts of `length` tokens with `forced` more that follow, from places apart. Raises LongspoolError where there are fewer."""
    ids, room = tokenizer.encode(english()), length + forced
    slots = len(ids) // room
    if slots < count:
        raise LongspoolError(f"The bundled English holds {slots} texts of {room:,} tokens, not {count}; ask for fewer or shorter ones.")
    gap = len(ids) // slots
    starts = random.Random(seed).sample(range(slots), count)
    return [Text(tuple(ids[s * gap : s * gap + room]), length, length) for s in starts]


def needles(tokenizer: Tokenizer, count: int, length: int, seed: int, aware: bool) -> list[Text]:
    """Prompts of `length` tokens that hide a number at depths from 0 to 1, and the number. `aware`: the question is part of what is read
    as a prompt; else it comes after it, when a memory has made its choices. The wording is RULER's (arXiv:2404.06654), niah_single_2."""
    hay, draw = tokenizer.encode(english()), random.Random(seed)
    return [_needle(tokenizer, hay, (i + 0.5) / count, length, draw, aware) for i in range(count)]


def _needle(tokenizer: Tokenizer, hay: list[int], depth: float, length: int, draw: random.Random, aware: bool) -> Text:
    key, answer = draw.choice(KEYS), str(draw.randrange(1_000_000, 10_000_000))
    chat = tokenizer.render([{"role": "user", "content": TASK.format(text=_HOLE, key=key)}])
    before, after = (chat + PREFIX.format(key=key)).split(_HOLE)
    head, tail, needle, said = (tokenizer.encode(part) for part in (before, after, NEEDLE.format(key=key, answer=answer), f" {answer}"))
    room = length - len(head) - len(tail) - len(needle)
    if room < 1:
        raise LongspoolError(f"A needle, its question and the chat format take {length - room} tokens; {length} are too few.")
    start = draw.randrange(len(hay) - room)
    straw = hay[start : start + room]
    dot = tokenizer.encode(".")[0]
    ends = [i + 1 for i, t in enumerate(straw) if t == dot] or [room]
    cut = min(ends, key=lambda i: abs(i - depth * room))
    context = head + straw[:cut] + needle + straw[cut:]
    ids = context + tail
    blanks = next(i for i, token in enumerate(said) if tokenizer.decode([token]).strip())  # a line break is as good an answer's begin
    return Text((*ids, *said), len(ids) if aware else len(context), len(ids) + blanks, depth)
