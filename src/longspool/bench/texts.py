"""Real English that needs no download: the reference pages that every Python carries, cut into texts and hidden needles."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
CUE = 64


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


def repeats(tokenizer: Tokenizer, count: int, length: int, forced: int, seed: int) -> list[Text]:
    """Texts as those of `prose`, at whose end a passage from depths between 0 and 1 begins again: `CUE` tokens of it end the prompt, the
    `forced` that follow are its continuation (the repetition task of SparQ, arXiv:2312.04985)."""
    if (room := length - 2 * CUE - forced) < 1:
        raise LongspoolError(f"A passage and its repetition take {length - room} tokens; {length} are too few.")
    made = []
    for i, text in enumerate(prose(tokenizer, count, length, forced, seed)):
        start = _sentence(text.ids[:room], (i + 0.5) / count, tokenizer)
        made.append(Text((*text.ids[: length - CUE], *text.ids[start : start + CUE + forced]), length, length, (i + 0.5) / count))
    return made


def _sentence(ids: Sequence[int], depth: float, tokenizer: Tokenizer) -> int:
    """The end of a sentence that is nearest to a depth; the depth itself where no sentence ends."""
    (dot,), at = tokenizer.encode("."), round(depth * len(ids))
    return min([i + 1 for i, t in enumerate(ids) if t == dot] or [at], key=lambda i: abs(i - at))


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
    cut = _sentence(straw, depth, tokenizer)
    context = head + straw[:cut] + needle + straw[cut:]
    ids = context + tail
    blanks = next(i for i, token in enumerate(said) if tokenizer.decode([token]).strip())  # a line break is as good an answer's begin
    return Text((*ids, *said), len(ids) if aware else len(context), len(ids) + blanks, depth)
